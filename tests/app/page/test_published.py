"""Published models behind the page's endpoints: a picture and a sound."""

from __future__ import annotations

import gc
import json
import runpy
import warnings
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")

from outrider.app.page import recordings
from outrider.app.page.backends.interface import ModelSpec, checked
from outrider.app.page.backends.speech import SpeechBackend, unpacked
from outrider.core.errors import InvalidOption

# Gradio's client leaves event loops open behind it; what they hold is collected at the end.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.slow]
BROWSER = Path(__file__).parents[2] / "browser"
PUBLISHED, OPENED = (SimpleNamespace(**runpy.run_path(str(BROWSER / f"{name}.py"))) for name in ("published", "opened"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from gradio_client import Client

    with OPENED.opened("published.py", tmp_path_factory.mktemp("page")) as address:
        found = Client(address, verbose=False)
        yield found
        found.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize(
    ("panel", "prompt", "options", "tokens"),
    [("image", "a red heart", None, 64), ("speech", "a slow waltz", {"max_new_tokens": 6}, 36)],
)
def test_an_endpoint_returns_the_output_of_the_published_model(
    client: Any, panel: str, prompt: str, options: dict[str, Any] | None, tokens: int
) -> None:
    found = {}
    for drafter in ("plain", "suffix", "draft-model"):
        reply = client.predict(prompt, drafter, "gumbel-match", 1.0, 3, options, api_name=f"/{panel}")
        found[drafter] = recordings.read(json.dumps(reply["recording"]))
        assert found[drafter].trace.method == drafter and reply["summary"]["tokens"] == tokens
    plain, *others = found.values()
    assert all(other.trace.tokens() == plain.trace.tokens() for other in others)
    assert "model" in str(plain.trace.options["model"])
    if panel == "image":
        assert all(other.picture == plain.picture for other in others) and b64decode(plain.picture).startswith(
            b"\x89PNG"
        )
    else:
        sound = unpacked(plain.sound)
        assert all(other.sound == plain.sound for other in others)
        assert len(sound.samples) == 6 * 4 and len(plain.starts) == tokens  # this codec makes four samples of a frame
        assert plain.starts[0] == 0 and plain.starts[-1] < sound.seconds


def test_a_cancelled_sound_is_empty(tmp_path: Path) -> None:
    named = PUBLISHED.write(tmp_path)["speech"]
    backend = SpeechBackend(spec=ModelSpec(model=named["model"]))
    assert "draft-model" not in backend.drafters() and "suffix" in backend.drafters()
    assert backend.description == named["model"]
    live = backend.begin(checked(backend, {"prompt": "a slow waltz", "max_new_tokens": 6}))
    step = next(live)
    assert "or-playhead" in live.preview() and "outrider.speech model" in backend.description
    live.close()
    recording = live.recording()
    assert recording.sound == "" and recording.trace.tokens() == list(step.emitted)
    with pytest.raises(StopIteration):
        next(live)
    with pytest.raises(InvalidOption, match="max_new_tokens is 0"):
        checked(backend, {"prompt": "a slow waltz", "max_new_tokens": 0})


def test_speech_recognisers_are_refused(tmp_path: Path) -> None:
    tiny = SimpleNamespace(**runpy.run_path(str(BROWSER.parent / "tiny_classes.py")))
    tiny.whisper().save_pretrained(tmp_path / "whisper")
    with pytest.raises(InvalidOption, match="transcribes speech"):
        SpeechBackend(spec=ModelSpec(model=str(tmp_path / "whisper"), options={"prefix": [3]})).load()
