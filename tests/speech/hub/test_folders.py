"""Published models of speech by name: a folder that a model of the class was saved to, through the one way in."""

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
def test_a_saved_model_says_what_it_said(tmp_path: Path) -> None:
    big, small = saved(CLASSES.TINY.csm(), tmp_path / "big"), saved(CLASSES.TINY.csm(1, 1), tmp_path / "small")
    sp = speech.load(big, draft_model=small)
    assert isinstance(sp, PublishedSpeech) and sp.audible
    (prompt,) = CLASSES.prompts("csm", 1)
    found = sp.generate(prompt, limit=6, drafter="draft-model", temperature=1.0, seed=2, rule="gumbel-match")
    alone = PublishedSpeech(published(CLASSES.TINY.csm()), name="csm")
    assert found.tokens == alone.generate(prompt, limit=6, temperature=1.0, seed=2, rule="gumbel-match").tokens
    heard = sp.heard(found)
    assert heard.rate == 24000 and len(heard.samples) > 6
    heard.save(tmp_path / "said.wav")
    assert (tmp_path / "said.wav").stat().st_size > 44


def test_one_that_hears_by_its_name(tmp_path: Path) -> None:
    sp = speech.load(str(saved(CLASSES.TINY.whisper(), tmp_path / "whisper")), before=[3, 5, 6])
    assert isinstance(sp, PublishedSpeech) and not sp.audible
    (prompt,) = CLASSES.prompts("whisper", 1)
    found = sp.generate(prompt, limit=12, drafter="suffix")
    assert found.outcome == CLASSES.own_whisper(sp.published.model, prompt, 12)  # type: ignore[attr-defined]
    with pytest.raises(InvalidOption, match="nothing to hear"):
        sp.heard(found)
    with pytest.raises(InvalidOption, match="unknown option of this class 'colour'"):
        speech.load(tmp_path / "whisper", colour=1)


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for kind, why in (("dia", "the others are forced to end"), ("vits", "nothing to draft"), ("gpt2", "unknown class")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(InvalidOption, match=why):
            speech.load(tmp_path)
    with pytest.raises(InvalidOption, match="unknown dtype"):
        speech.load(tmp_path, dtype="float7")
