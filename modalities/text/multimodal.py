"""Language models that see or hear: pictures or sound in the prompt, text out, on the same loop as any.

What the class makes of a prompt, words with pictures among them, is caught where its language model would read it, so
that any class of transformers that hands its language model embeddings will do: LLaVA, SmolVLM and Idefics, Qwen2-VL
with its positions in three directions. The prompt's entries stay in the cache as any token's do, and are never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets import store
from outrider.core.assets.hub_models import folder_of
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import DRAFTERS, Input
from outrider.text import loading
from outrider.text.model import TextModel
from outrider.text.stream import Result
from outrider.text.tokenizer import Tokens

_TAKEN = {"inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", "input_ids"}
_SILENT = {"return_dict", "output_attentions", "output_hidden_states", "logits_to_keep", "cache_position"}


class _Caught(Exception):
    """What the language model would have read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


class MultimodalModel:
    """A model of transformers with its processor; `draft` is a smaller one that reads the same inputs and drafts."""

    def __init__(self, model: Any, processor: Any, *, name: str = "", draft: MultimodalModel | None = None) -> None:
        self.model, self.processor, self.draft = model.eval(), processor, draft
        self.name = name or model.config.name_or_path or type(model).__name__
        self.tokens = Tokens.of_transformers(getattr(processor, "tokenizer", processor))
        given = model.generation_config.eos_token_id
        self.end = tuple(given) if isinstance(given, list) else () if given is None else (given,)

    def ask(self, question: str, pictures: Sequence[Any] = (), **options: Any) -> Result:
        """A question about pictures. The options are those of outrider.text.options.Options."""
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        given = self.processor(text=text, images=list(pictures) or None, return_tensors="pt")
        return self.answer(dict(given), **options)

    def answer(self, given: Mapping[str, Any], **options: Any) -> Result:
        """The same for what the processor made of one prompt: input_ids [1, L], pixel_values and so on."""
        ids = torch.as_tensor(given["input_ids"])
        if ids.dim() != 2 or len(ids) != 1:
            raise InvalidOption(f"input_ids are {list(ids.shape)}; one prompt is asked for at a time, [1, L]")
        reading = self._reading(given)
        config = self.model.config.get_text_config()
        drafter = options.get("drafter")
        if self.draft is not None and isinstance(drafter, str) and _runs_draft_model(drafter):
            small = self.draft.target(self.draft._reading(given))
            options["drafter_options"] = {"model": small, **options.get("drafter_options", {})}
        lm = TextModel(
            lambda: self.target(reading),
            self.tokens,
            name=self.name,
            end=self.end,
            context=int(getattr(config, "max_position_embeddings", None) or 1 << 30),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            keep=False,
            load_other=loading.companion,
        )
        result: Result = lm.generate([int(one) for one in ids[0]], **options)
        return result

    def target(self, reading: Reading) -> TransformersTarget:
        """For one prompt, as it is read."""
        return TransformersTarget(self.model, trees="mask", reading=reading)

    def _reading(self, given: Mapping[str, Any]) -> Reading:
        language, head = self.model.get_decoder(), self.model.get_output_embeddings()
        seen = caught(self.model, language, given)
        before = seen["inputs_embeds"][0]  # [L, D]
        length, asked = len(before), torch.as_tensor(given["input_ids"])[0].to(before.device)
        embed = language.get_input_embeddings()
        places: Tensor | None = seen.get("position_ids")
        if places is not None and places.dim() != 3:  # [3 or 4, 1, L] are positions in several directions
            places = None

        def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            at = positions.clamp(max=length - 1)
            told = (positions < length) & (ids == asked[at])  # another id there is a word by itself
            x = torch.where(told[..., None], before[at], embed(ids.clamp(0, embed.num_embeddings - 1)))
            if places is None:
                return {"inputs_embeds": x, "position_ids": positions}
            first = places[:, 0, at]  # [3, B, Q]
            further = int(places.max()) + 1 + positions - length
            return {"inputs_embeds": x, "position_ids": torch.where(positions < length, first, further)}

        return Reading(
            trunk=language,
            vocabulary=head.weight.shape[0],
            read=read,
            say=lambda out: head(out.last_hidden_state),
            weights=(language, head),
            looked_up=() if head.weight is embed.weight else (embed.weight,),
        )


def _runs_draft_model(drafter: str) -> bool:
    return drafter in DRAFTERS and Input.DRAFT_MODEL in DRAFTERS[drafter].inputs.values()


@torch.no_grad()
def caught(model: Any, language: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a class hands its language model for these inputs."""

    def stop(module: Any, args: Any, named: dict[str, Any]) -> None:
        raise _Caught(named)

    handle = language.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**{name: one.to(model.device) if isinstance(one, Tensor) else one for name, one in given.items()})
    except _Caught as found:
        held = {name: one for name, one in found.given.items() if one is not None}
    else:
        raise Incompatible(f"{type(model).__name__} did not call its language model; it can't be read here")
    finally:
        handle.remove()
    if "inputs_embeds" not in held:
        raise Incompatible(f"{type(model).__name__} hands its language model no embeddings; it can't be read here")
    if beyond := sorted(set(held) - _TAKEN - _SILENT):
        raise Incompatible(
            f"{type(model).__name__} hands its language model more than embeddings ({', '.join(beyond)}), "
            "which would be lost with drafting; decode it with transformers' own generate()"
        )
    return held


def load(
    source: str | Path,
    *,
    draft_model: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
) -> MultimodalModel:
    """Load a vision-language model by its hub id or folder; `draft_model` names a smaller one of its family."""
    folder = folder_of(source, revision)
    model = store.transformers_model(folder, dtype, device, "AutoModelForImageTextToText")
    small = None if draft_model is None else load(draft_model, device=device, dtype=dtype)
    return MultimodalModel(model, store.transformers_processor(folder), name=str(source), draft=small)
