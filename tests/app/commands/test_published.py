"""Published models in the commands: `outrider image --model` and `outrider speech --model` with folders."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from outrider.app.cli import cli
from outrider.speech import Sound

pytestmark = pytest.mark.slow
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py")))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments], catch_exceptions=True)


def test_a_published_image_model_draws(tmp_path: Path) -> None:
    for name, layers in (("big", 2), ("small", 1)):
        for part in TINY.janus(layers - 2, layers):
            part.save_pretrained(tmp_path / name)
    file = tmp_path / "drawn.png"
    models = ("--model", str(tmp_path / "big"), "--draft-model", str(tmp_path / "small"), "--dtype", "float32")
    named = (*models, "--drafter", "draft-model")
    done = run("image", "a red heart", *named, "--compare", "--rule", "gumbel-match", "-o", str(file))
    assert done.exit_code == 0, done.output
    assert "64 codes in" in done.output and "64 of 64 codes" in done.output
    with Image.open(file) as picture:
        assert picture.size == (32, 32)
    table = tmp_path / "table.json"
    done = run(
        "bench", "image", *named[:4], "--drafters", "jacobi,draft-model", "--num-prompts", "1", "--json", str(table)
    )
    assert done.exit_code == 0, done.output
    plain, *others = json.loads(table.read_text())["rows"]
    assert plain["tokens_per_pass"] == 1 and all(one["tokens_per_pass"] > 1 for one in others) and len(others) == 2


def test_a_published_speech_model_speaks(tmp_path: Path) -> None:
    from transformers import EncodecFeatureExtractor, MusicgenProcessor, T5Tokenizer

    for name, layers in (("big", 2), ("small", 1)):
        TINY.musicgen(layers - 2, layers).save_pretrained(tmp_path / name)
    pieces = [(name, 0.0) for name in ("<pad>", "</s>", "<unk>")]
    pieces += [(name, -1.0) for name in ("\u2581", "\u2581a", "\u2581slow", "\u2581waltz")]
    MusicgenProcessor(EncodecFeatureExtractor(), T5Tokenizer(vocab=pieces, extra_ids=0)).save_pretrained(
        tmp_path / "big"
    )
    file = tmp_path / "waltz.wav"
    models = ("--model", str(tmp_path / "big"), "--draft-model", str(tmp_path / "small"), "--dtype", "float32")
    named = (*models, "--drafter", "draft-model")
    done = run(
        "speech",
        "a slow waltz",
        *named,
        "--max-new-tokens",
        "6",
        "--compare",
        "--rule",
        "gumbel-match",
        "-o",
        str(file),
    )
    assert done.exit_code == 0, done.output
    assert "36 tokens in" in done.output and "the same tokens" in done.output
    assert Sound.load(file).seconds > 0


def test_llasa_needs_a_codec(tmp_path: Path) -> None:
    model = TINY.llasa()
    model.save_pretrained(tmp_path / "llasa")
    model.tokenizer.save_pretrained(tmp_path / "llasa")
    done = run("speech", "good morning", "--model", str(tmp_path / "llasa"), "-o", str(tmp_path / "a.wav"))
    assert done.exit_code == 1 and "load the model with codec=" in str(done.exception)


def test_a_speech_recogniser_transcribes(tmp_path: Path) -> None:
    import numpy as np
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    TINY.whisper().save_pretrained(tmp_path / "whisper")
    words = WhisperTokenizer(vocab={chr(ord("a") + at): at for at in range(26)}, merges=[])
    reads = WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400, n_fft=400)
    WhisperProcessor(reads, words).save_pretrained(tmp_path / "whisper")
    Sound(np.zeros(8000, dtype=np.float32), 16000).save(tmp_path / "heard.wav")
    trace = tmp_path / "trace.json"
    named = ("--model", str(tmp_path / "whisper"), "--model-option", "prefix=[3,5,6]", "--max-new-tokens", "8")
    drafted = ("--drafter", "suffix", "--temperature", "0", "--trace", str(trace), "--compare")
    done = run("speech", str(tmp_path / "heard.wav"), *named, *drafted)
    assert done.exit_code == 0, done.output
    assert "8 tokens in" in done.output and "the same tokens" in done.output
    assert json.loads(trace.read_text())["method"] == "suffix"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("image", "cat", "--draft-model", "a/b"), "needs --model"),
        (("speech", "cat", "--model", "a/b", "--speed", "2"), "is not available for a published model"),
    ],
)
def test_conflicting_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())


def test_the_page_s_backend_loads_a_published_model(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    from outrider.app.page.backends.image import ImageBackend
    from outrider.app.page.backends.interface import ModelSpec, checked
    from outrider.core.errors import InvalidOption

    for part in TINY.janus():
        part.save_pretrained(tmp_path / "janus")
    backend = ImageBackend(spec=ModelSpec(model=str(tmp_path / "janus")))
    assert "draft-model" not in backend.drafters() and "jacobi" in backend.drafters()
    backend.load()
    assert "8x8 codes" in backend.description
    asked = {"prompt": "a red heart", "drafter": "jacobi", "rule": "exact", "temperature": 1.0, "seed": 0}
    live = backend.begin(checked(backend, asked))
    for _ in live:
        pass
    assert "<" in live.preview()
    recording = live.recording()
    assert (recording.rows, recording.columns) == (8, 8) and len(recording.trace.tokens()) == 64
    near = backend.similar(recording.trace.tokens()[0], 3)
    assert len(near) == 4 and all(data.startswith("data:image/png") for _, data in near)
    with pytest.raises(InvalidOption, match="there is no folder"):
        ImageBackend(spec=ModelSpec(model=str(tmp_path / "nowhere"))).load()
    done = run("demo", "--speech-model-option", "codec=a/b")
    assert done.exit_code == 2 and "needs --speech-model" in " ".join(done.output.replace("│", " ").split())
