"""Recordings: a trace with what is needed to show it without a model: the texts of tokens, the image, the sound.

A recording is a JSON file; bare traces, as the command line writes them, can be read too. Every field of a file is
validated, so that a hostile file is refused. Independent of models and pages.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, field
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Literal, get_args

from outrider.app.page import validate
from outrider.core.errors import InvalidOption, TraceError
from outrider.core.trace import Trace, check

Modality = Literal["text", "image", "speech"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
_SCHEMA = 1
_READING = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
_LONGEST_NAME = 200  # characters of a token
_PNG, _WAV = b"\x89PNG\r\n\x1a\n", b"RIFF"
_STEPS = 20_000
_PIXELS = 2048  # of an image's side
_SECONDS = 600  # of sound


@dataclass(frozen=True)
class Recording:
    """One generation, optionally with the same generation by plain decoding."""

    __pydantic_config__ = _READING

    modality: Modality
    trace: Trace
    prompt: str = ""
    names: dict[str, str] = field(default_factory=dict)  # the texts of tokens, by id
    rows: int = 16  # of the image's grid of codes
    columns: int = 16
    picture: str = ""  # PNG in base64
    sound: str = ""  # WAV in base64
    starts: tuple[float, ...] = ()  # the second at which each token becomes audible
    words: tuple[tuple[float, str], ...] = ()  # spoken words with approximate start times
    plain: Recording | None = None
    seconds: tuple[float, ...] = ()  # of further timings of the same run, in turns with those of `plain`
    recording: int = _SCHEMA  # the version of this format

    def name(self, token: int) -> str:
        return self.names.get(str(token), f"#{token} ")

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"), ensure_ascii=True)

    def link(self) -> str:
        """The JSON file as a data URL, which a browser can save without a request."""
        return "data:application/json;base64," + b64encode(self.to_json().encode()).decode()


def tokens_in(trace: Trace) -> set[int]:
    """Every token id of a trace whose text a view may show."""
    ids: set[int] = set()
    for step in trace.steps:
        ids.update(step.drafted, step.emitted)
        ids.update(token for likely in step.alternatives for token, _ in likely)
    return ids


def read(data: bytes | str) -> Recording:
    """The recording in a file's contents, which may also be a bare trace; raises TraceError for anything else."""
    if len(data) > validate.FILE:
        raise TraceError(f"the file has {len(data):,} bytes; the limit is {validate.FILE:,}")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError("the file is not JSON; choose a trace that Outrider wrote") from None
    if not isinstance(content, dict):
        raise TraceError("the file is not a trace: expected a JSON object")
    if "recording" not in content:
        return _validated(Recording(_modality(content), Trace.from_json(text)))
    from pydantic import TypeAdapter, ValidationError

    try:
        recording = TypeAdapter(Recording).validate_json(text)
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deeply"}
        location = ".".join(str(part)[:40] for part in first["loc"]) or "the file"
        raise TraceError(f"not a recording: {location}: {str(first['msg'])[:100]}") from None
    return _validated(recording)


def _modality(content: dict[str, object]) -> Modality:
    """The modality of a bare trace, from its options: only images have guidance, only speech has a speed."""
    options = content.get("options")
    names = options if isinstance(options, dict) else {}
    return "image" if "guidance_scale" in names else "speech" if "speed" in names else "text"


def _validated(recording: Recording) -> Recording:
    """The recording, if its values are consistent and within limits."""
    if recording.recording != _SCHEMA:
        raise TraceError(f"the recording has schema {recording.recording}; this version reads schema {_SCHEMA}")
    trace = recording.trace
    check(trace)
    if not trace.steps:
        raise TraceError("the trace has no steps, so there is nothing to show")
    if len(trace.steps) > _STEPS:
        raise TraceError(f"the trace has {len(trace.steps):,} steps; the limit is {_STEPS:,}")
    texts = recording.names.values()
    if any(len(text) > _LONGEST_NAME for text in texts) or len(recording.prompt) > 4 * validate.PROMPT:
        raise TraceError("the recording's prompt or a token's text is too long")
    if not (1 <= recording.rows <= 64 and 1 <= recording.columns <= 64):
        raise TraceError(f"the image has {recording.rows} x {recording.columns} codes; the limit is 64 x 64")
    for data, magic, what in ((recording.picture, _PNG, "image"), (recording.sound, _WAV, "sound")):
        if data and not _starts_with(data, magic):
            raise TraceError(f"the recording's {what} is not a {'PNG' if what == 'image' else 'WAV'} file in base64")
    if recording.sound:
        from outrider.speech.audio import Sound

        try:
            seconds = Sound.load(BytesIO(b64decode(recording.sound))).seconds
        except InvalidOption as error:
            raise TraceError(f"the recording's sound can't be played: {error}") from None
        if seconds > _SECONDS:
            raise TraceError(f"the recording's sound takes {seconds:,.0f} s; the limit is {_SECONDS} s")
    if not all(0 <= second <= _SECONDS for second in (*recording.starts, *(second for second, _ in recording.words))):
        raise TraceError(f"a token or a word of the recording starts outside 0 to {_SECONDS} s")
    if len(recording.seconds) > 100 or not all(0 <= second <= 1e9 for second in recording.seconds):
        raise TraceError("the recording's timings are more than 100, or outside 0 to 1e9 seconds")
    if recording.picture and not all(0 < side <= _PIXELS for side in _sides(recording.picture)):
        raise TraceError(f"the recording's image has a side of 0 or more than {_PIXELS:,} pixels")
    if recording.plain is not None:
        if recording.plain.plain is not None or recording.plain.modality != recording.modality:
            raise TraceError("the plain recording in this one has another modality or a plain recording of its own")
        _validated(recording.plain)
    return recording


def _starts_with(data: str, magic: bytes) -> bool:
    try:
        return b64decode(data, validate=True).startswith(magic)
    except (binascii.Error, ValueError):
        return False


def _sides(picture: str) -> tuple[int, int]:
    """The width and the height that the header of a PNG file in base64 states."""
    header = b64decode(picture[:32])
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def examples() -> dict[str, Path]:
    """The bundled recordings, by title."""
    folder = Path(str(resources.files("outrider.app"))) / "traces"
    return {file.stem.replace("-", " "): file for file in sorted(folder.glob("*.json"))} if folder.is_dir() else {}
