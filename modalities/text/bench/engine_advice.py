"""The advice for vLLM and llama.cpp: the options to paste, from the records that were made here.

At temperature 0 a draft is accepted or not whatever the engine, so the records hold for all. llama.cpp's costs of
passes are measured with its own benchmark where it is built. vLLM's are measured where that is asked for, which takes
minutes, and are otherwise taken to be ours, which the advice says.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.core.advice.advise import Advice, advise
from outrider.core.advice.measure import RoundCosts
from outrider.core.advice.predict import Candidate, DraftCost, Machine, Prediction
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.text.bench import llama_cpp
from outrider.text.bench.advice import Checked, Study
from outrider.text.bench.peers import PEERS, Model, find_model
from outrider.text.bench.vllm_lookup import LONGEST_NGRAM, VllmLookup, ngram_and_length
from outrider.text.measurements import draft_model_of

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 13, 17)


@dataclass(frozen=True)
class EngineAdvice:
    """The advice for one engine."""

    engine: str
    prediction: Prediction | None  # None: don't draft
    options: tuple[str, ...]
    basis: str  # what the prediction rests on
    reason: str = ""
    checked: Checked | None = None

    def lines(self) -> list[str]:
        if self.prediction is None:
            return [f"{self.engine}: don't draft ({self.reason}); {self.basis}"]
        found = self.prediction
        speed = f"{found.speedup:.2f}x ({found.low:.2f}-{found.high:.2f})"
        return [f"{self.engine}: {speed}, {self.basis}", f"  {shlex.join(self.options)}"]

    def to_dict(self) -> dict[str, Any]:
        found = self.prediction
        predicted = None if found is None else {"speedup": found.speedup, "low": found.low, "high": found.high}
        return {
            "engine": self.engine,
            "options": list(self.options),
            "predicted": predicted,
            "basis": self.basis,
            "reason": self.reason,
        }


def engines(
    study: Study,
    given: Advice,
    model: str,
    draft_model: str | None = None,
    measured: Sequence[str] = (),
    *,
    check: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[EngineAdvice]:
    """The advice for every engine for which there is any; those of `measured` are installed and run."""
    draft = draft_model or draft_model_of(study.lm.name)
    runs_vllm = "vllm" in measured
    folder = study.lm.plain_folder() if runs_vllm else None
    files = find_model(model, folder, study.lm.end, study.lm.context, draft)
    found = [_vllm_measured(study, files, check, say) if runs_vllm else _vllm(study, given)]
    if torch.device(study.lm.device).type == "cpu" and files.gguf is not None:
        build = say if llama_cpp.NAME in measured else None
        found.append(_llama_cpp(study, given, files.gguf, files.draft, build))
    return [each for each in found if each is not None]


def _vllm_measured(study: Study, files: Model, check: bool, say: Callable[[str], None]) -> EngineAdvice:
    basis = "prompt lookup, from passes timed in vLLM"
    try:
        engine = VllmLookup(study, files, say)
        given = engine.advice()
        checked = engine.check(given.best[0]) if check else None
    except OutriderError as error:
        return EngineAdvice("vLLM", None, (), "not measured", str(error))
    if given.chosen is None:
        return EngineAdvice("vLLM", None, (), basis, given.reason, checked)
    shortest, length = ngram_and_length(given.chosen)
    config = {"method": PROMPT_LOOKUP.vllm, "num_speculative_tokens": length}
    config |= {"prompt_lookup_max": LONGEST_NGRAM, "prompt_lookup_min": shortest}
    options = ("--speculative-config", json.dumps(config))
    return EngineAdvice("vLLM", given.chosen, options, basis, checked=checked)


def _vllm(study: Study, given: Advice) -> EngineAdvice | None:
    known = [each.candidate for each in given.best if _method(each.candidate) in DRAFTERS]
    runnable = [each for each in known if DRAFTERS[_method(each)].vllm and each.longest]
    if not runnable:
        return None
    basis = "if its passes cost what ours do (its own were not measured)"
    best = advise(given.machine, runnable)
    if best.chosen is None:
        return EngineAdvice("vLLM", None, (), basis, best.reason)
    config = _config(study, best.chosen)
    return EngineAdvice("vLLM", best.chosen, ("--speculative-config", json.dumps(config)), basis)


def _method(candidate: Candidate) -> str:
    return candidate.name.partition(",")[0]


def _config(study: Study, chosen: Prediction) -> dict[str, Any]:
    """vLLM's speculative configuration; a trained drafter's folder is what `outrider export vllm` writes."""
    name = _method(chosen.candidate)
    config: dict[str, Any] = {"method": DRAFTERS[name].vllm, "num_speculative_tokens": chosen.length}
    if name == PROMPT_LOOKUP.name:
        return config | {"prompt_lookup_max": PEERS["vllm"].max_ngram, "prompt_lookup_min": 1}
    if not DRAFTERS[name].needs:
        return config
    draft = draft_model_of(study.lm.name)
    if name == DRAFT_MODEL.name and draft is not None:
        return config | {"model": str(study.lm.companion(draft).plain_folder())}
    return config | {"model": f"FOLDER of `outrider export vllm {name} --model {study.lm.name}`"}


def _llama_cpp(
    study: Study, given: Advice, gguf: Path, draft: Path | None, build: Callable[[str], None] | None
) -> EngineAdvice:
    """`build`: build it if it is missing, and say so."""
    if build is None and not llama_cpp.built():
        basis = "not measured: --peers llama.cpp builds it first"
        return EngineAdvice("llama.cpp", None, (), basis, "its costs are unknown")
    threads = torch.get_num_threads()
    try:
        if build is not None:
            llama_cpp.server(build)
        costs = llama_cpp.pass_costs(gguf, _WIDTHS, threads)
        machine = Machine(RoundCosts.of({(1, width): ms for width, ms in costs.items()}))
        candidates = []
        for each in (each.candidate for each in given.best if each.candidate.longest):
            if each.name == PROMPT_LOOKUP.name:
                candidates.append(replace(each, cost=DraftCost({})))
            elif each.name == DRAFT_MODEL.name and draft is not None:
                token = llama_cpp.pass_costs(draft, (1,), threads)[1]
                candidates.append(replace(each, cost=DraftCost({(1, 0): 0.0, (1, each.longest): token * each.longest})))
    except OutriderError as error:
        return EngineAdvice("llama.cpp", None, (), "its benchmark failed", str(error))
    basis = "from passes timed by llama-bench"
    best = advise(machine, candidates)
    if best.chosen is None:
        return EngineAdvice("llama.cpp", None, (), basis, best.reason)
    return EngineAdvice("llama.cpp", best.chosen, _llama_options(best.chosen, draft), basis)


def _llama_options(chosen: Prediction, draft: Path | None) -> tuple[str, ...]:
    if chosen.candidate.name == DRAFT_MODEL.name:
        return (
            "--spec-type",
            "draft-simple",
            "--spec-draft-model",
            str(draft),
            "--spec-draft-n-max",
            str(chosen.length),
        )
    sizes: Sequence[str] = ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", str(chosen.length))
    return ("--spec-type", "ngram-simple", *sizes)
