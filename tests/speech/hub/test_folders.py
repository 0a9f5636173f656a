"""Published speech models loaded by name from folders, and errors for names that lead nowhere."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import speech
from outrider.core.assets.store import AssetError
from outrider.core.errors import InvalidOption
from outrider.speech.hub.model import PublishedSpeech, published

CLASSES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_model.py"))))


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_saved_model_generates_the_same(tmp_path: Path) -> None:
    big, small = saved(CLASSES.TINY.csm(), tmp_path / "big"), saved(CLASSES.TINY.csm(1, 1), tmp_path / "small")
    sp = speech.load(big, draft_model=small, dtype="float32")
    assert isinstance(sp, PublishedSpeech) and sp.makes_sound
    (prompt,) = CLASSES.prompts("csm", 1)
    result = sp.generate(prompt, max_new_tokens=6, drafter="draft-model", temperature=1.0, seed=2, rule="gumbel-match")
    alone = PublishedSpeech(published(CLASSES.TINY.csm()), name="csm")
    assert (
        result.tokens == alone.generate(prompt, max_new_tokens=6, temperature=1.0, seed=2, rule="gumbel-match").tokens
    )
    sound = sp.to_sound(result)
    assert sound.sample_rate == 24000 and len(sound.samples) > 6
    sound.save(tmp_path / "said.wav")
    assert (tmp_path / "said.wav").stat().st_size > 44


def test_whisper_loads_from_a_folder(tmp_path: Path) -> None:
    sp = speech.load(str(saved(CLASSES.TINY.whisper(), tmp_path / "whisper")), dtype="float32", prefix=[3, 5, 6])
    assert isinstance(sp, PublishedSpeech) and not sp.makes_sound
    (prompt,) = CLASSES.prompts("whisper", 1)
    result = sp.generate(prompt, max_new_tokens=12, drafter="suffix")
    assert result.outcome == CLASSES.own_whisper(sp.published.model, prompt, 12)  # type: ignore[attr-defined]
    with pytest.raises(InvalidOption, match="has no sound"):
        sp.to_sound(result)
    with pytest.raises(InvalidOption, match="unknown option of this class 'colour'"):
        speech.load(tmp_path / "whisper", colour=1)


def test_unknown_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidOption, match="unknown voice 'hart'"):
        speech.load("hart")
    with pytest.raises(InvalidOption, match=r"there is no folder '\./nowhere'"):
        speech.load("./nowhere")
    with pytest.raises(AssetError, match="HF_HUB_OFFLINE"):
        speech.load("nobody/knows-this")
    with pytest.raises(InvalidOption, match=r"holds no config\.json"):
        speech.load(tmp_path)
    for kind, why in (("dia", "end on a schedule"), ("vits", "nothing to draft"), ("gpt2", "unknown class")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(InvalidOption, match=why):
            speech.load(tmp_path)
    with pytest.raises(InvalidOption, match="unknown dtype"):
        speech.load(tmp_path, dtype="float7")
