"""The loud half of the teacher says what the teacher's whole graph says."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.assets.store import ASSETS, fetch


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["kokoro"].here, reason="the teacher is not fetched")
def test_it_sounds_as_its_graph_does() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("hibari")
    from onnx import load

    from outrider.speech.phonemes import EDGE, phonemes
    from outrider.speech.training.kokoro import _ITS_IDS, Teacher
    from outrider.speech.training.kokoro_vocoder import FRAMES, SOURCE, KokoroVocoder

    path = fetch("kokoro") / "kokoro.int8.onnx"
    teacher, whole = Teacher(), onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    loud = KokoroVocoder(load(str(path)).graph)
    said = phonemes("The quick brown fox jumps over the lazy dog.")
    style = teacher._style[len(said)]
    tokens = np.array([[EDGE, *(_ITS_IDS[sign] for sign in said), EDGE]], np.int64)
    given = {"tokens": tokens, "style": style, "speed": np.ones(1, np.float32)}
    meant = whole.run(None, given)[0].reshape(-1)
    frames, source = teacher._session.run([FRAMES, SOURCE], given)
    heard = loud(frames, source, style[:, :128])
    assert heard.shape == meant.shape
    assert np.corrcoef(heard, meant)[0, 1] > 0.97  # it rounds otherwise
    assert abs(heard.std() / meant.std() - 1) < 0.05
