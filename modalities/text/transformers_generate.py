"""A decoding loop for transformers: `model.generate(..., custom_generate=outrider.text.custom_generate)`.

Follows generate()'s settings (end tokens, lengths, sampling, stopping criteria) and raises Incompatible for those it
does not support. Independent of tokenizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.decode import Stop, decode
from outrider.core.distribution import LogitsProcessor, Sampling
from outrider.core.engine.loading.model_object import target_of
from outrider.core.errors import Incompatible
from outrider.core.methods import make_rule
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.methods.resolve import Catalogue
from outrider.core.methods.rules import EXACT
from outrider.core.protocol import Drafter, Rule
from outrider.core.step_recorder import Record
from outrider.text.stopping import Criteria

# processors of options that our own sampling applies
_WARPERS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}
_PENALTY = "RepetitionPenaltyLogitsProcessor"
_STATEFUL = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
_HANDLED_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    drafter: str | Drafter | None = PROMPT_LOOKUP.name,
    rule: str | Rule = EXACT.name,
    seed: int | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    rule_options: Mapping[str, Any] | None = None,
    draft_model: Any = None,
    num_draft_tokens: int | None = None,
    stream_to: Any = None,
    streamer: Any = None,
    **others: Any,
) -> Any:
    """Decode speculatively in place of transformers' own loop; pass `drafter`, `rule`, `seed` and their options to
    generate(). Without a seed, one is drawn from torch's global generator. `assistant_model` is used as `draft_model`.
    Pass a streamer as `stream_to`, because transformers 5 does not pass `streamer` on.

    >>> out = model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=custom_generate)
    >>> bool((out == model.generate(ids, max_new_tokens=12, do_sample=False)).all())
    True
    """
    _check(generation_config)
    mask = others.get("attention_mask")
    prompts = [
        ids[keep.bool()].tolist() for ids, keep in zip(input_ids, input_ids >= 0 if mask is None else mask, strict=True)
    ]
    make, _ = target_of(model)
    padded = any(len(prompt) < input_ids.shape[1] for prompt in prompts)
    draft_model = _assistant() if draft_model is None else draft_model
    if draft_model is not None:
        draft_model = target_of(draft_model)[0]()
        drafter = DRAFT_MODEL.name if drafter == PROMPT_LOOKUP.name else drafter
    drafting = Catalogue().drafter(
        drafter, drafter_options or {}, draft_model=draft_model, num_draft_tokens=num_draft_tokens
    )
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    steps = decode(
        make(),
        drafting.made,
        make_rule(rule, **(rule_options or {})) if isinstance(rule, str) else rule,
        prompts,
        sampling=_sampling(generation_config, _processors(logits_processor, padded)),
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        stop=_stop(prompts, stopping_criteria, input_ids.device),
        seed=seed,
        record=Record(nodes=False),
    )
    emitted: list[list[int]] = [[] for _ in prompts]
    if stream_to is not None:
        stream_to.put(input_ids.cpu())  # as generate() does with `streamer`
    streamer = streamer if stream_to is None else stream_to
    for step in steps:
        emitted[step.row] += step.emitted
        if streamer is not None:
            streamer.put(torch.tensor(step.emitted))
    if streamer is not None:
        streamer.end()
    return _output(input_ids, emitted, generation_config)


def _assistant() -> Any:
    """The `assistant_model` of the running generate(), which transformers 5 passes on to its own loops only."""
    frame = inspect.currentframe()
    for _ in range(3):  # this function, custom_generate, generate
        if frame is not None and frame.f_code.co_name == "generate":
            return frame.f_locals.get("assistant_model")
        frame = None if frame is None else frame.f_back
    return None


def _processors(processors: Any, padded: bool) -> tuple[LogitsProcessor, ...]:
    """The processors that our own sampling does not apply itself, in their order and with the repetition penalty."""
    names = [type(processor).__name__ for processor in processors]
    if set(names) <= {*_WARPERS, _PENALTY}:
        return ()
    first_warper = next((place for place, name in enumerate(names) if name in _WARPERS), len(names))
    unsupported = [name for name in names if name in _STATEFUL or "Encoder" in name]
    unsupported += [f"{name} after the temperature" for name in names[first_warper:] if name not in _WARPERS]
    if padded:  # some count positions from the start of the padded prompt
        unsupported += [f"{name} with padded prompts" for name in names if name not in {*_WARPERS, _PENALTY}]
    _refuse(unsupported)
    return tuple(processors[:first_warper])


def _check(config: Any) -> None:
    unsupported = [f"num_beams={config.num_beams}"] if (config.num_beams or 1) > 1 else []
    output_options = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    unsupported += [name for name in output_options if getattr(config, name, None)]
    _refuse(unsupported)


def _refuse(unsupported: Sequence[str]) -> None:
    if unsupported:
        raise Incompatible(
            f"custom_generate does not support {', '.join(unsupported)}; remove it, or decode without custom_generate"
        )


def _sampling(config: Any, processors: tuple[LogitsProcessor, ...]) -> Sampling:
    end = config.eos_token_id
    ends = (end,) if isinstance(end, int) else tuple(end or ())
    penalty = 1.0 if processors else config.repetition_penalty or 1.0
    if not config.do_sample:
        return Sampling(temperature=0.0, repetition_penalty=penalty, processors=processors, end=ends)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
        processors=processors,
        end=ends,
    )


def _stop(prompts: list[list[int]], criteria: Any, device: torch.device) -> Stop | None:
    """Apply the remaining stopping criteria after every token, as transformers does."""
    custom = [criterion for criterion in criteria if type(criterion).__name__ not in _HANDLED_CRITERIA]
    if not custom:
        return None
    rows = [Criteria(custom, prompt, device) for prompt in prompts]
    return lambda row, tokens: rows[row].cut(tokens)


def _output(input_ids: Tensor, emitted: list[list[int]], config: Any) -> Any:
    """Return prompts and new tokens as generate() does, padded on the right."""
    end = config.eos_token_id if isinstance(config.eos_token_id, int) else next(iter(config.eos_token_id or [0]))
    pad = end if config.pad_token_id is None else config.pad_token_id
    length = max(map(len, emitted))
    rows = [[*row, *[pad] * (length - len(row))] for row in emitted]
    sequences = torch.cat([input_ids, torch.tensor(rows, device=input_ids.device).view(len(rows), length)], 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
