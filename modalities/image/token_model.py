"""The token model: a decoder that reads a style and a few words, then says the codes of a picture in raster order.

It learns in the parts of outrider.core.engine.trainable.block and speaks as a network of outrider.core.engine, whose
cache and tree attention it then has. Conditions are left out now and then while it learns, so that it also knows
pictures of nothing in particular, which classifier-free guidance (arXiv 2207.12598) is measured against. Knows ids,
not pixels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.network import Network, served
from outrider.core.engine.trainable.block import Angles, Norm, each_before
from outrider.core.engine.trainable.token_decoder import beginning, shape, spoken
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess
from outrider.image.layout_planner import Plan, PlannedTarget, Teller, decoder
from outrider.image.prompt_encoder import PromptEncoder

_WRONG = 0.1  # of the plans that it learns with


class TokenModel(DraftHead):
    """Embeddings of codes, styles and words; blocks; rows that say codes alone; with `plan`, it draws by a Plan with
    so many channels, of codes of such `levels`. Of a `target` that draws by a plan, for which this one drafts, it takes
    that; with `lent`, its embeddings too, through a matrix."""

    def __init__(
        self,
        target: Any = None,
        *,
        codes: int,
        styles: Sequence[str],
        words: Sequence[str],
        width: int = 256,
        layers: int = 5,
        heads: int = 4,
        hidden: int = 640,
        drop: float = 0.1,
        plan: int = 0,
        levels: Sequence[int] = (),
        side: int = 16,
        lent: bool = False,
    ) -> None:
        super().__init__()
        if lent and not isinstance(target, TokenModel):
            raise InvalidOption("embeddings are lent by a token model; there is none to draft for")
        self.names = PromptEncoder(codes, tuple(styles), tuple(words))
        self.config = {
            "codes": codes,
            "styles": list(styles),
            "words": list(words),
            "width": width,
            "layers": layers,
            "heads": heads,
            "hidden": hidden,
            "drop": drop,
            "plan": plan,
            "levels": list(levels),
            "side": side,
            "lent": lent,
        }
        self.form = shape(codes, width=width, layers=layers, heads=heads, hidden=hidden)
        self.drop = drop
        self._lender = [target] if lent else []  # in a list: no part of this module
        if lent:
            self.through = nn.Linear(target.form.width, width, bias=False)
        else:
            self.embedding = nn.Parameter(torch.randn(self.names.size, width) * 0.5)
        self.blocks = beginning(self.form)
        self.norm = Norm(width, self.form.norm_eps)
        self.head = nn.Parameter(torch.randn(codes, width) * 0.02)
        self.teller: Teller | None = None
        if plan:
            theirs = target.teller if isinstance(target, TokenModel) else None
            if theirs is not None:
                self.teller = Teller(theirs.plan, width, lent=True)
            else:
                own = Plan(codes=codes, styles=styles, words=words, levels=levels, channels=plan, side=side)
                self.teller = Teller(own, width)
        self._angles = Angles(self.form)

    def embeddings(self) -> Tensor:
        """[ids, D]"""
        return self.through(self._lender[0].embedding.detach()) if self._lender else self.embedding

    def states(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D] behind every id, normed. While it learns, some of what is read and some blocks are left
        out (stochastic depth, arXiv 1603.09382)."""
        count = ids.shape[1]
        x = F.dropout(F.embedding(ids, self.embeddings()), self.drop, self.training)
        if self.teller is not None:
            before = self.names.length
            told = self.teller(ids[:, :before])[:, : count - before]
            x = x + F.pad(self._doubted(told).to(x.dtype), (0, 0, before, 0))
        place = torch.arange(count, device=ids.device)[None]
        cos, sin = self._angles(place, count, torch.float32)
        sight = each_before(count, cos, sin)
        for depth, block in enumerate(self.blocks):
            after = block(x, sight)
            left_out = self.drop * depth / len(self.blocks)
            if self.training and left_out:
                stays = (torch.rand(len(x), 1, 1, device=x.device) >= left_out).to(after.dtype)
                after = torch.lerp(x, after, stays / (1 - left_out))
            x = after
        normed: Tensor = self.norm(x)
        return normed

    def _doubted(self, told: Tensor) -> Tensor:
        """While it learns, now and then the plan of another picture: it should see when one does not hold, as those of
        names that were never drawn don't."""
        if not self.training:
            return told
        wrong = torch.rand(len(told), 1, 1, device=told.device) < _WRONG
        return torch.where(wrong, told.roll(1, 0), told)

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., codes]."""
        return F.linear(states, self.head)

    def surprise(self, ids: Tensor, codes: Tensor) -> Tensor:
        """-log of what it gives each of the codes [B, N] that follow what is read: ids [B, P + N - 1] -> [B, N]."""
        said = self.logits(self.states(ids)[:, -codes.shape[1] :]).flatten(0, 1).float()
        return F.cross_entropy(said, codes.flatten(), reduction="none").view_as(codes)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        yield Guess(self.logits(self.states(batch.tokens)[batch.asked()]), 1)

    def network(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Network:
        """The same weights, laid out to be run."""
        network = spoken(self.form, self.blocks, self.embeddings(), self.norm, self.head, dtype, device)
        if self.teller is None:
            return network
        teller = copy.deepcopy(self.teller).eval().requires_grad_(False).to(device, network.wide)
        return served(PlannedTarget(network, teller, self.names.length))

    def drafts(self, target: Any) -> Decoder:
        """A decoder in the target's precision, with a cache of its own."""
        return decoder(self.network(target.network.dtype, target.device))
