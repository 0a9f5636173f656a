"""What a drafter needs besides its options: other models by name, a bridge to one with another tokenizer, and what was
measured for it before.

Options come in as people write them. Knows language models, not how any drafter works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.bench.timing import pass_cost
from outrider.core.cost.break_even import Costs
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model import sequoia
from outrider.core.drafters.draft_model.vocab_bridge import Translated
from outrider.core.drafters.self_speculative.layer_search import search
from outrider.core.errors import InvalidOption, unknown
from outrider.core.paths import cache_folder
from outrider.text import auto_drafter
from outrider.text.vocab_bridge import Bridge

if TYPE_CHECKING:
    from outrider.text.model import TextModel

CALIBRATED = ("sequoia", "draft-verify")
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def met(model: TextModel, drafter: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's options, with models by name made into targets, and what `calibrate` found put in."""
    given = dict(options)
    if drafter == "cross-vocabulary":
        return _crossing(model, given)
    if "model" in given:
        given["model"] = _target(model, given["model"])
    if isinstance(given.get("other_models"), Sequence) and not isinstance(given["other_models"], str):
        given["other_models"] = [_target(model, one) for one in given["other_models"]]
    path = calibration(model, drafter)
    if drafter == "sequoia" and given.get("acceptance") is None and path.is_file():
        given["acceptance"] = path
    if drafter == "draft-verify" and given.get("skip") is None:
        if not path.is_file():
            raise InvalidOption(
                "the drafter 'draft-verify' needs skip=..., the sublayers to leave out, such as "
                "'attention.5,mlp.5'; `outrider bench text --calibrate draft-verify` finds and keeps them"
            )
        given["skip"] = path
    if drafter == "adaptive":
        names = [one for one in given.get("drafters", ()) if isinstance(one, str)]
        own = given.get("options") or {}
        given["options"] = {**own, **{name: model.equipped(name, own.get(name, {})) for name in names}}
    if drafter == "guarded" and isinstance(inner := given.get("drafter", "prompt-lookup"), str):
        given["options"] = model.equipped(inner, given.get("options") or {})
    if drafter == "guarded" and "verify" not in given:  # what wider passes cost here, as measured for "auto"
        given["verify"] = Costs.parse(
            str(given.pop("costs", "")) or auto_drafter.calibration(model.target, model.where())
        )
    return given


def companion(model: TextModel, source: Any) -> TextModel | None:
    """Another language model, by its name, or NAME:DTYPE; None where that is weights made for this very model."""
    from outrider.text.loading import DTYPES, load
    from outrider.text.model import TextModel

    if isinstance(source, TextModel):
        return source
    if not isinstance(source, str | Path) or Path(source).suffix == ".safetensors":
        return None
    name, _, dtype = str(source).rpartition(":")
    if not name or dtype not in DTYPES:
        name, dtype = str(source), model.dtype
    key = f"{name}:{dtype}"
    if key not in model.companions:
        model.companions[key] = load(name, device=model.device, dtype=dtype)
    return model.companions[key]


def _target(model: TextModel, source: Any) -> Any:
    """A drafter's model as it was given; another language model with this one's tokens, whatever its own are."""
    other = companion(model, source)
    if other is None:
        return source
    target = other.target()
    alike = target.vocabulary == model.target().vocabulary and other.tokens.names == model.tokens.names
    return target if alike else Translated(target, _bridge(model, other))


def _bridge(model: TextModel, other: TextModel) -> Bridge:
    if other not in model.bridges:
        sizes = model.target().vocabulary, other.target().vocabulary
        model.bridges[other] = Bridge(model.tokens, other.tokens, *sizes)
    return model.bridges[other]


def _crossing(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    other = companion(model, given.get("model"))
    if other is None:
        if given.get("model") is not None and given.get("bridge") is not None:
            return given  # both are made already
        raise InvalidOption(
            "the drafter 'cross-vocabulary' needs model=..., another language model of any tokenizer: a name such as "
            "'smollm2-135m', a folder, a GGUF file, or a model that was loaded"
        )
    given["model"] = other.target()
    given.setdefault("bridge", _bridge(model, other))
    return given


def calibration(model: TextModel, drafter: str) -> Path:
    """Where what was measured for a drafter of this model is kept."""
    return cache_folder() / "calibrations" / f"{model.where()}-{drafter}.json"


def calibrate(
    model: TextModel,
    drafter: str,
    prompts: Sequence[str],
    *,
    draft_model: Any = None,
    temperature: float = 0.0,
    tokens: int = 64,
    trials: int = 100,
) -> Iterator[tuple[int, int, str]]:
    """Measure on some prompts what a drafter goes by, and keep it. Yields how far it is, of how much, and what was
    found so far."""
    if drafter not in CALIBRATED:
        raise unknown("drafter to calibrate", drafter, CALIBRATED)
    ids = [model.encode(one) for one in prompts]
    path = calibration(model, drafter)
    path.parent.mkdir(parents=True, exist_ok=True)
    if drafter == "draft-verify":
        for number, found in enumerate(search(model.target(), ids, tokens=tokens, trials=trials), 1):
            found.save(path)
            yield number, trials, f"{len(found.skip)} sublayers, {found.speedup:.2f}x predicted"
        return
    small = model.equipped("draft-model", {"model": draft_model} if draft_model else {})["model"]
    sampling = Sampling(temperature=temperature, end=model.end)
    prompt = sorted(ids, key=len)[len(ids) // 2]
    cost, own = pass_cost(model.target(), prompt), pass_cost(small, prompt)
    passes = tuple((width, cost.relative(width)) for width in _WIDTHS)
    for number, counts in enumerate(sequoia.measure(model.target(), small, ids, sampling=sampling, tokens=tokens), 1):
        found_ = sequoia.Calibration(counts, own(1) / cost(1), passes)
        found_.save(path)
        yield number, len(ids), "acceptance " + " ".join(f"{one:.2f}" for one in found_.acceptance[:4])
