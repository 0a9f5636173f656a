"""The voice: a token model of speech whose every position is conditioned on the phoneme spoken there.

A language model of codec tokens as in VALL-E (arXiv 2301.02111). There the text is a prefix and the model learns the
alignment; here a small network encodes the phonemes and predicts their durations, and each phoneme's vector is added to
the inputs of the positions where it is spoken. This needs little training speech and prevents skips, repetitions and
missing ends. The decoder is that of outrider.core.engine. Independent of sound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.engine.conditioned import ConditionedDecoder
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import Angles, Norm, causal_mask
from outrider.core.engine.trainable.token_decoder import decoder_config, initial_blocks, to_network
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts
from outrider.core.training.draft_head import DraftHead
from outrider.speech.phonemes import COUNT, EDGE

LOOKAHEAD = 6  # later positions whose conditioning draft heads can read
_MAX_OFFSET = 24  # positions since the start and until the end of a phoneme are clipped to this
_RATE = 22_050 / 512  # tokens per second
_SHORTEST, _LONGEST = 0.3, 40.0  # predicted duration of a phoneme in tokens


@dataclass(frozen=True, eq=False)
class Script:
    """The conditioning of a batch of utterances, and the durations it was made from."""

    conditioning: Tensor  # [B, T + 1, D] the vector added at each position, for the token that follows it
    durations: tuple[tuple[int, ...], ...]  # tokens of each phoneme of each utterance

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each utterance, without its end."""
        return tuple(map(sum, self.durations))


class _Conv(nn.Module):
    """A residual convolution over phonemes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.wide = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """[B, P, R] -> [B, P, R]; padding, where `present` [B, P] is False, is not read."""
        masked = (self.norm(x) * present[..., None]).transpose(1, 2)
        change: Tensor = self.out(F.gelu(self.wide(masked).transpose(1, 2)))
        return x + change


class PhonemeEncoder(nn.Module):
    """Phonemes -> a vector and a duration for each."""

    def __init__(self, width: int, reading: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.embedding = nn.Parameter(torch.randn(COUNT, reading))
        self.convs = nn.ModuleList(_Conv(reading) for _ in range(3))
        self.timing = nn.ModuleList(_Conv(reading) for _ in range(2))
        self.length = nn.Linear(reading, 1)
        self.out = nn.Linear(reading, width)
        self.since = nn.Parameter(torch.randn(_MAX_OFFSET, width) * 0.3)  # indexed by tokens since the phoneme began
        self.until = nn.Parameter(torch.randn(_MAX_OFFSET, width) * 0.3)  # indexed by tokens until it ends
        self.over = nn.Parameter(torch.randn(width))  # for positions after the last phoneme

    def forward(self, phonemes: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, P] -> their vectors [B, P, D], and log durations [B, P] in tokens at speed 1."""
        x = F.dropout(F.embedding(phonemes, self.embedding), self.drop, self.training)
        for conv in self.convs:
            x = conv(x, present)
        timing = x.detach()  # the loss of durations does not train the vectors
        for conv in self.timing:
            timing = conv(F.dropout(timing, self.drop, self.training), present)
        return self.out(x), self.length(timing)[..., 0] + 1.0

    def spread(self, encoded: Tensor, durations: Tensor, count: int) -> Tensor:
        """Vectors [B, P, D] and durations [B, P] of phonemes -> conditioning [B, count, D] of positions."""
        ends = durations.cumsum(1)
        position = torch.arange(count, device=encoded.device).expand(len(encoded), -1).contiguous()
        index = torch.searchsorted(ends, position, right=True)  # the phoneme at each position, or P after the last
        inside = index < durations.shape[1]
        index = index.clamp(max=durations.shape[1] - 1)
        since = position - (ends - durations).gather(1, index)
        until = ends.gather(1, index) - 1 - position
        x = encoded.gather(1, index[..., None].expand(-1, -1, encoded.shape[2]))
        x = x + self.since[since.clamp(0, _MAX_OFFSET - 1)] + self.until[until.clamp(0, _MAX_OFFSET - 1)]
        return torch.where(inside[..., None], x, self.over.to(x.dtype))


