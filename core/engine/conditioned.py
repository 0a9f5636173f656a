"""A decoder that is told something at every position: what to say there, or what a picture looks like from afar.

It is added to what is read, so that a model need not find out by itself where in the text or in the picture it is.
Passes may be recorded all the same: recordings look for what they are told in one place, whoever is told. Knows
positions and states, nothing of what is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import PassLayout
from outrider.core.errors import InvalidOption

_ROOM = 256  # positions that are told, in steps, where recordings look for them


class ConditionedDecoder(Network):
    """A network of which every position is told something [B, T, D], those behind the last as that. At the tap "ahead",
    where that is asked for, stands what the `ahead` positions behind the next one are told, side by side."""

    def __init__(self, network: Network, told: Tensor, ahead: int = 0) -> None:
        super().__init__(network.config, network.embedding, network.layers, network.norm, network.head)
        self.told, self.ahead = told.to(self.wide), ahead

    def tell(self, told: Tensor) -> bool:
        """Something else from now on, where recordings look for it; False: there is no room for it."""
        rows, room = self.told.shape[:2]
        if len(told) != rows or told.shape[1] > room:
            return False
        self.told[:, : told.shape[1]] = told
        self.told[:, told.shape[1] :] = told[:, -1:]
        return True

    def told_to(self, row: int) -> Tensor | None:
        return self.told[row]

    def replaced(self, *given: Any, **named: Any) -> Network:
        return ConditionedDecoder(super().replaced(*given, **named), self.told, self.ahead)

    def run(
        self,
        x: Tensor,
        store: Tensor,
        places: PassLayout,
        taps: dict[str, list[Tensor]] | None = None,
        span: tuple[int, int] | None = None,
    ) -> Tensor:
        rows = store.shape[1]
        if not len(x) or (span is not None and span[0]):
            return super().run(x, store, places, taps, span)
        if rows != len(self.told):
            raise InvalidOption(f"{len(self.told)} rows are told something, and {rows} are read")
        place = places.positions.expand(rows, -1)
        x = x + self.at(place).flatten(0, 1)
        seen = taps.pop("ahead", None) if taps else None
        result = super().run(x, store, places, taps, span)
        if taps is not None and seen is not None:
            further = place[..., None] + torch.arange(1, self.ahead + 1, device=place.device)
            seen.append(self.at(further.flatten(1)).view(rows, place.shape[1], -1).to(self.dtype))
            taps["ahead"] = seen
        return result

    def at(self, place: Tensor) -> Tensor:
        """[B, Q] -> [B, Q, D]; behind the end, what is told there."""
        index = place.clamp(0, self.told.shape[1] - 1)[..., None]
        return self.told.gather(1, index.expand(-1, -1, self.told.shape[2]))


class Informed(Decoder):
    """A decoder whose network can be told something, anew for each generation."""

    def __init__(self, network: Network, ahead: int = 0) -> None:
        super().__init__(network)
        self._whole, self._ahead, self._lent = network, ahead, False

    def tell(self, told: Tensor) -> None:
        """[B, T, D]. A network whose passes are recorded is nobody else's as long as this generation lasts."""
        graphs, told = self._whole.graphs, told.to(self.device)
        if graphs is None:
            self.network = ConditionedDecoder(self._whole, told, self._ahead)
            return
        self._give_back()
        idle = graphs.idle
        found = next((one for one in idle if isinstance(one, ConditionedDecoder) and one.tell(told)), None)
        if found is None:
            room = -(-told.shape[1] // _ROOM) * _ROOM
            long = torch.cat([told, told[:, -1:].expand(-1, room - told.shape[1], -1)], 1)
            found = ConditionedDecoder(self._whole, long, self._ahead)
            graphs.attach(found)
        else:
            idle.remove(found)
        assert found.graphs is not None
        self.network, self._lent = found, True
        self.cache.keeper = found.graphs.pool

    def _give_back(self) -> None:
        if self._lent and self._whole.graphs is not None:
            self._whole.graphs.idle.append(self.network)
        self._lent = False

    def end(self) -> None:
        super().end()
        self._give_back()
