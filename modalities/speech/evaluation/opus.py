"""Sound in few bytes: written as Ogg Opus, to be listened to; read from G.722, as telephones send it.

Both are PyAV's (the extra `judges`), imported when they are asked for. Knows sound alone.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from outrider.core.errors import OutriderError
from outrider.speech.audio import Sound

_RATE, _BITS = 24_000, 24_000  # samples a second, which Opus takes only of some sizes; bits a second


class NoCompression(OutriderError):
    """What compresses sound can't be had."""


def library() -> Any:
    """PyAV."""
    try:
        import av
    except ImportError:
        raise NoCompression("compressed sound takes PyAV: pip install 'outrider[judges]'") from None
    return av


def opus(sound: Sound) -> bytes:
    """A file of Ogg Opus, 3 kilobytes a second; the same sound gives the same bytes."""
    av, held = library(), io.BytesIO()
    samples = (sound.at(_RATE).samples.clip(-1, 1) * 32767).round().astype(np.int16)
    with av.open(held, "w", format="ogg", options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream("libopus", rate=_RATE, layout="mono", bit_rate=_BITS)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = _RATE, 0
        for part in (frame, None):
            file.mux(stream.encode(part))
    return held.getvalue()


def g722(data: bytes) -> Sound:
    """What a file of G.722 holds, 16,000 samples a second."""
    with library().open(io.BytesIO(data), format="g722") as file:
        parts = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
        rate = file.streams.audio[0].rate
    return Sound((np.concatenate(parts) / 32768).astype(np.float32), rate)
