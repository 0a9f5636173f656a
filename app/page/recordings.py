"""Recordings: a trace, and what it takes to see it where no model is: what tokens are called, the picture, the sound.

A recording is a JSON file; a bare trace, as the command line writes them, opens as well. What is read is checked to the
last field, so that a hostile file can do no more than be refused. Knows traces; nothing of models or pages.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from outrider.app.page import validate
from outrider.core.errors import TraceError
from outrider.core.trace import Trace

Modality = Literal["text", "image", "speech"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
_SCHEMA = 1
_READING = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
_LONGEST_NAME = 200  # characters of a token
_PNG, _WAV = b"\x89PNG\r\n\x1a\n", b"RIFF"
_STEPS = 20_000


@dataclass(frozen=True)
class Recording:
    """One generation, and perhaps the plain one beside it."""

    __pydantic_config__ = _READING

    modality: Modality
    trace: Trace
    prompt: str = ""
    names: dict[str, str] = field(default_factory=dict)  # what tokens are called, by id
    rows: int = 16  # of a picture's grid
    columns: int = 16
    picture: str = ""  # PNG in base64
    sound: str = ""  # WAV in base64
    starts: tuple[float, ...] = ()  # when each token begins to be heard, in seconds
    words: tuple[tuple[float, str], ...] = ()  # what is said, and when about
    plain: Recording | None = None
    recording: int = _SCHEMA

    def name(self, token: int) -> str:
        return self.names.get(str(token), f"#{token} ")

    def root(self, step: int) -> str:
        """What stands before a step: the last token of the step before it in its row."""
        row = self.trace.steps[step].row
        before = [one for one in self.trace.steps[:step] if one.row == row and one.emitted]
        return self.name(before[-1].emitted[-1]) if before else "prompt"

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"), ensure_ascii=True)

    def link(self) -> str:
        """The file itself as an address, which a browser saves without asking anybody."""
        return "data:application/json;base64," + b64encode(self.to_json().encode()).decode()


def tokens_in(trace: Trace) -> set[int]:
    """Every token that a view may want to name."""
    found: set[int] = set()
    for step in trace.steps:
        found.update(step.drafted, step.emitted)
        found.update(token for likely in step.alternatives for token, _ in likely)
    return found


def read(data: bytes | str) -> Recording:
    """A file that was opened: a recording, or a bare trace; anything else raises TraceError."""
    if len(data) > validate.FILE:
        raise TraceError(f"the file has {len(data):,} bytes; at most {validate.FILE:,} are read")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        shape = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError("this is no trace: it is not JSON") from None
    if not isinstance(shape, dict):
        raise TraceError("this is no trace: a JSON object was expected")
    if "recording" not in shape:
        return _checked(Recording(_guess(shape), Trace.from_json(text)))
    from pydantic import TypeAdapter, ValidationError

    try:
        found = TypeAdapter(Recording).validate_json(text)
    except (ValidationError, RecursionError) as error:
        where = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deep"}
        place = ".".join(str(part)[:40] for part in where["loc"]) or "the file"
        raise TraceError(f"not a recording: {place}: {str(where['msg'])[:100]}") from None
    return _checked(found)


def _guess(shape: dict[str, object]) -> Modality:
    """What a bare trace is of: pictures are asked for with guidance, speech with a speed."""
    asked = shape.get("options")
    known = asked if isinstance(asked, dict) else {}
    return "image" if "guidance_scale" in known else "speech" if "speed" in known else "text"


def _checked(found: Recording) -> Recording:
    """What types alone don't say."""
    if found.recording != _SCHEMA:
        raise TraceError(f"the recording has schema {found.recording}; this version reads schema {_SCHEMA}")
    trace = Trace.from_json(found.trace.to_json())  # a step that contradicts itself is refused there
    if not trace.steps:
        raise TraceError("the trace has no steps, so there is nothing to look at")
    if len(trace.steps) > _STEPS:
        raise TraceError(f"the trace has {len(trace.steps):,} steps; at most {_STEPS:,} are shown")
    if any(len(name) > _LONGEST_NAME for name in found.names.values()) or len(found.prompt) > 4 * validate.PROMPT:
        raise TraceError("the recording's texts are longer than any prompt or token is")
    if not (1 <= found.rows <= 64 and 1 <= found.columns <= 64):
        raise TraceError(f"the picture has {found.rows} x {found.columns} codes; up to 64 x 64 are shown")
    for data, head, what in ((found.picture, _PNG, "picture"), (found.sound, _WAV, "sound")):
        if data and not _is(data, head):
            raise TraceError(f"the recording's {what} is none")
    if found.plain is not None:
        if found.plain.plain is not None or found.plain.modality != found.modality:
            raise TraceError("the plain recording beside this one is of another kind")
        _checked(found.plain)
    return found


def _is(data: str, head: bytes) -> bool:
    try:
        return b64decode(data, validate=True).startswith(head)
    except (binascii.Error, ValueError):
        return False


def examples() -> dict[str, Path]:
    """The recordings that ship, by their titles."""
    folder = Path(str(resources.files("outrider.app"))) / "traces"
    return {file.stem.replace("-", " "): file for file in sorted(folder.glob("*.json"))} if folder.is_dir() else {}
