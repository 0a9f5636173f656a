"""Opens a file of any known kind: a trace, a recording, a summary, or a response or record of another engine.

The result is JSON for the viewer. A hostile or damaged file raises TraceError and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.app.formats.acceptance import SUMMARY, Acceptance
from outrider.app.formats.engines import recognised
from outrider.core.errors import TraceError, unreadable

if TYPE_CHECKING:
    from outrider.core.trace import Trace

LARGEST = 5_000_000  # bytes
_KINDS = (
    "a trace or recording of Outrider, a response of vLLM (--per-request-spec-decode-metrics), SGLang or llama.cpp's "
    "server, or a record of AIPerf"
)


@dataclass(frozen=True)
class Opened:
    """The contents of a file. Of a trace, a recording and a summary the JSON as it was; of an engine its acceptance."""

    content: dict[str, Any]
    trace: Trace | None = None
    acceptance: Acceptance | None = None

    @property
    def is_bare_trace(self) -> bool:
        return "steps" in self.content and "recording" not in self.content

    def as_acceptance(self) -> Acceptance:
        """What AIPerf's record is made of."""
        if self.acceptance is not None:
            return self.acceptance
        assert self.trace is not None
        return Acceptance.of_trace(self.trace)


def read(path: Path) -> Opened:
    """Open a file; raises TraceError if it can't be read or is of no known kind."""
    try:
        if path.stat().st_size > LARGEST:
            raise TraceError(f"{path} has {path.stat().st_size:,} bytes; the limit is {LARGEST:,}")
        return opened(path.read_bytes(), str(path))
    except OSError as error:
        raise TraceError(unreadable(path, error)) from None


def opened(data: bytes, name: str = "the file") -> Opened:
    """Open the contents of a file: JSON, or JSON lines, of which the first with a known kind counts."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceError(f"{name} is not text in UTF-8; expected {_KINDS}") from None
    try:
        contents = [json.loads(text)]
    except (ValueError, RecursionError):
        contents = _lines(text)
    if not contents:
        raise TraceError(f"{name} is not JSON; expected {_KINDS}")
    if isinstance(contents[0], list):
        contents = contents[0]
    for content in contents:
        found = _opened(content) if isinstance(content, dict) else None
        if found is not None:
            return found
    raise TraceError(f"{name} is none of these: {_KINDS}")


def _lines(text: str) -> list[Any]:
    """The values of JSON lines; server-sent events too."""
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line.removeprefix("data:")))
        except (ValueError, RecursionError):
            continue
    return values


def _opened(content: dict[str, Any]) -> Opened | None:
    from outrider.core.trace import Trace

    if "recording" in content and isinstance(content.get("trace"), Mapping):
        trace = Trace.from_json(json.dumps(content["trace"]))
        plain = content.get("plain")
        if isinstance(plain, Mapping) and isinstance(plain.get("trace"), Mapping):
            Trace.from_json(json.dumps(plain["trace"]))
        return Opened(content, _with_steps(trace))
    if "steps" in content and "schema" in content:
        return Opened(content, _with_steps(Trace.from_json(json.dumps(content))))
    if content.get("acceptance") == SUMMARY:
        return Opened(content, acceptance=_of_summary(content))
    found = recognised(content)
    if found is None:
        return None
    if found.steps is None:
        return Opened(found.summary(), acceptance=found)
    return Opened(found.recording(), found.trace(), found)


def _with_steps(trace: Trace) -> Trace:
    if not trace.steps:
        raise TraceError("the trace has no steps, so there is nothing to show")
    return trace


def _of_summary(content: Mapping[str, Any]) -> Acceptance:
    from pydantic import TypeAdapter, ValidationError

    kept = {name: value for name, value in content.items() if name != "acceptance"}
    try:
        return TypeAdapter(Acceptance).validate_python(kept)
    except ValidationError as error:
        first = error.errors()[0]
        raise TraceError(f"not a summary: {str(first['loc'])[:60]}: {str(first['msg'])[:100]}") from None