class Voice(DraftHead):
    """A phoneme encoder and a decoder. The vocabulary is the codec's codes, then the end token, which also begins an
    utterance. `target` is unused; a draft model is a smaller voice."""

    def __init__(
        self,
        target: Any = None,
        *,
        codes: int,
        width: int = 256,
        layers: int = 5,
        heads: int = 4,
        hidden: int = 576,
        reading: int = 128,
        drop: float = 0.15,
    ) -> None:
        super().__init__()
        if width % heads or width // heads % 2:
            raise InvalidOption(f"width is {width}; it must be an even multiple of heads, which is {heads}")
        self.config = {
            "codes": codes,
            "width": width,
            "layers": layers,
            "heads": heads,
            "hidden": hidden,
            "reading": reading,
            "drop": drop,
        }
        self.end = codes
        self.form = decoder_config(codes + 1, width=width, layers=layers, heads=heads, hidden=hidden)
        self.drop = drop
        self.reader = PhonemeEncoder(width, reading, drop)  # "reader" is part of the tensor names in weight files
        self.embedding = nn.Parameter(torch.randn(codes + 1, width) * 0.5)
        self.blocks = initial_blocks(self.form)
        self.norm = Norm(width, self.form.norm_eps)
        self.head = nn.Parameter(torch.randn(codes + 1, width) * 0.02)
        self._angles = Angles(self.form)

    # ---- training

    def states(self, tokens: Tensor, conditioning: Tensor) -> Tensor:
        """Tokens [B, T] and conditioning [B, T, D] -> normalised final hidden states [B, T, D]."""
        return self.hidden_states(tokens, conditioning, frozenset({"last"}))["last"]

    def hidden_states(self, tokens: Tensor, conditioning: Tensor, needs: Collection[str]) -> dict[str, Tensor]:
        """Hidden states [B, T, D] by the names of the decoder's taps."""
        count, states = tokens.shape[1], dict[str, Tensor]()
        x = F.dropout(F.embedding(tokens, self.embedding), self.drop, self.training) + conditioning
        positions = torch.arange(count, device=tokens.device)[None]
        cos, sin = self._angles(positions, count, torch.float32)
        attn_mask = causal_mask(count, cos, sin)
        states["embedding"] = x
        for index, block in enumerate(self.blocks):
            change = block(x, attn_mask) - x
            x = x + F.dropout(change, self.drop, self.training)
            states[f"layer.{index}"] = x
        states["last"] = self.norm(x)
        return {name: states[name] for name in needs if name in states}

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.head)

    # ---- inference

    @torch.no_grad()
    def script(
        self, phonemes: Sequence[Sequence[int]], speed: float = 1.0, durations: Sequence[Sequence[int]] | None = None
    ) -> Script:
        """The conditioning of utterances from their phoneme ids. Durations are predicted unless given."""
        device = self.embedding.device
        longest = max(map(len, phonemes))
        ids = torch.tensor([_pad(row, longest, EDGE) for row in phonemes], device=device)
        lengths = torch.tensor([[len(row)] for row in phonemes], device=device)
        present = torch.arange(longest, device=device) < lengths
        encoded, log_durations = self.reader(ids, present)
        if durations is None:
            predicted = log_durations.float().exp().clamp(_SHORTEST, _LONGEST) / speed * present
            ends = predicted.double().cumsum(1).round().long()
            tokens = torch.diff(ends, dim=1, prepend=ends.new_zeros(len(phonemes), 1))
        else:
            tokens = torch.tensor([_pad(row, longest, 0) for row in durations], device=device)
        count = int(tokens.sum(1).max()) + 1 + LOOKAHEAD
        rows = zip(tokens.tolist(), phonemes, strict=True)
        return Script(self.reader.spread(encoded, tokens, count), tuple(tuple(row[: len(ids)]) for row, ids in rows))

    def network(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Network:
        """The decoder's weights, laid out for inference."""
        return to_network(self.form, self.blocks, self.embedding, self.norm, self.head, dtype, device)


def _pad(row: Sequence[int], length: int, value: int) -> list[int]:
    return [*row, *[value] * (length - len(row))]


def seconds(tokens: int) -> float:
    """The duration of `tokens` tokens."""
    return tokens / _RATE


class VoiceDecoder(ConditionedDecoder):
    """The decoder of a batch of utterances; each prompt is the end token. Its tap "ahead" is the conditioning of the
    LOOKAHEAD positions after the current one, concatenated."""

    def __init__(self, network: Network, script: Script) -> None:
        super().__init__(network, LOOKAHEAD)
        self.script = script

    @property
    def taps(self) -> tuple[str, ...]:
        return (*super().taps, "ahead")

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if len(prompts) != len(self.script.lengths):
            raise InvalidOption(
                f"there are {len(prompts)} prompts and {len(self.script.lengths)} utterances; give one each"
            )
        self.set_conditioning(self.script.conditioning)
        return super().begin(prompts, sampling, needs)

    def _read(self, rows: slice, length: int) -> dict[str, Tensor]:
        if length:
            raise InvalidOption(f"the prompt of an utterance has {length + 1} tokens; it must be the end token alone")
        taps = super()._read(rows, length)
        if "ahead" in taps:
            taps["ahead"] = taps["ahead"].new_zeros(len(taps["ahead"]), 0, LOOKAHEAD * self.config.hidden_size)
        return taps
