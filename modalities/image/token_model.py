"""The token model: a decoder that reads a prompt (a style and a few words) and predicts an image's codes in raster
order.

Training uses the modules of outrider.core.engine.trainable.block; `network` lays the same weights out for inference in
outrider.core.engine, with its cache and tree attention. Training sometimes drops the prompt, so that the model also
predicts unconditionally, as classifier-free guidance (arXiv 2207.12598) requires. Independent of pixels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import Angles, Norm, causal_mask
from outrider.core.engine.trainable.token_decoder import decoder_config, initial_blocks, to_network
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess
from outrider.image.layout_planner import LayoutPlanner, PlanConditioning, PlannedNetwork, decoder
from outrider.image.prompt_encoder import PromptEncoder

_WRONG_PLANS = 0.1  # share of rows that train with another image's plan


class TokenModel(DraftHead):
    """Embeddings of codes, styles and words; transformer blocks; an output head for codes alone.

    `plan` is the number of channels of its layout planner (0: none) and `levels` those of the codes. A model that
    drafts for a `target` shares the target's planner; with `lent`, it also reads the target's embeddings, through a
    linear map."""

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
            raise InvalidOption("lent is set, but there is no target token model to share embeddings with")
        self.prompt_encoder = PromptEncoder(codes, tuple(styles), tuple(words))
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
        self.form = decoder_config(codes, width=width, layers=layers, heads=heads, hidden=hidden)
        self.drop = drop
        self._lender = [target] if lent else []  # a list hides it from nn.Module
        if lent:
            self.through = nn.Linear(target.form.hidden_size, width, bias=False)
        else:
            self.embedding = nn.Parameter(torch.randn(self.prompt_encoder.size, width) * 0.5)
        self.blocks = initial_blocks(self.form)
        self.norm = Norm(width, self.form.norm_eps)
        self.head = nn.Parameter(torch.randn(codes, width) * 0.02)
        self.teller: PlanConditioning | None = None  # part of the tensor names in weight files
        if plan:
            shared = target.teller if isinstance(target, TokenModel) else None
            if shared is not None:
                self.teller = PlanConditioning(shared.planner, width, shared=True)
            else:
                own = LayoutPlanner(codes=codes, styles=styles, words=words, levels=levels, channels=plan, side=side)
                self.teller = PlanConditioning(own, width)
        self._angles = Angles(self.form)

    def embeddings(self) -> Tensor:
        """The input embeddings [ids, D]."""
        return self.through(self._lender[0].embedding.detach()) if self._lender else self.embedding

    def states(self, ids: Tensor) -> Tensor:
        """Ids [B, T] -> normalised final hidden states [B, T, D]. Training applies dropout to the embeddings and
        stochastic depth (arXiv 1603.09382) to the blocks."""
        count = ids.shape[1]
        x = F.dropout(F.embedding(ids, self.embeddings()), self.drop, self.training)
        if self.teller is not None:
            length = self.prompt_encoder.length
            plan = self.teller(ids[:, :length])[:, : count - length]
            x = x + F.pad(self._shuffle_some(plan).to(x.dtype), (0, 0, length, 0))
        positions = torch.arange(count, device=ids.device)[None]
        cos, sin = self._angles(positions, count, torch.float32)
        attention = causal_mask(count, cos, sin)
        for depth, block in enumerate(self.blocks):
            output = block(x, attention)
            drop = self.drop * depth / len(self.blocks)
            if self.training and drop:
                kept = (torch.rand(len(x), 1, 1, device=x.device) >= drop).to(output.dtype)
                output = torch.lerp(x, output, kept / (1 - drop))
            x = output
        normed: Tensor = self.norm(x)
        return normed

    def _shuffle_some(self, plan: Tensor) -> Tensor:
        """In training, gives some rows the plan of another image. The model so learns not to rely on wrong plans,
        which the planner makes for names it has not seen."""
        if not self.training:
            return plan
        wrong = torch.rand(len(plan), 1, 1, device=plan.device) < _WRONG_PLANS
        return torch.where(wrong, plan.roll(1, 0), plan)

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., codes]."""
        return F.linear(states, self.head)

    def nll(self, ids: Tensor, codes: Tensor) -> Tensor:
        """Negative log-likelihood [B, N] of codes [B, N], each predicted at one of the last N of the ids [B, T]."""
        logits = self.logits(self.states(ids)[:, -codes.shape[1] :]).flatten(0, 1).float()
        return F.cross_entropy(logits, codes.flatten(), reduction="none").view_as(codes)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        yield Guess(self.logits(self.states(batch.tokens)[batch.loss_mask()]), 1)

    def network(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Network:
        """The same weights, laid out for inference."""
        network = to_network(self.form, self.blocks, self.embeddings(), self.norm, self.head, dtype, device)
        if self.teller is None:
            return network
        conditioning = copy.deepcopy(self.teller).eval().requires_grad_(False).to(device, network.residual_dtype)
        return with_graphs(PlannedNetwork(network, conditioning, self.prompt_encoder.length))

    def drafts(self, target: Any) -> Decoder:
        """A decoder in the target's precision, with its own cache."""
        return decoder(self.network(target.network.dtype, target.device))
