"""Sound in few bytes, there and back."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from outrider.speech.audio import Sound
from outrider.speech.evaluation import opus as module
from outrider.speech.evaluation.opus import g722, opus

av = pytest.importorskip("av")


def tone(hertz: float, seconds: float, rate: int = 22_050) -> Sound:
    return Sound((0.3 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32), rate)


def loudest(sound: Sound) -> float:
    return float(np.abs(np.fft.rfft(sound.samples)).argmax() / sound.seconds)


def telephone(sound: Sound) -> bytes:
    """As G.722."""
    held = io.BytesIO()
    samples = (sound.at(16_000).samples * 32767).astype(np.int16)
    with av.open(held, "w", format="g722") as file:
        stream = file.add_stream("g722", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        for part in (frame, None):
            file.mux(stream.encode(part))
    return held.getvalue()


def test_opus_is_small_and_sounds_the_same() -> None:
    made = tone(440, 2.0)
    data = opus(made)
    assert data == opus(made) and data.startswith(b"OggS") and 1_000 < len(data) < 15_000
    with av.open(io.BytesIO(data)) as file:
        heard = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
    back = Sound(heard, 48_000)
    assert abs(back.seconds - 2) < 0.01 and abs(loudest(back) - 440) < 2


def test_g722_is_read() -> None:
    back = g722(telephone(tone(1000, 1.0)))
    assert back.rate == 16_000 and abs(back.seconds - 1) < 0.05 and abs(loudest(back) - 1000) < 2
    assert 0.2 < back.samples.max() < 0.4


def test_without_pyav_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(module.NoCompression, match=r"pip install 'outrider\[judges\]'"):
        opus(tone(440, 0.1))
