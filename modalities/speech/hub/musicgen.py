"""MusicGen of transformers: a step is a column of codes, one of each book, each book a step behind the one above it.

The books of a column are independent given what came before, so that a column's distributions are all known from one
pass. What the delay leaves open at both ends is filled with the code that stands for nothing. Guidance is as the class
does it: a second stream that hears no text. Weights: facebook/musicgen-small, -medium and -large, which share their
codes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.frames import FrameTarget, Store
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.engine.trainable.module_surgery import Places, twin
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.vocab_mask import Slots, frames
from outrider.speech.hub.model import Part

_COLUMNS = 500


@dataclass(frozen=True)
class Delayed:
    """What may stand where in so many frames, each book delayed by its number: a code, or nothing."""

    books: int
    codes: int
    count: int  # frames

    def only(self, logits: Tensor, place: Tensor) -> Tensor:
        column, book = place // self.books, place % self.books
        open_ = ((column >= book) & (column - book < self.count))[..., None]
        ids = torch.arange(logits.shape[-1], device=logits.device)
        code = ids % (self.codes + 1)
        fits = torch.where(open_, code < self.codes, code == self.codes)
        held = Slots.books(self.books, self.codes + 1).only(logits, place)
        return held.masked_fill(~fits, -torch.inf)


class Musicgen:
    """A model with its processor."""

    def __init__(self, model: Any, processor: Any = None, *, guidance: float = 3.0, draft: Any = None) -> None:
        config = model.decoder.config
        if config.audio_channels != 1:
            raise InvalidOption("this MusicGen makes stereo, whose books go in pairs; only mono is decoded here")
        self.model, self.processor, self.guidance, self._draft = model, processor, guidance, draft
        self.books, self.codes = int(config.num_codebooks), int(config.vocab_size)

    def stages(self, prompt: Any, limit: int | None) -> Generator[Part, list[int], list[list[int]]]:
        """Comes to frames of codes, undelayed."""
        given = prompt
        if isinstance(prompt, str):
            given = self.processor(text=[prompt], return_tensors="pt")
        count = limit or _COLUMNS
        tokens = yield Part(
            lambda: target(self.model, given, count, self.guidance),
            (count + self.books - 1) * self.books,
            draft=None if self._draft is None else lambda: target(self._draft, given, count, self.guidance),
        )
        columns = frames(tokens, self.books, self.codes + 1)
        return [[columns[place + book][book] for book in range(self.books)] for place in range(count)]

    @property
    def rate(self) -> int:
        return int(self.model.audio_encoder.config.sampling_rate)

    @torch.no_grad()
    def sound(self, codes: Sequence[Sequence[int]]) -> Tensor:
        """Frames of codes as samples."""
        held = torch.tensor(codes, device=self.model.device).T[None, None]
        found: Tensor = self.model.audio_encoder.decode(held, audio_scales=[None]).audio_values[0, 0]
        return found


@torch.no_grad()
def target(model: Any, given: Any, count: int, guidance: float) -> Guided:
    """One text's sound of so many frames."""
    from transformers import DynamicCache, EncoderDecoderCache

    config, whole = model.decoder.config, model.decoder
    books, codes = int(config.num_codebooks), int(config.vocab_size)
    if config.pad_token_id is not None and config.pad_token_id != codes:
        raise Incompatible(f"the code for nothing is {config.pad_token_id}; expected {codes}, behind all others")
    mask = torch.as_tensor(given["attention_mask"], device=model.device)
    heard = model.text_encoder(input_ids=given["input_ids"].to(model.device), attention_mask=mask).last_hidden_state
    silent = torch.zeros_like(heard)
    streams = [(heard, mask)] * (guidance != 0) + [(silent, torch.zeros_like(mask))] * (guidance != 1)
    states, mask = torch.cat([one for one, _ in streams]), torch.cat([one for _, one in streams])
    same = model.text_encoder.config.hidden_size == config.hidden_size
    if not same and config.cross_attention_hidden_size is None:
        states = model.enc_to_dec_proj(states)
    states = states * mask[..., None]

    decoder = whole.model.decoder
    table = decoder.embed_positions.get_embedding(count + 4 * books + 64, config.hidden_size)
    table = table.to(decoder.embed_positions.weights)
    places = Places(lambda at: table[at.clamp(0, len(table) - 1)])
    trunk = twin(decoder, lambda name, part: places if name == "embed_positions" else None)
    store, cross = Store(1, books), DynamicCache(config=config)

    def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
        places.at = positions
        own = torch.where((ids < 1)[..., None], codes, store.of(ids))  # it begins with a column of nothing
        x = sum(table(own[..., book]) for book, table in enumerate(decoder.embed_tokens))
        rows = len(ids) // len(states)  # of each stream
        seen = {"encoder_hidden_states": states.repeat_interleave(rows, 0)}
        return {"inputs_embeds": x, "encoder_attention_mask": mask.repeat_interleave(rows, 0), **seen}

    def say(states: Tensor, part: Tensor, held: Tensor) -> Tensor:
        found = states.new_zeros(len(states), codes + 1)
        for book, head in enumerate(whole.lm_heads):
            mine = held == book
            found[mine, :codes] = head(states[mine])
        return found

    reading = Reading(
        trunk=trunk,
        vocabulary=1 << 40,
        read=read,
        say=lambda out: out.last_hidden_state,
        cache=lambda: DynamicCache(config=config),
        through=lambda cache, rows: EncoderDecoderCache(cache, cross),
    )
    framed = FrameTarget(TransformersTarget(model, trees="mask", reading=reading), store, books, codes + 1, say)
    asked = [[framed.vocabulary]]
    return Guided(framed, asked, asked, guidance, instead=True, slots=Delayed(books, codes, count))


of = Musicgen  # what outrider.core.assets.hub_models asks for
