"""A decoder with a conditioning vector per position, added to its input: the phoneme to speak, the plan of an image.

Each generation has its own conditioning. With CUDA graphs a network is reused for the next generation, its conditioning
copied into the captured buffer. Independent of what the conditioning means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import PassLayout
from outrider.core.errors import InvalidOption

_ROOM = 256  # captured conditioning buffers have a multiple of this many positions


class ConditionedNetwork(Network):
    """A network that adds conditioning [B, T, D] to its input; positions beyond T use the last vector. The tap "ahead"
    holds the conditioning of the `ahead` positions after the current one, side by side."""

    def __init__(self, network: Network, conditioning: Tensor, ahead: int = 0) -> None:
        super().__init__(network.config, network.embedding, network.layers, network.norm, network.head)
        self.conditioning, self.ahead = conditioning.to(self.residual_dtype), ahead

    def set_conditioning(self, conditioning: Tensor) -> bool:
        """Copy new conditioning into the buffer that captures read; False if it does not fit."""
        rows, room = self.conditioning.shape[:2]
        if len(conditioning) != rows or conditioning.shape[1] > room:
            return False
        self.conditioning[:, : conditioning.shape[1]] = conditioning
        self.conditioning[:, conditioning.shape[1] :] = conditioning[:, -1:]
        return True

    def conditioning_of(self, row: int) -> Tensor | None:
        return self.conditioning[row]

    def map_linears(self, *args: Any, **kwargs: Any) -> Network:
        return ConditionedNetwork(super().map_linears(*args, **kwargs), self.conditioning, self.ahead)

    def run(
        self,
        x: Tensor,
        store: Tensor,
        layout: PassLayout,
        taps: dict[str, list[Tensor]] | None = None,
        span: tuple[int, int] | None = None,
    ) -> Tensor:
        rows = layout.size(store)[0]
        if not len(x) or (span is not None and span[0]):
            return super().run(x, store, layout, taps, span)
        if rows != len(self.conditioning):
            raise InvalidOption(
                f"there is conditioning for {len(self.conditioning)} rows and the batch has {rows}; give one per row"
            )
        positions = layout.positions.expand(rows, -1)
        x = x + self._at(positions).flatten(0, 1)
        lookahead = taps.pop("ahead", None) if taps else None
        result = super().run(x, store, layout, taps, span)
        if taps is not None and lookahead is not None:
            later = positions[..., None] + torch.arange(1, self.ahead + 1, device=positions.device)
            lookahead.append(self._at(later.flatten(1)).view(rows, positions.shape[1], -1).to(self.dtype))
            taps["ahead"] = lookahead
        return result

    def _at(self, positions: Tensor) -> Tensor:
        """Positions [B, Q] -> conditioning [B, Q, D]."""
        index = positions.clamp(0, self.conditioning.shape[1] - 1)[..., None]
        return self.conditioning.gather(1, index.expand(-1, -1, self.conditioning.shape[2]))


class ConditionedDecoder(Decoder):
    """A decoder with new conditioning for each generation."""

    def __init__(self, network: Network, ahead: int = 0) -> None:
        super().__init__(network)
        self._base, self._ahead, self._borrowed = network, ahead, False

    def set_conditioning(self, conditioning: Tensor) -> None:
        """Use conditioning [B, T, D] for the next generation. A captured network is reserved until `end`."""
        graphs, conditioning = self._base.graphs, conditioning.to(self.device)
        if graphs is None:
            self.network = ConditionedNetwork(self._base, conditioning, self._ahead)
            return
        self._give_back()
        networks = (network for network in graphs.idle if isinstance(network, ConditionedNetwork))
        network = next((network for network in networks if network.set_conditioning(conditioning)), None)
        if network is None:
            padding = -conditioning.shape[1] % _ROOM
            padded = torch.cat([conditioning, conditioning[:, -1:].expand(-1, padding, -1)], 1)
            network = ConditionedNetwork(self._base, padded, self._ahead)
            graphs.attach(network)
        else:
            graphs.idle.remove(network)
        assert network.graphs is not None
        self.network, self._borrowed = network, True
        self.cache.pool = network.graphs.pool

    def _give_back(self) -> None:
        if self._borrowed and self._base.graphs is not None:
            self._base.graphs.idle.append(self.network)
        self._borrowed = False

    def arrange(self, order: Sequence[int], width: int) -> None:
        super().arrange(order, width)
        if isinstance(self.network, ConditionedNetwork) and self.network.graphs is None and min(order, default=0) >= 0:
            self.set_conditioning(self.network.conditioning[list(order)])

    def end(self) -> None:
        super().end()
        self._give_back()
