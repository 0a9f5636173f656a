"""CSM of transformers: a backbone that reads a frame of codes at a time and says the first book of the next, and a
decoder along depth that says the other books one after another.

A frame is its books as tokens in the order of depth, so that drafts reach along depth and over frames alike; a frame of
nothing but the code that ends speech is the end. Weights: sesame/csm-1b (32 books of Mimi, 12.5 frames a second).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.frames import FrameTarget, Store
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.vocab_mask import Slots, frames
from outrider.speech.hub.model import Part, ids_of

_FRAMES = 125  # ten seconds


class Csm:
    """A model with its processor; a prompt is a text, or what the processor makes of a conversation. `draft` is a model
    of the same books that drafts."""

    def __init__(self, model: Any, processor: Any = None, *, draft: Any = None) -> None:
        self.model, self.processor, self._draft = model, processor, draft
        self.books, self.codes = int(model.config.num_codebooks), int(model.config.vocab_size)
        self.slots = Slots.books(self.books, self.codes)

    def stages(self, prompt: Any, limit: int | None) -> Generator[Part, list[int], list[list[int]]]:
        """Comes to frames of codes; the one that ends is left out."""
        given = self._given(prompt)
        tokens = yield Part(
            lambda: target(self.model, given),
            (limit or _FRAMES) * self.books,
            stop=self._stop,
            draft=None if self._draft is None else lambda: target(self._draft, given),
        )
        found = frames(tokens, self.books, self.codes)
        return found[:-1] if found and self._ends(found[-1]) else found

    def _given(self, prompt: Any) -> dict[str, Any]:
        if isinstance(prompt, str):
            return dict(self.processor(f"[0]{prompt}", add_special_tokens=True, return_tensors="pt"))
        return {"input_ids": torch.tensor([ids_of(prompt)])} if not isinstance(prompt, dict) else prompt

    def _ends(self, frame: Sequence[int]) -> bool:
        """The class looks at all books but the last."""
        return all(code == self.model.config.codebook_eos_token_id for code in frame[: self.books - 1])

    def _stop(self, row: int, tokens: Sequence[int]) -> int | None:
        for number, frame in enumerate(frames(tokens, self.books, self.codes)):
            if self._ends(frame):
                return (number + 1) * self.books
        return None

    @property
    def rate(self) -> int:
        return int(self.model.codec_model.config.sampling_rate)

    @torch.no_grad()
    def sound(self, codes: Sequence[Sequence[int]]) -> Tensor:
        """Frames of codes as samples."""
        held = torch.tensor(codes, device=self.model.device).T[None]
        found: Tensor = self.model.codec_model.decode(held).audio_values[0, 0]
        return found


@torch.no_grad()
def target(model: Any, given: dict[str, Any]) -> Guided:
    """One row that goes on from what the class makes of its inputs."""
    books, codes = int(model.config.num_codebooks), int(model.config.vocab_size)
    wanted = {name: given[name] for name in ("input_ids", "input_values", "input_values_cutoffs") if name in given}
    before = model._merge_input_ids_with_input_values(**wanted)["inputs_embeds"][0]  # [L, D]
    store, backbone, depth = Store(len(before), books), model.backbone_model, model.depth_decoder

    def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
        said = before[ids.clamp(0, len(before) - 1)]
        heard = backbone.embed_tokens(store.of(ids))
        return {"inputs_embeds": torch.where((ids < len(before))[..., None], said, heard), "position_ids": positions}

    @torch.no_grad()
    def say(states: Tensor, part: Tensor, count: Tensor) -> Tensor:
        found: Tensor = model.lm_head(states)
        longest = int(count.max())
        if longest:
            ids = torch.nn.functional.pad(part[:, :longest], (1, 0))
            seen = torch.ones_like(ids)  # without it the class looks for several texts in one row
            deep = depth(input_ids=ids, backbone_last_hidden_state=states, attention_mask=seen, use_cache=False).logits
            own = deep.gather(1, (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, deep.shape[2]))[:, 0]
            found = torch.where((count > 0)[:, None], own, found)
        return found

    reading = Reading(trunk=backbone, vocabulary=1 << 40, read=read, say=lambda out: out.last_hidden_state)
    inner = TransformersTarget(model, trees="mask", reading=reading)
    deep = sum(one.numel() * one.element_size() for one in depth.parameters())
    framed = FrameTarget(inner, store, books, codes, say, depth_bytes=deep)
    asked = [framed.vocabulary + place for place in range(len(before))]
    return Guided(framed, [asked], [asked], 1.0, instead=True, slots=Slots.books(books, codes))


of = Csm  # what outrider.core.assets.hub_models asks for
