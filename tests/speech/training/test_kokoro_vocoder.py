"""Kokoro's vocoder in torch against the published graph."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.assets.store import ASSETS, fetch


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["kokoro"].here, reason="the teacher is not fetched")
def test_the_vocoder_equals_the_graph() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("hibari")
    from onnx import load

    from outrider.speech.phonemes import EDGE, phonemes
    from outrider.speech.training.kokoro import _KOKORO_IDS, Kokoro
    from outrider.speech.training.kokoro_vocoder import FRAMES, SOURCE, KokoroVocoder

    path = fetch("kokoro") / "kokoro.int8.onnx"
    kokoro, graph = Kokoro(), onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    vocoder = KokoroVocoder(load(str(path)).graph)
    symbols = phonemes("The quick brown fox jumps over the lazy dog.")
    style = kokoro._style[len(symbols)]
    tokens = np.array([[EDGE, *(_KOKORO_IDS[symbol] for symbol in symbols), EDGE]], np.int64)
    inputs = {"tokens": tokens, "style": style, "speed": np.ones(1, np.float32)}
    expected = graph.run(None, inputs)[0].reshape(-1)
    frames, source = kokoro._session.run([FRAMES, SOURCE], inputs)
    sound = vocoder(frames, source, style[:, :128])
    assert sound.shape == expected.shape
    assert np.corrcoef(sound, expected)[0, 1] > 0.97  # rounding differs
    assert abs(sound.std() / expected.std() - 1) < 0.05
