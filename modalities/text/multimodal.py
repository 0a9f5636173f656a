"""Multimodal language models: images or sound in the prompt, text out, decoded by the same loop as text models.

The embeddings of a prompt are intercepted where the transformers class passes them to its language model. This works
for any class that does so: LLaVA, SmolVLM and Idefics, Qwen2-VL with its three-dimensional positions. The prompt's
entries stay in the KV cache like any token's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets import store
from outrider.core.assets.hub_models import DTYPES, folder_of
from outrider.core.device import AUTO, usable_device, usual_dtype
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import DRAFTERS, Input
from outrider.core.validation import dtype_name
from outrider.text import loading
from outrider.text.model import TextModel
from outrider.text.stream import Result
from outrider.text.tokenizer import Tokens

_USED = {"inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", "input_ids"}
_IGNORED = {"return_dict", "output_attentions", "output_hidden_states", "logits_to_keep", "cache_position"}


class _Intercepted(Exception):
    """Carries the arguments of the language model's forward out of the call."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given


class MultimodalModel:
    """A transformers model with its processor; `draft` is a smaller model that drafts from the same inputs."""

    def __init__(self, model: Any, processor: Any, *, name: str = "", draft: MultimodalModel | None = None) -> None:
        self.model, self.processor, self.draft = model.eval(), processor, draft
        self.name = name or model.config.name_or_path or type(model).__name__
        self.tokens = Tokens.of_transformers(getattr(processor, "tokenizer", processor))
        given = model.generation_config.eos_token_id
        self.end = tuple(given) if isinstance(given, list) else () if given is None else (given,)

    def ask(self, question: str, images: Sequence[Any] = (), **options: Any) -> Result:
        """Answer a question about images; the options are those of outrider.text.options.Options."""
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        given = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        return self.answer(dict(given), **options)

    def answer(self, given: Mapping[str, Any], **options: Any) -> Result:
        """Answer a prompt given as the processor's output: input_ids [1, L], pixel_values and so on."""
        ids = torch.as_tensor(given["input_ids"])
        if ids.dim() != 2 or len(ids) != 1:
            raise InvalidOption(f"input_ids have shape {list(ids.shape)}; expected one prompt, [1, L]")
        interface = self._interface(given)
        config = self.model.config.get_text_config()
        drafter = options.get("drafter")
        if self.draft is not None and isinstance(drafter, str) and _runs_draft_model(drafter):
            small = self.draft.target(self.draft._interface(given))
            options["drafter_options"] = {"model": small, **options.get("drafter_options", {})}
        lm = TextModel(
            lambda: self.target(interface),
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

    def target(self, interface: ModelInterface) -> TransformersTarget:
        """Make a target for one intercepted prompt."""
        return TransformersTarget(self.model, trees="mask", interface=interface)

    def _interface(self, given: Mapping[str, Any]) -> ModelInterface:
        language, head = self.model.get_decoder(), self.model.get_output_embeddings()
        arguments = intercept(self.model, language, given)
        embeddings = arguments["inputs_embeds"][0]  # [L, D]
        length, prompt_ids = len(embeddings), torch.as_tensor(given["input_ids"])[0].to(embeddings.device)
        embed = language.get_input_embeddings()
        prompt_positions: Tensor | None = arguments.get("position_ids")
        if prompt_positions is not None and prompt_positions.dim() != 3:  # only [3 or 4, 1, L] has several dimensions
            prompt_positions = None

        def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            index = positions.clamp(max=length - 1)
            in_prompt = (positions < length) & (
                ids == prompt_ids[index]
            )  # any other id at these positions is an ordinary token
            x = torch.where(in_prompt[..., None], embeddings[index], embed(ids.clamp(0, embed.num_embeddings - 1)))
            if prompt_positions is None:
                return {"inputs_embeds": x, "position_ids": positions}
            first = prompt_positions[:, 0, index]  # [3, B, Q]
            further = int(prompt_positions.max()) + 1 + positions - length
            return {"inputs_embeds": x, "position_ids": torch.where(positions < length, first, further)}

        return ModelInterface(
            trunk=language,
            vocabulary=head.weight.shape[0],
            inputs=trunk_inputs,
            logits=lambda out: head(out.last_hidden_state),
            weights=(language, head),
            lookup_tables=() if head.weight is embed.weight else (embed.weight,),
        )


def _runs_draft_model(drafter: str) -> bool:
    return drafter in DRAFTERS and Input.DRAFT_MODEL in DRAFTERS[drafter].inputs.values()


@torch.no_grad()
def intercept(model: Any, language: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class passes to its language model for these inputs."""

    def stop(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        raise _Intercepted(kwargs)

    handle = language.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**{name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in given.items()})
    except _Intercepted as error:
        arguments = {name: value for name, value in error.given.items() if value is not None}
    else:
        raise Incompatible(f"{type(model).__name__} did not call its language model, so it is not supported")
    finally:
        handle.remove()
    if "inputs_embeds" not in arguments:
        raise Incompatible(f"{type(model).__name__} passes no embeddings to its language model, so it is not supported")
    if unsupported := sorted(set(arguments) - _USED - _IGNORED):
        raise Incompatible(
            f"{type(model).__name__} passes more than embeddings to its language model ({', '.join(unsupported)}), "
            "which drafting would lose; decode it with transformers' own generate()"
        )
    return arguments


def load(
    source: str | Path,
    *,
    draft_model: str | Path | None = None,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    revision: str | None = None,
) -> MultimodalModel:
    """Load a vision-language model by hub id or folder; `draft_model` names a smaller model of its family."""
    device = usable_device(device)
    dtype = usual_dtype(device) if dtype == AUTO else dtype_name(dtype, DTYPES)
    folder = folder_of(source, revision)
    model = store.transformers_model(folder, dtype, device, "AutoModelForImageTextToText")
    small = None if draft_model is None else load(draft_model, device=device, dtype=dtype)
    return MultimodalModel(model, store.transformers_processor(folder), name=str(source), draft=small)
