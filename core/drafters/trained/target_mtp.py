"""The MTP layer within a target's own checkpoint, which transformers drops: DeepSeek-V3's (arXiv 2412.19437), GLM-4.5's
and Qwen3-Next's.

Its decoder layer is one of transformers' own class, so latent attention and mixtures of experts are computed as in the
target; its keys and values are in the head runner's cache. Names: `enorm`, `hnorm`, `eh_proj`, `shared_head.norm` and
the layer's own, at `model.layers.N`, N the number of layers; Qwen3-Next's are at `mtp`. Not trained here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.checkpoint_tensors import Take, own_embedding
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.adapters.model_parts import extra_layer
from outrider.core.engine.adapters.recurrent import RecurrentTarget
from outrider.core.engine.checkpoints import readable
from outrider.core.engine.trainable.block import AttentionMask
from outrider.core.engine.trainable.shared_embedding import for_inference
from outrider.core.errors import Incompatible

KINDS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next")  # model types whose checkpoints have such a layer
_QWEN = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
_PARTS = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head")


class _Slots:
    """A cache of one layer for transformers' attention, which writes to the store of an attention mask. Keys and values
    may differ in heads and size (latent attention keeps a latent and a rotary key): both are padded to [B, K, Q, d]."""

    def __init__(self, attn_mask: AttentionMask | None, shape: tuple[int, int]) -> None:
        self.attn_mask, self.shape = attn_mask, shape

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.attn_mask is None:
            self.shape = max(keys.shape[1], values.shape[1]), max(keys.shape[3], values.shape[3])
            return keys, values
        heads, size = self.shape
        new = [F.pad(part, (0, size - part.shape[3], 0, 0, 0, heads - part.shape[1])) for part in (keys, values)]
        seen_keys, seen_values = self.attn_mask.write(0, torch.cat(new, 1).transpose(1, 2))
        return (
            seen_keys[:, : keys.shape[1], :, : keys.shape[3]],
            seen_values[:, : values.shape[1], :, : values.shape[3]],
        )


class TransformersLayer(nn.Module):
    """A decoder layer of transformers in place of a `Block`. Its weights keep their precision and are not in the state
    dict."""

    def __init__(self, layer: Any, rotary: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts = (layer, rotary)  # in a tuple, so that torch does not register them as submodules
        probe = _Slots(None, (0, 0))
        x = torch.zeros(1, 1, hidden_size, dtype=dtype, device=device)
        self._run(x, None, torch.zeros(1, 1, dtype=torch.long, device=device), probe)
        heads, size = probe.shape
        self.cache_shape = heads, size + size % 2

    @torch.no_grad()
    def _run(self, x: Tensor, mask: Tensor | None, positions: Tensor, slots: _Slots) -> Tensor:
        layer, rotary = self.parts
        out = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=slots,
            use_cache=True,
            position_embeddings=rotary(x, positions),
        )
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states

    def forward(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        if attn_mask.layout is None:
            raise Incompatible("a target's own MTP layer drafts and is not trained here")
        x = x.to(next(self.parts[0].parameters()).dtype)
        positions = attn_mask.layout.positions.expand(len(x), -1)
        mask = attn_mask.bias(1, x.dtype)
        mask = None if mask is None else mask.expand(len(x), -1, -1, -1)
        return self._run(x, mask, positions, _Slots(attn_mask, self.cache_shape))

    @property
    def weight_bytes(self) -> int:
        """The bytes that a pass of one token reads: of the routed experts only the chosen ones."""
        config = self.parts[1].config
        experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None) or 1
        part = min(getattr(config, "num_experts_per_tok", 1) / experts, 1)
        weights = self.parts[0].named_parameters()
        return sum(
            int(weight.numel() * weight.element_size() * (part if ".experts." in name else 1))
            for name, weight in weights
        )


class TargetMtp(MtpModules):
    """A target's own MTP layer, applied again to its own normed states. DeepSeek's reference reads the target's normed
    state and does not say what later steps read; SGLang and vLLM feed back the state after `shared_head.norm`."""

    def __init__(self, target: Any, layer: TransformersLayer, *, own: bool, own_embedding: bool) -> None:
        heads, size = layer.cache_shape
        form = {"kv_heads": heads, "head_dim": size}
        super().__init__(target, form=form, normed_output=True, layer=layer, own=own, own_embedding=own_embedding)

    @property
    def pass_bytes(self) -> int:
        return super().pass_bytes + int(self.chain[0].block.weight_bytes)

    def drafts(self, target: Any) -> Any:
        """The head itself: it is not trained further."""
        return for_inference(self, target.network.dtype, target.network.device)


def read_target_mtp(
    described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any
) -> tuple[TargetMtp, dict[str, Tensor]]:
    """The MTP layer of a target's checkpoint, and its weights by their names in the head."""
    kind = described.get("model_type")
    count = described.get("num_nextn_predict_layers", 1 if kind == "qwen3_next" else None)
    if kind not in KINDS or count != 1:
        raise Incompatible(
            f"the checkpoint has {count} MTP layers of '{kind}', which can't be read; one layer of {', '.join(KINDS)} "
            "can. Decode this target without it, for instance with drafter='auto'"
        )
    if not isinstance(target, TransformersTarget | RecurrentTarget) or target.model.config.model_type != kind:
        raise Incompatible(f"the MTP layer is of a '{kind}', and this target is another model; give its own checkpoint")
    names = _QWEN if kind == "qwen3_next" else {f"model.layers.{described['num_hidden_layers']}.": ""}
    stored = readable(described, tensors)
    named = {
        name.replace(at, ours, 1): stored[name] for at, ours in names.items() for name in stored if name.startswith(at)
    }
    take = Take({name: tensor for name, tensor in named.items() if name.startswith(_PARTS)})
    weights = {
        "chain.0.embedded.weight": take("enorm.weight"),
        "chain.0.entered.weight": take("hnorm.weight"),
        "chain.0.fuse.weight": take("eh_proj.weight"),
        "norm.weight": take("shared_head.norm.weight"),
    }
    if kind == "qwen3_next":  # its norms multiply by 1 + weight
        weights |= {name: 1 + tensor.float() for name, tensor in weights.items() if "fuse" not in name}
    rows = named.get("shared_head.head.weight")
    take.left.discard("shared_head.head.weight")
    theirs: Any = target.network.head
    own = rows is not None and not torch.equal(rows.to(target.dtype), theirs.weight.cpu())
    other_embedding = own_embedding(named, target, trained=True)
    take.done()
    given = {name: tensor for name, tensor in named.items() if not name.startswith(_PARTS)}
    layer, rotary = extra_layer(target.model, given)
    wrapped = TransformersLayer(layer, rotary, target.config.hidden_size, target.dtype, target.device)
    head = TargetMtp(target, wrapped, own=own, own_embedding=other_embedding)
    if own and rows is not None:
        weights["words.own.weight"] = rows
    if other_embedding:
        weights["words.embedding"] = named["embed_tokens.weight"]
    return head, weights
