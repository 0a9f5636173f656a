"""A mixture of experts in place of a layer's MLP (Mixtral, arXiv 2401.04088; Qwen3-MoE; gpt-oss).

Each token is computed by the few experts that a router chooses for it. Independent of layers and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.linear import Dense, Linear

_FEW = 4  # copying the weights of chosen experts pays up to a quarter of all experts


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The shape of a model's mixtures of experts."""

    experts: int
    chosen: int  # per token
    intermediate_size: int  # of an expert
    layers: tuple[bool, ...]  # whether each layer has one
    normalized: bool = True  # the weights of a token's experts sum to 1
    limit: float | None = None  # clamps gate and up, and adds 1 to up, as in gpt-oss; None: plain SwiGLU
    rate: float = 1.0  # of the sigmoid in the activation


@dataclass(frozen=True, eq=False)
class Experts:
    """The router and the experts of one layer. `joined`: on a GPU, the tensors of which unquantized experts are views:
    weights [E, 2 M, D] and [E, D, M] and the biases, if any."""

    mixture: Mixture
    router: Linear  # D -> E
    up_gate: Sequence[Linear]  # D -> 2 M: up, then gate
    down: Sequence[Linear]  # M -> D
    joined: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None

    @classmethod
    def of(
        cls,
        mixture: Mixture,
        router: Linear,
        up_gate: Tensor,
        down: Tensor,
        up_gate_bias: Tensor | None,
        down_bias: Tensor | None,
        convert: Callable[[Linear], Linear],
    ) -> Experts:
        """From joined tensors."""

        def each(weights: Tensor, biases: Tensor | None) -> list[Linear]:
            parts = [None] * len(weights) if biases is None else biases
            return [Dense(weight, bias) for weight, bias in zip(weights, parts, strict=True)]

        joined = (up_gate, down, up_gate_bias, down_bias) if up_gate.device.type != "cpu" else None
        return cls(mixture, router, each(up_gate, up_gate_bias), each(down, down_bias), joined).map_linears(convert)

    @property
    def linears(self) -> list[Linear]:
        """Those of all experts."""
        return [*self.up_gate, *self.down]

    def map_linears(self, change: Callable[[Linear], Linear]) -> Experts:
        """A copy with `change` applied to the linear layers of all experts; the router keeps its precision."""
        up_gate, down = [change(linear) for linear in self.up_gate], [change(linear) for linear in self.down]
        same = all(new is old for new, old in zip([*up_gate, *down], self.linears, strict=True))
        return replace(self, up_gate=up_gate, down=down, joined=self.joined if same else None)

    @property
    def weight_bytes(self) -> int:
        """Of the router and the experts that one token reads."""
        every = sum(linear.weight_bytes for linear in self.linears)
        return self.router.weight_bytes + every * self.mixture.chosen // self.mixture.experts

    def __call__(self, x: Tensor, *, fixed: bool) -> Tensor:
        """Normed states [N, D] -> [N, D] in 32 bits or more. `fixed`: with shapes that do not depend on the router's
        choice, for captured passes and without waiting for the device."""
        probabilities = self.router(x).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        weights, chosen = probabilities.topk(self.mixture.chosen, -1)  # [N, k]
        if self.mixture.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        if not fixed:
            return self._by_expert(x, weights, chosen)
        if self.joined is not None and _FEW * chosen.numel() <= self.mixture.experts:
            return self._gathered(x, weights, chosen, *self.joined)
        return self._all(x, weights, chosen)

    def _by_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """One product per expert that was chosen, over its tokens."""
        flat = chosen.flatten()
        order, factors = flat.argsort(stable=True), weights.flatten()[:, None]
        out, start = torch.zeros(x.shape, dtype=weights.dtype, device=x.device), 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.mixture.experts).tolist()):
            if not count:
                continue
            places = order[start : start + count]
            tokens, start = places // self.mixture.chosen, start + count
            result = self.down[expert](self._activation(self.up_gate[expert](x[tokens])))
            out.index_add_(0, tokens, result * factors[places])
        return out

    def _gathered(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        up_gate: Tensor,
        down: Tensor,
        up_gate_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        """Each token with a copy of its experts' weights, for a few tokens."""
        flat = chosen.flatten()
        hidden = (up_gate[flat] @ x.repeat_interleave(self.mixture.chosen, 0)[:, :, None])[:, :, 0]
        hidden = self._activation(hidden if up_gate_bias is None else hidden + up_gate_bias[flat])
        result = (down[flat] @ hidden[:, :, None])[:, :, 0]
        result = result if down_bias is None else result + down_bias[flat]
        return (result * weights.flatten()[:, None]).view(len(x), self.mixture.chosen, -1).sum(1)

    def _all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every token by every expert, with weight 0 where it was not chosen."""
        shares = weights.new_zeros(len(x), self.mixture.experts).scatter(1, chosen, weights)
        if self.joined is not None:
            up_gates, downs, up_gate_bias, down_bias = self.joined
            hidden = x @ up_gates.transpose(1, 2)  # [E, N, 2 M]
            hidden = self._activation(hidden if up_gate_bias is None else hidden + up_gate_bias[:, None])
            result = hidden @ downs.transpose(1, 2)  # [E, N, D]
            result = result if down_bias is None else result + down_bias[:, None]
            return (result * shares.T[:, :, None]).sum(0)
        out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
        for expert, (up_gate, down) in enumerate(zip(self.up_gate, self.down, strict=True)):
            out = torch.addcmul(out, down(self._activation(up_gate(x))).to(out.dtype), shares[:, expert, None])
        return out

    def _activation(self, up_gate: Tensor) -> Tensor:
        """[..., 2 M] -> [..., M]."""
        up, gate = up_gate.chunk(2, -1)
        if self.mixture.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.mixture.limit), up.clamp(-self.mixture.limit, self.mixture.limit)
        return (up + 1) * gate * torch.sigmoid(self.mixture.rate * gate)
