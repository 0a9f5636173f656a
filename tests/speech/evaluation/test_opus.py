"""Opus and G.722: sizes, contents, and the error without PyAV."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from outrider.speech.audio import Sound
from outrider.speech.evaluation import opus as module
from outrider.speech.evaluation.opus import decode_g722, encode_opus

av = pytest.importorskip("av")


def tone(hertz: float, seconds: float, rate: int = 22_050) -> Sound:
    return Sound((0.3 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32), rate)


def loudest(sound: Sound) -> float:
    return float(np.abs(np.fft.rfft(sound.samples)).argmax() / sound.seconds)


def telephone(sound: Sound) -> bytes:
    """A sound as a G.722 file."""
    buffer = io.BytesIO()
    samples = (sound.resample(16_000).samples * 32767).astype(np.int16)
    with av.open(buffer, "w", format="g722") as file:
        stream = file.add_stream("g722", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        for part in (frame, None):
            file.mux(stream.encode(part))
    return buffer.getvalue()


def test_opus_is_small_and_keeps_the_pitch() -> None:
    sound = tone(440, 2.0)
    data = encode_opus(sound)
    assert data == encode_opus(sound) and data.startswith(b"OggS") and 1_000 < len(data) < 15_000
    with av.open(io.BytesIO(data)) as file:
        samples = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
    back = Sound(samples, 48_000)
    assert abs(back.seconds - 2) < 0.01 and abs(loudest(back) - 440) < 2


def test_g722_is_decoded() -> None:
    back = decode_g722(telephone(tone(1000, 1.0)))
    assert back.sample_rate == 16_000 and abs(back.seconds - 1) < 0.05 and abs(loudest(back) - 1000) < 2
    assert 0.2 < back.samples.max() < 0.4


def test_the_error_without_pyav_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(module.MissingPyAV, match=r"pip install .*\[judges\]"):
        encode_opus(tone(440, 0.1))
