"""Bark of transformers: text to semantic tokens, then to codes of the two coarse codebooks, which alternate in one
stream.

The class's own third stage predicts the fine codebooks in parallel, so there is nothing to draft. As in the class, the
coarse stage is decoded window by window, each after a limited history. Weights: suno/bark and suno/bark-small.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.engine.adapters.model_parts import of_ids, shared_weights
from outrider.core.engine.trainable.module_surgery import extend_causal_mask
from outrider.core.errors import Incompatible
from outrider.core.vocab_mask import RepeatingRanges
from outrider.speech.hub.model import HeadStage, Stage, processor_of
from outrider.speech.hub.similar_tokens import SimilarTokens, unit

_DRAFT_OVERHANG = 256  # attention columns for draft nodes beyond the last position


class Bark:
    """A model with its processor. A prompt is a text or the processor's output, with or without a speaker. `draft` is a
    smaller model with the same tokens, such as bark-small."""

    def __init__(self, model: Any, processor: Any = None, *, draft: Any = None) -> None:
        from transformers.models.bark.generation_configuration_bark import (
            BarkCoarseGenerationConfig,
            BarkSemanticGenerationConfig,
        )

        self.model, self.processor, self._draft = model, processor, draft
        config = model.generation_config
        self.semantic = BarkSemanticGenerationConfig(**config.semantic_config)
        self.coarse = BarkCoarseGenerationConfig(**config.coarse_acoustics_config)
        self.codes = int(config.codebook_size)
        if not self.semantic.semantic_pad_token == self.semantic.eos_token_id == self.semantic.semantic_vocab_size:
            raise Incompatible(
                f"Bark's semantic end token is {self.semantic.eos_token_id}; expected the id after all semantic "
                f"tokens, {self.semantic.semantic_vocab_size}"
            )

        semantic, count = model.semantic.input_embeds_layer.weight, self.semantic.semantic_vocab_size
        self._semantic_similar = SimilarTokens(count + 1, unit(lambda: semantic[:count]), ids=range(count))
        coarse, size = model.coarse_acoustics.input_embeds_layer.weight, self.coarse.n_coarse_codebooks * self.codes
        self._coarse_similar = SimilarTokens(
            size, unit(lambda: coarse[count : count + size]), books=self.coarse.n_coarse_codebooks
        )

        self.temperature = float(self.semantic.temperature or 1.0)
        some = {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
        self.head_stages = {
            "semantic": HeadStage(lambda: self._semantic_target(model.semantic, some)),
            "coarse": HeadStage(lambda: self._coarse_target(model.coarse_acoustics, [0])),
        }

    def stages(self, prompt: Any, limit: int | None) -> Generator[Stage, list[int], dict[str, Any]]:
        """The semantic stage and the windows of the coarse stage. The outcome has semantic tokens and coarse frames."""
        inputs = prompt
        if isinstance(prompt, str):
            inputs = processor_of(self.processor, "the input_ids and attention_mask of the text")(prompt)
        draft = None if self._draft is None else self._draft.semantic
        end = self.semantic.semantic_vocab_size
        tokens = yield Stage(
            lambda: self._semantic_target(self.model.semantic, inputs),
            limit or self.semantic.max_new_tokens,
            end=(end,),
            draft=None if draft is None else lambda: self._semantic_target(draft, inputs),
            similar=self._semantic_similar,
            heads="semantic",
        )
        semantic = [token for token in tokens if token != end]
        coarse = yield from self._coarse_stages(semantic, inputs.get("history_prompt"))
        books = self.coarse.n_coarse_codebooks
        starts = range(0, len(coarse), books)
        frames = [[code % self.codes for code in coarse[start : start + books]] for start in starts]
        return {"semantic": tokens, "coarse": frames}

    def _semantic_target(self, model: Any, inputs: Any) -> Guided:
        """The target of the semantic stage. Its prompt is the text's embeddings plus those of the speaker's tokens."""
        length, pad = self.semantic.max_input_semantic_length, self.semantic.semantic_pad_token
        ids = torch.as_tensor(inputs["input_ids"])[:, :length].to(model.device) + self.semantic.text_encoding_offset
        if (mask := inputs.get("attention_mask")) is not None:
            present = torch.as_tensor(mask)[:, :length].to(model.device).bool()
            ids = ids.masked_fill(~present, self.semantic.text_pad_token)
        history = torch.full_like(ids, pad)
        if (speaker := inputs.get("history_prompt")) is not None:
            past = torch.as_tensor(speaker["semantic_prompt"])[-length:].to(ids)
            history[:, : len(past)] = past[: ids.shape[1]]
        embed = model.input_embeds_layer
        start = torch.tensor([[self.semantic.semantic_infer_token]], device=model.device)
        with torch.no_grad():
            prompt = torch.cat([embed(ids) + embed(history), embed(start)], 1)[0]  # [L, D]
        count, min_end_probability = self.semantic.semantic_vocab_size + 1, self.semantic.min_eos_p

        def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            of_tokens = embed(ids.clamp(0, count - 1))
            of_prompt = prompt[(ids - count).clamp(0, len(prompt) - 1)]
            embeddings = torch.where((ids < count)[..., None], of_tokens, of_prompt)
            return {"inputs_embeds": embeddings, "position_ids": positions.clamp(max=model.config.block_size - 1)}

        def say(out: Any) -> Tensor:
            logits: Tensor = out.logits[..., :count]
            if min_end_probability:  # the class ends as soon as the end token exceeds it
                ends = logits.float().softmax(-1)[..., -1:] > min_end_probability
                inside = torch.arange(count, device=logits.device) < count - 1
                logits = logits.masked_fill(ends & inside, -torch.inf)
            return logits

        prompt_ids = [count + index for index in range(len(prompt))]
        interface = ModelInterface(trunk=model, vocabulary=count, inputs=trunk_inputs, logits=say)
        return self._target(model, prompt_ids, interface, 0, None)

    def _coarse_stages(self, semantic: list[int], speaker: Any) -> Generator[Stage, list[int], list[int]]:
        """The coarse stage, window by window; returns its codes."""
        coarse, first = self.coarse, self.semantic.semantic_vocab_size
        books = coarse.n_coarse_codebooks
        ratio = coarse.coarse_rate_hz / self.semantic.semantic_rate_hz * books  # codes per semantic token
        max_history = floor(coarse.max_coarse_history / ratio)
        total = round(floor(len(semantic) * ratio / books) * books)
        past, past_codes = self._speaker_history(speaker, max_history, ratio)
        all_semantic = [*past, *semantic]
        draft = None if self._draft is None else self._draft.coarse_acoustics
        codes: list[int] = []
        for _ in range(ceil(total / coarse.sliding_window_len)):
            position = len(past) + round(len(codes) / ratio)
            window = all_semantic[max(0, position - max_history) :][: coarse.max_coarse_input_length]
            window += [coarse.coarse_semantic_pad_token] * (coarse.max_coarse_input_length - len(window))
            prompt = [*window, coarse.coarse_infer_token, *[*past_codes, *codes][-coarse.max_coarse_history :]]
            if coarse.pad_token_id is not None and coarse.pad_token_id != coarse.eos_token_id:
                prompt = [token for token in prompt if token != coarse.pad_token_id]  # the class masks padding
            tokens = yield Stage(
                lambda prompt=prompt: self._coarse_target(self.model.coarse_acoustics, prompt),  # type: ignore[misc]
                min(coarse.sliding_window_len, total - len(codes)),
                draft=None if draft is None else lambda prompt=prompt: self._coarse_target(draft, prompt),  # type: ignore[misc]
                similar=self._coarse_similar,
                heads="coarse",
            )
            codes += [token + first for token in tokens]
        return [code - first for code in codes]

    def _speaker_history(self, speaker: Any, limit: int, ratio: float) -> tuple[list[int], list[int]]:
        """A speaker's last semantic tokens, up to `limit`, and the coarse codes that belong to them."""
        if speaker is None:
            return [], []
        semantic = [int(token) for token in speaker["semantic_prompt"]]
        books = torch.as_tensor(speaker["coarse_prompt"]).long()
        shift = torch.arange(len(books), device=books.device)[:, None] * self.codes + self.semantic.semantic_vocab_size
        codes = (books + shift).T.flatten().tolist()
        count = min(limit, len(semantic) - len(semantic) % 2, floor(len(codes) / ratio))
        return semantic[-count:], codes[-round(count * ratio) :][:-2]  # the class drops the last two

    def _coarse_target(self, model: Any, prompt: Sequence[int]) -> Guided:
        first, books = self.semantic.semantic_vocab_size, self.coarse.n_coarse_codebooks
        count = books * self.codes

        def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            model_ids = torch.where(ids < count, ids.clamp(min=0) + first, ids - count)
            return {"input_ids": model_ids, "position_ids": positions.clamp(max=model.config.block_size - 1)}

        def say(out: Any) -> Tensor:
            logits: Tensor = out.logits[..., first : first + count]
            return logits

        interface = ModelInterface(trunk=model, vocabulary=count, inputs=trunk_inputs, logits=say)
        # the class's processor also allows ids after the second codebook's in its turn; there are no such codes
        slots = RepeatingRanges.codebooks(books, self.codes)
        return self._target(model, [count + token for token in prompt], interface, first, slots)

    def _target(
        self, model: Any, prompt: list[int], interface: ModelInterface, first: int, slots: RepeatingRanges | None
    ) -> Guided:
        """`first`: the model's id of token 0."""
        wider = ModelInterface(
            trunk=extend_causal_mask(model, _DRAFT_OVERHANG),
            vocabulary=interface.vocabulary,
            inputs=interface.inputs,
            logits=interface.logits,
            lookup_tables=(model.input_embeds_layer.weight,),
        )
        inner = TransformersTarget(model, trees="mask", interface=wider)
        ids = torch.arange(first, first + interface.vocabulary, device=model.device)
        inner.shared = lambda: of_ids(shared_weights(model, model.lm_head), ids)
        return Guided(inner, [prompt], [prompt], 1.0, skip_first=True, allowed=slots)

    @property
    def sample_rate(self) -> int:
        return int(self.model.generation_config.sample_rate)

    @torch.no_grad()
    def sound(self, outcome: dict[str, Any]) -> Tensor:
        """The samples of an outcome, by the class's fine stage and codec."""
        from transformers.models.bark.generation_configuration_bark import BarkFineGenerationConfig

        config = self.model.generation_config
        shift = torch.arange(self.coarse.n_coarse_codebooks) * self.codes + self.semantic.semantic_vocab_size
        coarse = (torch.tensor(outcome["coarse"]) + shift).flatten()[None].to(self.model.device)
        fine = self.model.fine_acoustics.generate(
            coarse,
            semantic_generation_config=self.semantic,
            coarse_generation_config=self.coarse,
            fine_generation_config=BarkFineGenerationConfig(**config.fine_acoustics_config),
            codebook_size=self.codes,
        )
        samples: Tensor = self.model.codec_decode(fine)[0]
        return samples
