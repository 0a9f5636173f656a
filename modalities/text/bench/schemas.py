"""Constrained decoding of many JSON schemas: does each output parse and validate, and equal that of plain decoding?

Schemas are files of a folder, such as a checkout of JSONSchemaBench (arXiv 2501.10868), of which a seeded sample is
taken; schemas share a continuous batch, each with its own; results are kept a line a schema, so that a run can be done
in pieces. Counts alone, no times.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from outrider.core.assets.files import write_atomically
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods.rules import GUMBEL_MATCH
from outrider.text.batching import Request
from outrider.text.model import TextModel
from outrider.text.stream import Result

Status = Literal["valid", "cut", "refused", "failed", "invalid"]
_SHOWN = 240  # characters of a schema in the prompt
_ROWS = 32  # schemas that are decoded side by side
_GROUP = 96  # schemas after which outcomes are kept
_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    GUMBEL_MATCH.name: {"temperature": 1.0, "rule": GUMBEL_MATCH.name},
}


@dataclass(frozen=True)
class Outcome:
    """One schema under one setting. "valid": plain decoding's output parses and validates; "cut": max_new_tokens ended
    it, and the result says that it is not complete; "refused": the schema can't be used, and the error says so;
    "failed": the grammar became too complex while decoding, and the error says so; "invalid": said to be complete, and
    isn't valid, which must not happen."""

    schema: str
    setting: str
    run: str  # what the outcomes of a file have in common, or not
    status: Status
    detail: str = ""
    tokens: int = 0
    passes: dict[str, int] = field(default_factory=dict)  # by drafter
    different: tuple[str, ...] = ()  # drafters whose tokens are not plain decoding's, which must not happen


def sample(folder: Path, count: int, seed: int) -> list[Path]:
    """A seeded sample of the schema files below a folder, in an order that does not depend on `count`."""
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise InvalidOption(f"{folder} has no *.json files; give the folder of a checkout of JSONSchemaBench, data/")
    random.Random(seed).shuffle(files)
    return files[:count]


def measure(
    lm: TextModel,
    files: Sequence[Path],
    root: Path,
    drafters: Sequence[str],
    max_new_tokens: int,
    seed: int,
    kept: Path,
    num_draft_tokens: int | None = None,
) -> Iterator[Outcome]:
    """The outcomes of all files, those already in the file `kept` among them; new ones are added to it."""
    given = {} if num_draft_tokens is None else {"num_draft_tokens": num_draft_tokens}
    found = [Outcome(**json.loads(line)) for line in kept.read_text().splitlines()] if kept.is_file() else []
    run = (
        f"{lm.name} {lm.dtype} {max_new_tokens} tokens, seed {seed}, {' '.join([*drafters, *map(str, given.values())])}"
    )
    known = {(one.schema, one.setting): one for one in found if one.run == run}
    for start in range(0, len(files), _GROUP):
        names = {str(path.relative_to(root)): path for path in files[start : start + _GROUP]}
        for setting, options in _SETTINGS.items():
            new = {name: path for name, path in names.items() if (name, setting) not in known}
            options = options | {"max_new_tokens": max_new_tokens, "seed": seed}
            for name, made in _outcomes(lm, new, {None: {}} | dict.fromkeys(drafters, given), options).items():
                known[name, setting] = Outcome(schema=name, setting=setting, run=run, **made)
                found.append(known[name, setting])
            if new:
                write_atomically(kept, "".join(json.dumps(asdict(each)) + "\n" for each in found))
        yield from (known[name, setting] for name in names for setting in _SETTINGS)


def _outcomes(
    lm: TextModel,
    paths: Mapping[str, Path],
    drafters: Mapping[str | None, Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """What is to be said of each schema, decoded beside the others in one continuous batch for each drafter, which has
    options of its own."""
    schemas = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    requests: dict[str, dict[str | None, Request]] = {name: {} for name in schemas}
    made: dict[str, dict[str, Any]] = {}
    for drafter, own in drafters.items() if schemas else ():
        with lm.batch(rows=_ROWS, own_formats=True, drafter=drafter, **own, **options) as batch:
            for name in [name for name in schemas if name not in made]:
                wanted = {"type": "json_schema", "json_schema": {"schema": schemas[name]}}
                prompt = f"Write a JSON document that obeys this schema:\n{json.dumps(schemas[name])[:_SHOWN]}"
                try:
                    requests[name][drafter] = batch.add(prompt, seed=options["seed"], response_format=wanted)
                except (InvalidOption, UnicodeError) as error:
                    made[name] = {"status": "refused", "detail": str(error)[:200]}
            deque(batch, maxlen=0)
    for name in [name for name in schemas if name not in made]:
        made[name] = _outcome(requests[name], schemas[name])
    return {name: made[name] for name in schemas}


def _outcome(requests: Mapping[str | None, Request], schema: Any) -> dict[str, Any]:
    try:
        results = {drafter: request.result for drafter, request in requests.items()}
    except OutriderError as error:
        return {"status": "failed", "detail": str(error)[:200]}
    plain = results[None]
    status, detail = _status(plain, schema)
    return {
        "status": status,
        "detail": detail,
        "tokens": len(plain.tokens),
        "passes": {drafter or "plain": len(result.trace.steps) for drafter, result in results.items()},
        "different": tuple(name for name, result in results.items() if name and result.tokens != plain.tokens),
    }


def _status(result: Result, schema: Mapping[str, Any]) -> tuple[Status, str]:
    """Checked by jsonschema, which knows nothing of the grammar."""
    from jsonschema.validators import validator_for

    if not result.complete:
        return "cut", ""
    try:
        value = json.loads(result.text)
    except ValueError as error:
        return "invalid", f"{error}: {result.text[:120]!r}"
    wrong = next(validator_for(schema)(schema).iter_errors(value), None)
    return ("valid", "") if wrong is None else ("invalid", f"{wrong.message[:120]}: {result.text[:120]!r}")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by setting, and tokens per target pass by drafter over the schemas that were decoded."""
    report: dict[str, Any] = {}
    for setting in dict.fromkeys(one.setting for one in outcomes):
        rows = [one for one in outcomes if one.setting == setting]
        passes, tokens = Counter[str](), sum(one.tokens for one in rows)
        for one in rows:
            passes.update(one.passes)
        report[setting] = {
            "schemas": len(rows),
            **{status: sum(one.status == status for one in rows) for status in Status.__args__},  # type: ignore[attr-defined]
            "different_from_plain": sum(bool(one.different) for one in rows),
            "tokens": tokens,
            "tokens_per_pass": {drafter: round(tokens / count, 3) for drafter, count in passes.items()},
        }
    return report
