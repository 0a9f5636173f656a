"""Compressed sound: encodes Ogg Opus and decodes G.722 (telephony) with PyAV, from the extra `judges`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from outrider.core.errors import OutriderError, install_command
from outrider.speech.audio import Sound

_RATE, _BITS = 24_000, 24_000  # samples per second, one of the rates that Opus supports; bits per second


class MissingPyAV(OutriderError):
    """PyAV is not installed."""


def library() -> Any:
    """The module `av`; raises MissingPyAV."""
    try:
        import av
    except ImportError:
        raise MissingPyAV(f"compressed sound needs PyAV: {install_command('judges')}") from None
    return av


def encode_opus(sound: Sound) -> bytes:
    """An Ogg Opus file of 3 kilobytes per second. Equal sounds give equal bytes."""
    av, buffer = library(), io.BytesIO()
    samples = (sound.resample(_RATE).samples.clip(-1, 1) * 32767).round().astype(np.int16)
    with av.open(buffer, "w", format="ogg", options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream("libopus", rate=_RATE, layout="mono", bit_rate=_BITS)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = _RATE, 0
        for part in (frame, None):
            file.mux(stream.encode(part))
    return buffer.getvalue()


def decode_g722(data: bytes) -> Sound:
    """The sound of a G.722 file, 16,000 samples per second."""
    with library().open(io.BytesIO(data), format="g722") as file:
        parts = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
        rate = file.streams.audio[0].rate
    return Sound((np.concatenate(parts) / 32768).astype(np.float32), rate)
