"""Makes targets of a model's folder, with config.json and safetensors: on our own decoder where its architecture is one
of outrider.core.engine.architectures, else through transformers. Independent of what tokens mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from outrider.core.assets import store
from outrider.core.device import free_memory
from outrider.core.engine import checkpoints
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.linear import fastest
from outrider.core.engine.loading import model_object
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import Network
from outrider.core.engine.offload import LayerOffload, offload_layers
from outrider.core.engine.quantization.published import converted
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.types import Config
from outrider.core.errors import OutriderError
from outrider.core.protocol import Target
from outrider.core.validation import dtype_name

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
_SMALLER = "load a smaller model, give offload=0.5 to keep half of the layers elsewhere, or take another device"


class LoadError(OutriderError):
    """The source is not a model that can run here."""


def stored_dtype(dtype: str) -> str:
    """The precision of what is not quantised."""
    return "bfloat16" if dtype.startswith("int") else dtype


def converted_dtype(dtype: str) -> str:
    """The precision that a GGUF file is converted to: "int4" keeps its weights of 4 bits."""
    return dtype if dtype == "int4" else stored_dtype(dtype)


def target_of_folder(
    folder: Path,
    dtype: str,
    device: torch.device,
    *,
    offload: float | None = None,
    kv_cache_dtype: str | None = None,
    drafting: bool = False,
) -> tuple[Callable[[], Target], int]:
    """A function that makes targets of a folder's weights, and the model's context length. `drafting`: see
    outrider.text.load."""
    described, stored = store.read_json(folder / "config.json"), stored_dtype(dtype)
    try:
        config = checkpoints.parse_config(described)
    except checkpoints.CheckpointError as error:
        if dtype != stored or offload is not None or kv_cache_dtype is not None:
            option = dtype if dtype != stored else "offload" if offload is not None else "kv_cache_dtype"
            raise LoadError(f"{option} needs our own decoder, but {error}") from None
        return model_object.adapted(store.transformers_model(folder, stored, device))
    tensors, precision = store.Checkpoint(folder), getattr(torch, stored)
    method = checkpoints.check_method(described)
    if method is not None and not converted(described):
        read = f"are dequantised to {stored}" + ("" if dtype == stored else f" and quantized to {dtype}")
        if dtype == "int4":
            read = f"keep their integers of 4 bits where these fit int4, with scales in {stored}; others {read}"
        warnings.warn(f"{folder.name}: weights that are stored in {method} {read}", stacklevel=3)
    if offload is None:
        kept = dtype == "int4" and method is not None  # 4 bits a weight, and scales
        _check_memory(folder.name, int(config.parameters * (0.6 if kept else precision.itemsize)), device)
    try:
        with tensors.progress(folder.name):
            dense_bits = 8 if converted(described) and not drafting else None
            readable = checkpoints.readable(described, tensors)
            network = _network(config, readable, dtype, precision, device, offload, dense_bits)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{folder.name} does not fit on {device}: {str(error).splitlines()[0][:120]}; {_SMALLER}"
        ) from None
    return partial(make_decoder, with_graphs(network), cache_bits=None if kv_cache_dtype is None else 8), config.context


def _check_memory(name: str, needed: int, device: torch.device) -> None:
    """Refuse weights that are larger than the free memory of a device."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise LoadError(
            f"{name} needs {needed / 1e9:.1f} GB for its weights and {device} has {free / 1e9:.1f} GB free; {_SMALLER}"
        )


def _network(
    config: Config,
    tensors: Mapping[str, torch.Tensor],
    dtype: str,
    precision: torch.dtype,
    device: torch.device,
    offload: float | None,
    dense_bits: int | None,
) -> Network:
    """The network of a checkpoint. Tensors are read from the files to the device one by one."""
    stored = dtype_name(precision, DTYPES)
    if dtype == stored and offload is not None:
        offloaded = LayerOffload(config.layers, offload, device=device)
        network = checkpoints.assemble(
            config, tensors, dtype=precision, device=device, convert=fastest, add=offloaded.add
        )
        network = offloaded.attach(network)
    elif dtype == stored:
        network = checkpoints.assemble(config, tensors, dtype=precision, device=device, convert=fastest)
    else:
        network = checkpoints.assemble(config, tensors, dtype=precision, device=device, keep_int4=dtype == "int4")
        network = quantize(network, int(dtype.removeprefix("int")), dense_bits=dense_bits)
        if offload is not None:
            network, _ = offload_layers(network, offload)
    return network
