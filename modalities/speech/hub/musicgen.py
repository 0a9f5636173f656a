"""MusicGen of transformers: generates columns of one code per codebook, each codebook delayed by one column more than
the previous one.

The codes of a column are independent given earlier columns, so one target pass gives all their distributions. A padding
code fills the positions that the delay leaves empty at both ends. Guidance is the class's: a second stream without the
text. Weights: facebook/musicgen-small, -medium and -large, which share their codes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.frames import FrameStore, FrameTarget
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.engine.trainable.module_surgery import ExplicitPositions, copy_with
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.vocab_mask import RepeatingRanges, frames
from outrider.speech.hub.model import HeadStage, Stage, processor_of
from outrider.speech.hub.similar_tokens import SimilarTokens, unit

_MAX_FRAMES = 500  # by default: ten seconds


@dataclass(frozen=True)
class DelayPattern:
    """Masks each position of `count` frames, with each codebook delayed by its index, to codes or to padding."""

    books: int
    codes: int
    count: int  # frames

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        column, book = position // self.books, position % self.books
        inside = ((column >= book) & (column - book < self.count))[..., None]
        code = torch.arange(logits.shape[-1], device=logits.device) % (self.codes + 1)
        allowed = torch.where(inside, code < self.codes, code == self.codes)
        masked = RepeatingRanges.codebooks(self.books, self.codes + 1).apply(logits, position)
        return masked.masked_fill(~allowed, -torch.inf)


class Musicgen:
    """A model with its processor."""

    def __init__(self, model: Any, processor: Any = None, *, guidance: float = 3.0, draft: Any = None) -> None:
        config = model.decoder.config
        if config.audio_channels != 1:
            raise InvalidOption("this MusicGen is stereo, with pairs of codebooks; use a mono model")
        self.model, self.processor, self.guidance, self._draft = model, processor, guidance, draft
        self.books, self.codes = int(config.num_codebooks), int(config.vocab_size)
        tables = model.decoder.model.decoder.embed_tokens
        rows = unit(lambda: torch.cat([table.weight[: self.codes + 1] for table in tables]))
        self.similar = SimilarTokens(self.books * (self.codes + 1), rows, books=self.books)
        self.temperature = float(model.generation_config.temperature or 1.0)
        some = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, 1, dtype=torch.long))
        self.head_stages = {"": HeadStage(lambda: target(model, some, 1, guidance), books=self.books)}

    def stages(self, prompt: Any, limit: int | None) -> Generator[Stage, list[int], list[list[int]]]:
        """One stage, whose outcome is frames of codes without the delay."""
        inputs = prompt
        if isinstance(prompt, str):
            read = processor_of(self.processor, "the input_ids and attention_mask of the text")
            inputs = read(text=[prompt], return_tensors="pt")
        count = limit or _MAX_FRAMES
        tokens = yield Stage(
            lambda: target(self.model, inputs, count, self.guidance),
            (count + self.books - 1) * self.books,
            draft=None if self._draft is None else lambda: target(self._draft, inputs, count, self.guidance),
            similar=self.similar,
            heads="",
        )
        columns = frames(tokens, self.books, self.codes + 1)
        return [[columns[frame + book][book] for book in range(self.books)] for frame in range(count)]

    @property
    def sample_rate(self) -> int:
        return int(self.model.audio_encoder.config.sampling_rate)

    @torch.no_grad()
    def sound(self, codes: Sequence[Sequence[int]]) -> Tensor:
        """Frames of codes -> samples."""
        grid = torch.tensor(codes, device=self.model.device).T[None, None]
        samples: Tensor = self.model.audio_encoder.decode(grid, audio_scales=[None]).audio_values[0, 0]
        return samples


@torch.no_grad()
def target(model: Any, inputs: Any, count: int, guidance: float) -> Guided:
    """The target of one text and `count` frames."""
    from transformers import DynamicCache, EncoderDecoderCache

    config = model.decoder.config
    books, codes = int(config.num_codebooks), int(config.vocab_size)
    if config.pad_token_id is not None and config.pad_token_id != codes:
        raise Incompatible(f"the padding code is {config.pad_token_id}; expected {codes}, the id after all codes")
    mask = torch.as_tensor(inputs["attention_mask"], device=model.device)
    encoded = model.text_encoder(input_ids=inputs["input_ids"].to(model.device), attention_mask=mask).last_hidden_state
    conditional = (encoded, mask)
    unconditional = (torch.zeros_like(encoded), torch.zeros_like(mask))
    streams = [conditional] * (guidance != 0) + [unconditional] * (guidance != 1)
    states, mask = torch.cat([encoded for encoded, _ in streams]), torch.cat([mask for _, mask in streams])
    same_size = model.text_encoder.config.hidden_size == config.hidden_size
    if not same_size and config.cross_attention_hidden_size is None:
        states = model.enc_to_dec_proj(states)
    states = states * mask[..., None]

    decoder = model.decoder.model.decoder
    table = decoder.embed_positions.get_embedding(count + 4 * books + 64, config.hidden_size)
    table = table.to(decoder.embed_positions.weights)
    places = ExplicitPositions(lambda positions: table[positions.clamp(0, len(table) - 1)])
    trunk = copy_with(decoder, lambda name, part: places if name == "embed_positions" else None)
    store, cross = FrameStore(1, books), DynamicCache(config=config)

    def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
        places.positions = positions
        columns = torch.where((ids < 1)[..., None], codes, store.of(ids))  # the first column is padding
        x = sum(embed(columns[..., book]) for book, embed in enumerate(decoder.embed_tokens))
        rows = len(ids) // len(states)  # per stream
        encoder = {"encoder_hidden_states": states.repeat_interleave(rows, 0)}
        return {"inputs_embeds": x, "encoder_attention_mask": mask.repeat_interleave(rows, 0), **encoder}

    interface = ModelInterface(
        trunk=trunk,
        vocabulary=1 << 40,
        inputs=trunk_inputs,
        logits=lambda out: out.last_hidden_state,
        new_cache=lambda: DynamicCache(config=config),
        wrap_cache=lambda cache, rows: EncoderDecoderCache(cache, cross),
    )
    framed = FrameTarget(
        TransformersTarget(model, trees="mask", interface=interface),
        store,
        books,
        codes + 1,
        lambda states, part, count: states,  # a column's codes don't depend on one another
        [head.weight for head in model.decoder.lm_heads],
        embedding=lambda: torch.cat([table.weight[: codes + 1] for table in decoder.embed_tokens]),
    )
    prompts = [[framed.vocabulary]]
    return Guided(framed, prompts, prompts, guidance, skip_first=True, allowed=DelayPattern(books, codes, count))
