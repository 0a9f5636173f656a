"""The words that a drafter shares with its teacher, and a drafter laid out for the machine once it has learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.linear import Dense, Linear
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.quantize import leanest
from outrider.core.engine.trainable.block import Block, Matrix
from outrider.core.errors import InvalidOption

M = TypeVar("M", bound=nn.Module)


class Words(nn.Module):
    """A teacher's embedding and output layer, referred to and not copied; perhaps only the outputs of some tokens."""

    embedding: Tensor
    vocabulary: Tensor | None

    def __init__(self, network: Network, vocabulary: int | Sequence[int] | Tensor = 0, *, own: bool = False) -> None:
        """`vocabulary`: the ids that can be guessed, or how many (a checkpoint will say which); 0: all. `own`: output
        rows that are learned, beginning as the teacher's."""
        super().__init__()
        self.known = network.config.vocabulary
        self.width = network.config.hidden_size
        self.register_buffer("embedding", network.embedding, persistent=False)
        ids = _ids(vocabulary, self.known)
        self.register_buffer("vocabulary", None if ids is None else ids.to(network.device))
        self._network = [network]  # in a list: no part of this module
        self._dense: Dense | None = None
        self._seen: int | None = None
        self.fast: Linear | None = None
        self.own: Matrix | None = None
        if own:
            rows = self._outputs()
            self.own = Matrix(self.width, self.count, bias=rows.bias is not None)
            with torch.no_grad():
                self.own.weight.copy_(rows.weight)
                if rows.bias is not None and self.own.bias is not None:
                    self.own.bias.copy_(rows.bias)

    @property
    def count(self) -> int:
        """How many tokens can be guessed."""
        return self.known if self.vocabulary is None else len(self.vocabulary)

    @property
    def weight_bytes(self) -> int:
        """Of the output rows, if they are the teacher's."""
        return 0 if self.own is not None else self.count * self.width * self.embedding.element_size()

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [...], impossible ones included, -> [..., D]."""
        return F.embedding(tokens.clamp(0, len(self.embedding) - 1), self.embedding)

    def local(self, tokens: Tensor) -> Tensor:
        """Ids [N] -> their places among the outputs; -1: not among them."""
        if self.vocabulary is None:
            return tokens
        place = torch.full((self.known,), -1, device=tokens.device)
        place[self.vocabulary] = torch.arange(len(self.vocabulary), device=tokens.device)
        return place[tokens]

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., R]."""
        if self.own is not None:
            own: Tensor = self.own(x)
            return own
        if self.fast is not None:
            return self.fast(x.reshape(-1, self.width).to(self.embedding.dtype)).view(*x.shape[:-1], -1)
        version = None if self.vocabulary is None else self.vocabulary._version
        if self._dense is None or self._seen != version:  # a checkpoint may have said which tokens they are
            self._dense, self._seen = self._outputs(), version
        return F.linear(x.to(self._dense.weight.dtype), self._dense.weight, self._dense.bias)

    def outputs(self) -> Tensor:
        """The teacher's output rows [R, D] of the tokens that can be guessed."""
        return self._outputs().weight

    def _outputs(self) -> Dense:
        network = self._network[0]
        weight, bias = network.embedding if network.config.tied else network.head.weight, network.head.bias
        if self.vocabulary is None:
            return Dense(weight, bias)
        ids = self.vocabulary
        return Dense(weight.index_select(0, ids), None if bias is None else bias.index_select(0, ids))

    def settle(self) -> None:
        """The output rows in the form that is leanest here; all of them are the teacher's own."""
        if self.own is not None:
            return
        self.fast = self._network[0].head if self.vocabulary is None else leanest(self._outputs())
        self._dense = None


def _ids(vocabulary: int | Sequence[int] | Tensor, size: int) -> Tensor | None:
    if isinstance(vocabulary, int):
        return torch.arange(vocabulary) if vocabulary else None
    ids = vocabulary if isinstance(vocabulary, Tensor) else torch.tensor(list(vocabulary))
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= size or len(set(ids.tolist())) < len(ids):
        raise InvalidOption(f"a reduced vocabulary lists ids from 0 to {size - 1}, each once; got {len(ids)} others")
    return ids


def settled(module: M, dtype: torch.dtype, device: torch.device) -> M:
    """The module ready to draft: in the target's precision, its weights laid out for the machine."""
    module.to(device, dtype).eval().requires_grad_(False)
    for kinds in ((Matrix, Words), (Block,)):  # a block after all it is made of
        for part in module.modules():
            if isinstance(part, kinds):
                part.settle()
    return module


def weight_bytes(module: nn.Module) -> int:
    """Of the weights that a pass through all of it reads."""
    return sum(part.weight_bytes for part in module.modules() if isinstance(part, Matrix | Words))
