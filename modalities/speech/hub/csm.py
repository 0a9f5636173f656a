"""CSM of transformers: a backbone reads one frame of codes at a time and predicts the first codebook of the next frame;
a depth decoder predicts the other codebooks in order.

The tokens of a frame are its codes in depth order, so drafts extend along depth and over frames. A frame of end codes
is the end. Weights: sesame/csm-1b (32 codebooks of Mimi, 12.5 frames per second).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.engine.adapters.frames import FrameStore, FrameTarget
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.vocab_mask import RepeatingRanges, frames
from outrider.speech.hub.model import HeadStage, Stage, ids_of, processor_of
from outrider.speech.hub.similar_tokens import SimilarTokens, unit

_MAX_FRAMES = 125  # by default: ten seconds


class Csm:
    """A model with its processor. A prompt is a text, token ids, or the processor's output for a conversation. `draft`
    is a smaller model with the same codebooks."""

    def __init__(self, model: Any, processor: Any = None, *, draft: Any = None) -> None:
        self.model, self.processor, self._draft = model, processor, draft
        self.books, self.codes = int(model.config.num_codebooks), int(model.config.vocab_size)
        self.slots = RepeatingRanges.codebooks(self.books, self.codes)
        rows = model.backbone_model.embed_tokens.embed_audio_tokens.weight
        count = self.books * self.codes
        self.similar = SimilarTokens(count, unit(lambda: rows[:count]), books=self.books)
        self.temperature = float(model.generation_config.temperature or 1.0)
        some = {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
        self.head_stages = {"": HeadStage(lambda: target(model, some), books=self.books)}

    def stages(self, prompt: Any, limit: int | None) -> Generator[Stage, list[int], list[list[int]]]:
        """One stage, whose outcome is frames of codes without the end frame."""
        inputs = self._inputs(prompt)
        tokens = yield Stage(
            lambda: target(self.model, inputs),
            (limit or _MAX_FRAMES) * self.books,
            stop=self._stop,
            draft=None if self._draft is None else lambda: target(self._draft, inputs),
            similar=self.similar,
            heads="",
        )
        codes = frames(tokens, self.books, self.codes)
        return codes[:-1] if codes and self._ends(codes[-1]) else codes

    def _inputs(self, prompt: Any) -> dict[str, Any]:
        if isinstance(prompt, str):
            read = processor_of(self.processor, "token ids")
            return dict(read(f"[0]{prompt}", add_special_tokens=True, return_tensors="pt"))
        return {"input_ids": torch.tensor([ids_of(prompt)])} if not isinstance(prompt, dict) else prompt

    def _ends(self, frame: Sequence[int]) -> bool:
        """Whether a frame is the end. The class compares all codebooks but the last."""
        return all(code == self.model.config.codebook_eos_token_id for code in frame[: self.books - 1])

    def _stop(self, row: int, tokens: Sequence[int]) -> int | None:
        for number, frame in enumerate(frames(tokens, self.books, self.codes)):
            if self._ends(frame):
                return (number + 1) * self.books
        return None

    @property
    def sample_rate(self) -> int:
        return int(self.model.codec_model.config.sampling_rate)

    @torch.no_grad()
    def sound(self, codes: Sequence[Sequence[int]]) -> Tensor:
        """Frames of codes -> samples."""
        grid = torch.tensor(codes, device=self.model.device).T[None]
        samples: Tensor = self.model.codec_model.decode(grid).audio_values[0, 0]
        return samples


@torch.no_grad()
def target(model: Any, inputs: dict[str, Any]) -> Guided:
    """The target of one row, whose prompt is the class's embeddings of its inputs."""
    books, codes = int(model.config.num_codebooks), int(model.config.vocab_size)
    names = [name for name in ("input_ids", "input_values", "input_values_cutoffs") if name in inputs]
    prompt = model._merge_input_ids_with_input_values(**{name: inputs[name] for name in names})["inputs_embeds"][0]
    length = len(prompt)  # [L, D]
    store, backbone, depth = FrameStore(length, books), model.backbone_model, model.depth_decoder

    def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
        of_prompt = prompt[ids.clamp(0, length - 1)]
        of_frames = backbone.embed_tokens(store.of(ids))
        embeddings = torch.where((ids < length)[..., None], of_prompt, of_frames)
        return {"inputs_embeds": embeddings, "position_ids": positions}

    @torch.no_grad()
    def deeper(states: Tensor, part: Tensor, count: Tensor) -> Tensor:
        """The states after `count` [B] codes of the current frame, which are the first of `part` [B, books]: the
        backbone's before the first codebook, the depth decoder's before the others."""
        longest = int(count.max())
        if not longest:
            return states
        ids = pad(part[:, :longest], (1, 0))
        mask = torch.ones_like(ids)  # without a mask the class infers several packed texts per row
        read = depth.model(input_ids=ids, backbone_last_hidden_state=states, attention_mask=mask, use_cache=False)
        deep = read.last_hidden_state
        own = deep.gather(1, count[:, None, None].expand(-1, 1, deep.shape[2]))[:, 0]
        width = max(own.shape[1], states.shape[1])
        own, states = (pad(each, (0, width - each.shape[1])) for each in (own, states))
        return torch.where((count > 0)[:, None], own, states)

    interface = ModelInterface(
        trunk=backbone, vocabulary=1 << 40, inputs=trunk_inputs, logits=lambda out: out.last_hidden_state
    )
    inner = TransformersTarget(model, trees="mask", interface=interface)
    depth_bytes = sum(parameter.numel() * parameter.element_size() for parameter in depth.parameters())
    heads = [model.lm_head.weight, *depth.codebooks_head.weight.transpose(1, 2)]
    framed = FrameTarget(
        inner,
        store,
        books,
        codes,
        deeper,
        heads,
        embedding=lambda: backbone.embed_tokens.embed_audio_tokens.weight[: books * codes],
        depth_bytes=depth_bytes,
    )
    prompt_ids = [framed.vocabulary + index for index in range(length)]
    mask = RepeatingRanges.codebooks(books, codes)
    return Guided(framed, [prompt_ids], [prompt_ids], 1.0, skip_first=True, allowed=mask)
