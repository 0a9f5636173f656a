"""The embedding and output layer that a draft head shares with its target, and conversion of a trained head for
inference. Independent of drafts and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.linear import Dense, Linear
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.quantize import fastest_for_drafting
from outrider.core.engine.trainable.block import Block, Matrix
from outrider.core.errors import InvalidOption
from outrider.core.kernels.native import Tiled

M = TypeVar("M", bound=nn.Module)


class SharedEmbedding(nn.Module):
    """A target's embedding and output layer, referenced and not copied; optionally only the outputs of some tokens, or
    with rows of its own."""

    embedding: Tensor
    vocabulary: Tensor | None

    def __init__(
        self,
        network: Network,
        vocabulary: int | Sequence[int] | Tensor = 0,
        *,
        own: bool = False,
        own_embedding: bool = False,
    ) -> None:
        """`vocabulary`: the ids that can be predicted, or their number (a checkpoint then sets the ids); 0: all. `own`:
        give the head trainable output rows, initialised from the target's; `own_embedding`: a copy of the embedding,
        which a checkpoint replaces."""
        super().__init__()
        self.full_vocabulary = network.config.vocabulary
        self.hidden_size = network.config.hidden_size
        embedding = network.embedding.clone() if own_embedding else network.embedding
        self.register_buffer("embedding", embedding, persistent=own_embedding)
        ids = _ids(vocabulary, self.full_vocabulary)
        self.register_buffer("vocabulary", None if ids is None else ids.to(network.device))
        self._network = [network]  # in a list, so that torch does not register it as a submodule
        self._dense: Dense | None = None
        self._dense_version: int | None = None
        self.fast: Linear | None = None
        self.own: Matrix | None = None
        if own:
            rows = self._outputs()
            self.own = Matrix(self.hidden_size, self.count, bias=rows.bias is not None)
            with torch.no_grad():
                self.own.weight.copy_(rows.weight)
                if rows.bias is not None and self.own.bias is not None:
                    self.own.bias.copy_(rows.bias)

    @property
    def count(self) -> int:
        """The number R of tokens that can be predicted."""
        return self.full_vocabulary if self.vocabulary is None else len(self.vocabulary)

    @property
    def weight_bytes(self) -> int:
        """The size of the target's output rows; 0 with own rows, which are counted as a Matrix."""
        return 0 if self.own is not None else self.count * self.hidden_size * self.embedding.element_size()

    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [...] -> [..., D]; invalid ids are clamped."""
        return F.embedding(tokens.clamp(0, len(self.embedding) - 1), self.embedding)

    def local(self, tokens: Tensor) -> Tensor:
        """Ids [N] -> their indices among the outputs; -1 for tokens that cannot be predicted."""
        if self.vocabulary is None:
            return tokens
        index = torch.full((self.full_vocabulary,), -1, device=tokens.device)
        index[self.vocabulary] = torch.arange(len(self.vocabulary), device=tokens.device)
        return index[tokens]

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., R]."""
        if self.own is not None:
            own: Tensor = self.own(x)
            return own
        if self.fast is not None:
            return self.fast(x.reshape(-1, self.hidden_size).to(self.embedding.dtype)).view(*x.shape[:-1], -1)
        version = None if self.vocabulary is None else self.vocabulary._version
        if self._dense is None or self._dense_version != version:  # loading a checkpoint changes the ids
            self._dense, self._dense_version = self._outputs(), version
        return F.linear(x.to(self._dense.weight.dtype), self._dense.weight, self._dense.bias)

    def outputs(self) -> Tensor:
        """The target's output rows [R, D] of the tokens that can be predicted."""
        return self._outputs().weight

    def _outputs(self) -> Dense:
        network = self._network[0]
        weight, bias = network.embedding if network.config.tied else network.head.weight, network.head.bias
        if self.vocabulary is None:
            return Dense(weight, bias)
        ids = self.vocabulary
        return Dense(weight.index_select(0, ids), None if bias is None else bias.index_select(0, ids))

    def tiled(self) -> Tiled | None:
        """The output rows as the compiled kernels read them, padded to whole tiles; None where they can't."""
        found = self.fast if self.own is None else self.own.fast
        chain = self._network[0].native_chain
        if not isinstance(found, Tiled) and self.own is None and self.vocabulary is None and chain is not None:
            found = chain.head
        return found if isinstance(found, Tiled) else None

    def optimize(self) -> None:
        """Convert the output rows to the fastest layout; with the full vocabulary the target's own layer is used."""
        if self.own is not None:
            return
        self.fast = self._network[0].head if self.vocabulary is None else fastest_for_drafting(self._outputs())
        self._dense = None


def _ids(vocabulary: int | Sequence[int] | Tensor, size: int) -> Tensor | None:
    if isinstance(vocabulary, int):
        return torch.arange(vocabulary) if vocabulary else None
    ids = vocabulary if isinstance(vocabulary, Tensor) else torch.tensor(list(vocabulary))
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= size or len(set(ids.tolist())) < len(ids):
        raise InvalidOption(
            f"a reduced vocabulary must list ids from 0 to {size - 1}, each once; got {len(ids)} ids that do not"
        )
    return ids


def for_inference(module: M, dtype: torch.dtype, device: torch.device) -> M:
    """Convert the module in place for drafting: eval mode, the target's precision, the fastest weight layouts."""
    module.to(device, dtype).eval().requires_grad_(False)
    for kinds in ((Matrix, SharedEmbedding), (Block,)):  # blocks last, since they use their matrices' layouts
        for part in module.modules():
            if isinstance(part, kinds):
                part.optimize()
    return module


def weight_bytes(module: nn.Module) -> int:
    """The bytes of weights that a pass through the whole module reads."""
    return sum(part.weight_bytes for part in module.modules() if isinstance(part, Matrix | SharedEmbedding))
