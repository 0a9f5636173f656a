"""Bark of transformers: words become semantic tokens, those become codes of the two coarse books, which take turns in
one stream; the finer books are filled in all at once by the class's own third stage, where there is nothing to draft.

The coarse stage reads a window at a time, as the class does: each window is decoded on its own, behind as much of what
came before as the class lets it see. Weights: suno/bark and suno/bark-small.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.engine.trainable.module_surgery import widened
from outrider.core.errors import Incompatible
from outrider.core.vocab_mask import Slots
from outrider.speech.hub.model import Part

_BEYOND = 256  # columns that the nodes of a draft may take beyond the last position


class Bark:
    """A model with its processor; a prompt is a text, or what the processor makes of one, with a speaker or without.
    `draft` is a model of the same tokens that drafts, such as bark-small."""

    def __init__(self, model: Any, processor: Any = None, *, draft: Any = None) -> None:
        from transformers.models.bark.generation_configuration_bark import (
            BarkCoarseGenerationConfig,
            BarkSemanticGenerationConfig,
        )

        self.model, self.processor, self._draft = model, processor, draft
        given = model.generation_config
        self.words = BarkSemanticGenerationConfig(**given.semantic_config)
        self.coarse = BarkCoarseGenerationConfig(**given.coarse_acoustics_config)
        self.codes = int(given.codebook_size)
        if not self.words.semantic_pad_token == self.words.eos_token_id == self.words.semantic_vocab_size:
            raise Incompatible(
                "Bark's semantic tokens end in another id than the one behind them all; its class has changed"
            )

    def stages(self, prompt: Any, limit: int | None) -> Generator[Part, list[int], dict[str, Any]]:
        """Comes to semantic tokens and frames of coarse codes."""
        given = self.processor(prompt) if isinstance(prompt, str) else prompt
        small = None if self._draft is None else self._draft.semantic
        end = self.words.semantic_vocab_size
        most = limit or self.words.max_new_tokens
        said = yield Part(
            lambda: self._semantic(self.model.semantic, given),
            most,
            end=(end,),
            draft=None if small is None else lambda: self._semantic(small, given),
        )
        meant = [one for one in said if one != end]
        coarse = yield from self._windows(meant, given.get("history_prompt"))
        books = self.coarse.n_coarse_codebooks
        frames = [[one % self.codes for one in coarse[at : at + books]] for at in range(0, len(coarse), books)]
        return {"semantic": said, "coarse": frames}

    def _semantic(self, model: Any, given: Any) -> Guided:
        """The stage of words; what is read before it speaks is a text and, summed with it, the speaker's tokens."""
        length, pad = self.words.max_input_semantic_length, self.words.semantic_pad_token
        ids = torch.as_tensor(given["input_ids"])[:, :length].to(model.device) + self.words.text_encoding_offset
        if (mask := given.get("attention_mask")) is not None:
            there = torch.as_tensor(mask)[:, :length].to(model.device).bool()
            ids = ids.masked_fill(~there, self.words.text_pad_token)
        history = torch.full_like(ids, pad)
        if (speaker := given.get("history_prompt")) is not None:
            past = torch.as_tensor(speaker["semantic_prompt"])[-length:].to(ids)
            history[:, : len(past)] = past[: ids.shape[1]]
        embed = model.input_embeds_layer
        start = torch.tensor([[self.words.semantic_infer_token]], device=model.device)
        with torch.no_grad():
            before = torch.cat([embed(ids) + embed(history), embed(start)], 1)[0]
        count, least = self.words.semantic_vocab_size + 1, self.words.min_eos_p

        def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            own = embed(ids.clamp(0, count - 1))
            told = before[(ids - count).clamp(0, len(before) - 1)]
            places = positions.clamp(max=model.config.block_size - 1)
            return {"inputs_embeds": torch.where((ids < count)[..., None], own, told), "position_ids": places}

        def say(out: Any) -> Tensor:
            logits: Tensor = out.logits[..., :count]
            if least:  # the class ends as soon as the end is so likely
                ends = logits.float().softmax(-1)[..., -1:] > least
                inside = torch.arange(count, device=logits.device) < count - 1
                logits = logits.masked_fill(ends & inside, -torch.inf)
            return logits

        asked = [count + place for place in range(len(before))]
        return self._target(model, asked, Reading(trunk=model, vocabulary=count, read=read, say=say), None)

    def _windows(self, meant: list[int], speaker: Any) -> Generator[Part, list[int], list[int]]:
        """The stage of coarse codes, window by window."""
        words, coarse, books = self.words, self.coarse, self.coarse.n_coarse_codebooks
        ratio = coarse.coarse_rate_hz / words.semantic_rate_hz * books
        most_before = floor(coarse.max_coarse_history / ratio)
        total = round(floor(len(meant) * ratio / books) * books)
        past, codes = self._past(speaker, most_before, ratio)
        whole = [*past, *meant]
        small = None if self._draft is None else self._draft.coarse_acoustics
        found: list[int] = []
        for _ in range(ceil(total / coarse.sliding_window_len)):
            at = len(past) + round(len(found) / ratio)
            seen = whole[max(0, at - most_before) :][: coarse.max_coarse_input_length]
            seen += [coarse.coarse_semantic_pad_token] * (coarse.max_coarse_input_length - len(seen))
            asked = [*seen, coarse.coarse_infer_token, *[*codes, *found][-coarse.max_coarse_history :]]
            if coarse.pad_token_id is not None and coarse.pad_token_id != coarse.eos_token_id:
                asked = [one for one in asked if one != coarse.pad_token_id]  # the class looks through padding
            tokens = yield Part(
                lambda asked=asked: self._coarse(self.model.coarse_acoustics, asked),  # type: ignore[misc]
                min(coarse.sliding_window_len, total - len(found)),
                draft=None if small is None else lambda asked=asked: self._coarse(small, asked),  # type: ignore[misc]
            )
            found += [token + words.semantic_vocab_size for token in tokens]
        return [token - words.semantic_vocab_size for token in found]

    def _past(self, speaker: Any, most: int, ratio: float) -> tuple[list[int], list[int]]:
        """A speaker's semantic tokens and coarse codes, as far as they are looked at and in step with one another."""
        if speaker is None:
            return [], []
        meant = [int(one) for one in speaker["semantic_prompt"]]
        books = torch.as_tensor(speaker["coarse_prompt"]).long()
        shift = torch.arange(len(books), device=books.device)[:, None] * self.codes + self.words.semantic_vocab_size
        codes = (books + shift).T.flatten().tolist()
        count = min(most, len(meant) - len(meant) % 2, floor(len(codes) / ratio))
        return meant[-count:], codes[-round(count * ratio) :][:-2]  # the last two are left off, as the class does

    def _coarse(self, model: Any, asked: Sequence[int]) -> Guided:
        first, books = self.words.semantic_vocab_size, self.coarse.n_coarse_codebooks
        count = books * self.codes

        def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            own = torch.where(ids < count, ids.clamp(min=0) + first, ids - count)
            return {"input_ids": own, "position_ids": positions.clamp(max=model.config.block_size - 1)}

        def say(out: Any) -> Tensor:
            found: Tensor = out.logits[..., first : first + count]
            return found

        reading = Reading(trunk=model, vocabulary=count, read=read, say=say)
        # of two books the second may also be any id behind its own in the class's own processor: codes have none there
        return self._target(model, [count + one for one in asked], reading, Slots.books(books, self.codes))

    def _target(self, model: Any, asked: list[int], reading: Reading, slots: Slots | None) -> Guided:
        wide = widened(model, _BEYOND)
        made = Reading(
            trunk=wide,
            vocabulary=reading.vocabulary,
            read=reading.read,
            say=reading.say,
            looked_up=(model.input_embeds_layer.weight,),
        )
        return Guided(
            TransformersTarget(model, trees="mask", reading=made), [asked], [asked], 1.0, instead=True, slots=slots
        )

    @property
    def rate(self) -> int:
        return int(self.model.generation_config.sample_rate)

    @torch.no_grad()
    def sound(self, outcome: dict[str, Any]) -> Tensor:
        """Through the class's own fine stage and codec, as samples."""
        from transformers.models.bark.generation_configuration_bark import BarkFineGenerationConfig

        given = self.model.generation_config
        shift = torch.arange(self.coarse.n_coarse_codebooks) * self.codes + self.words.semantic_vocab_size
        coarse = (torch.tensor(outcome["coarse"]) + shift).flatten()[None].to(self.model.device)
        fine = self.model.fine_acoustics.generate(
            coarse,
            semantic_generation_config=self.words,
            coarse_generation_config=self.coarse,
            fine_generation_config=BarkFineGenerationConfig(**given.fine_acoustics_config),
            codebook_size=self.codes,
        )
        found: Tensor = self.model.codec_decode(fine)[0]
        return found


of = Bark  # what outrider.core.assets.hub_models asks for
