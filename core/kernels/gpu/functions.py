"""The kernels by name: those of a pass, of quantized weights and of sampling."""

from outrider.core.kernels.gpu.norm import add_norm_
from outrider.core.kernels.gpu.products import MAX_ROWS, int4_product, int8_product, swiglu, swiglu_product
from outrider.core.kernels.gpu.rotary import rotate_and_write_
from outrider.core.kernels.gpu.sampling import top_k, top_p
from outrider.core.kernels.gpu.tree_attention import counters, tree_attention

__all__ = [
    "MAX_ROWS",
    "add_norm_",
    "counters",
    "int4_product",
    "int8_product",
    "rotate_and_write_",
    "swiglu",
    "swiglu_product",
    "top_k",
    "top_p",
    "tree_attention",
]
