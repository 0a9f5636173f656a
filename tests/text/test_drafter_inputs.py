"""Drafters that need more than options: other models by name, other tokenizers, what was measured before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.core.drafters.trained.export_checkpoints import write_speculators
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.text import TextModel, recipes
from outrider.text.calibrate import calibrate
from outrider.text.measurements import measured
from outrider.text.tokenizer import Tokens
from outrider.text.vocab_bridge import Bridge

pytestmark = pytest.mark.slow
PROMPTS = ["the cat sat on the mat", "a quick brown fox"]


@pytest.fixture(scope="module")
def foreign(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with another tokenizer: other words, so that ids mean other strings."""
    folder: Path = tiny.write(tmp_path_factory.mktemp("models") / "foreign")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=tiny.SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(
        ["zebras graze by the oxbow lake; the mat of reeds is long and the fox is quick"] * 3, trainer
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("swift", {"window": 8, "trials": 6, "bayes_interval": 2}),
        ("draft-on-the-fly", {}),
        ("draft-verify", {"skip": "attention.1", "threshold": 0.1}),
        ("guarded", {"drafter": "token-recycling"}),
        ("adaptive", {"drafters": ["suffix", "draft-on-the-fly", "plain"]}),
        ("specexec", {"model": "same", "nodes": 32}),
        ("specinfer", {"model": "same", "other_models": ["same"]}),
        ("cs-drafting", {"model": "same"}),
        ("sequoia", {"model": "same"}),
        ("specexec", {"model": "foreign", "nodes": 16}),
        ("sampled-tree", {"model": "foreign"}),
        ("specinfer", {"model": "foreign", "other_models": ["same"]}),
        ("predrafted", {"model": "foreign"}),
        ("cross-vocabulary", {"model": "foreign"}),
        ("cross-vocabulary", {"model": "foreign", "method": "shared"}),
    ],
)
def test_drafters_by_name_change_nothing(
    drafter: str, options: dict[str, Any], lm: TextModel, folder: Path, foreign: Path
) -> None:
    paths = {"same": str(folder), "foreign": str(foreign)}
    given = {
        name: paths.get(one, one)
        if isinstance(one, str)
        else [paths.get(part, part) for part in one]
        if isinstance(one, list)
        else one
        for name, one in options.items()
    }
    plain = lm.generate(PROMPTS, drafter=None, max_new_tokens=24)
    found = lm.generate(PROMPTS, drafter=drafter, drafter_options=given, max_new_tokens=24)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("drafter", ["draft-model", "specexec", "cross-vocabulary"])
def test_rows_that_come_and_go_have_passages_of_their_own(drafter: str, lm: TextModel, foreign: Path) -> None:
    prompts = [*PROMPTS, "the long lake", "zebra"]
    with lm.batch(rows=2, drafter=drafter, drafter_options={"model": str(foreign)}) as batch:
        requests = [batch.add(prompt, max_new_tokens=12) for prompt in prompts]
        for _ in batch:
            pass
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result is not None
        assert request.result.tokens == lm.generate(prompt, drafter=None, max_new_tokens=12).tokens


def test_the_same_model_by_another_name_is_loaded_once_and_accepted(lm: TextModel, folder: Path) -> None:
    for _ in range(2):
        out = lm.generate(PROMPTS[0], drafter="draft-model", drafter_options={"model": str(folder)}, max_new_tokens=12)
    assert out.trace.summary().acceptance_rate == 1
    assert len([name for name in lm.companions if name.startswith(str(folder))]) == 1
    copy = lm.generate(
        PROMPTS[0], drafter="draft-model", drafter_options={"model": f"{folder}:bfloat16"}, max_new_tokens=12
    )
    assert copy.tokens == out.tokens and lm.companions[f"{folder}:bfloat16"].dtype == "bfloat16"


def test_what_is_missing_is_said(lm: TextModel, cache: Path) -> None:
    with pytest.raises(InvalidOption, match="another language model"):
        lm.generate("x", drafter="cross-vocabulary")
    with pytest.raises(InvalidOption, match="--calibrate draft-verify"):
        lm.generate("x", drafter="draft-verify")
    with pytest.raises(InvalidOption, match="draft-verify, sequoia"):
        next(calibrate(lm, "swift", PROMPTS))


def test_the_guard_says_in_the_trace_what_is_off(lm: TextModel) -> None:
    options = {"drafter": "draft-on-the-fly", "cost": 5.0, "probe": 8}
    out = lm.generate(PROMPTS[0], drafter="guarded", drafter_options=options, max_new_tokens=40)
    notes = [step.note for step in out.trace.steps]
    assert notes[0] == "draft-on-the-fly" and any(note.startswith("plain (off: 0.") for note in notes)


def test_the_guard_goes_by_what_passes_cost_here(lm: TextModel) -> None:
    steep = {"drafter": "prompt-lookup", "costs": "1:10 2:40 8:200"}
    predicted = []
    for options in (steep, steep | {"costs": "1:10 2:10.1 8:10.2"}):
        out = lm.generate(PROMPTS[0], drafter="guarded", drafter_options=options, max_new_tokens=40)
        notes = [step.note for step in out.trace.steps]
        predicted.append(min(float(note.split("off: ")[1].split("x")[0]) for note in notes if "off: " in note))
    assert predicted[0] < 0.5 < 0.9 < predicted[1]
    with pytest.raises(InvalidOption, match="costs"):
        lm.generate("x", drafter="guarded", drafter_options={"costs": "nothing"})


def test_calibrating_keeps_what_it_found(lm: TextModel, folder: Path, cache: Path) -> None:
    last = list(calibrate(lm, "draft-verify", PROMPTS, tokens=12, trials=8))[-1]
    assert last[:2] == (8, 8) and measured(lm, "draft-verify").is_file()
    plain = lm.generate(PROMPTS[0], drafter=None, max_new_tokens=16)
    assert lm.generate(PROMPTS[0], drafter="draft-verify", max_new_tokens=16).tokens == plain.tokens
    for number, count, what in calibrate(lm, "sequoia", PROMPTS, draft_model=str(folder), tokens=12):
        assert number <= count == 2 and what.startswith("acceptance 1.00")
    out = lm.generate(PROMPTS[0], drafter="sequoia", drafter_options={"model": str(folder)}, max_new_tokens=16)
    assert out.tokens == plain.tokens
    measured(lm, "sequoia").write_text("{}")
    with pytest.raises(InvalidOption, match="not a calibration"):
        lm.generate(PROMPTS[0], drafter="sequoia", drafter_options={"model": str(folder)})


def test_a_published_head_is_read_from_its_folder(lm: TextModel, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = lm.target()
    assert isinstance(target, Decoder)
    taps = ("layer.0", "layer.1", "layer.1")
    head = recipes.RECIPES["eagle3"].make(target, torch.arange(0, 300, 2), lora=0, taps=taps)
    write_speculators(head, tmp_path, "tiny", length=3)
    asked: dict[str, Any] = {"drafter_options": {"head": str(tmp_path)}, "max_new_tokens": 12}
    out = lm.generate(PROMPTS[0], drafter="eagle3", **asked)
    assert out.tokens == lm.generate(PROMPTS[0], drafter=None, max_new_tokens=12).tokens
    assert any(step.drafted for step in out.trace.steps)
    with pytest.raises(Incompatible, match="holds a Eagle3Head, which the drafter 'medusa' can't use"):
        lm.generate(PROMPTS[0], drafter="medusa", **asked)


# ---- the bridge


def test_a_bridge_carries_text_over(lm: TextModel, foreign: Path) -> None:
    other = Tokens.load(foreign)
    bridge = Bridge(lm.tokens, other, 300, 290)
    whole = "the cat sat on the mat; héllo wörld 日本 and then some more words\nnew line here"
    ids = lm.tokens.encode(whole, special=False)
    passage = bridge.open(ids[:3])
    read = passage.settled()
    for start in range(3, len(ids), 2):
        passage.add(ids[start : start + 2])
        read += passage.settled()
    assert other.decode([*read, *passage.tail], special=True) == whole
    assert read + passage.tail == other.encode(whole, special=False)  # cut where tokenizers begin anew


def test_guesses_come_back_in_the_targets_tokens(lm: TextModel, foreign: Path) -> None:
    other = Tokens.load(foreign)
    passage = Bridge(lm.tokens, other, 300, 290).open(lm.tokens.encode("the quick bro", special=False))
    guessed = passage.back(other.encode("wn fox", special=False))
    assert lm.tokens.decode(guessed) == "wn fox"
    broken = lm.tokens.encode("é", special=False)
    assert len(broken) == 2
    passage.add(broken[:1])
    assert passage.back(other.encode("x", special=False)) == []
    passage.add(broken[1:])
    assert lm.tokens.decode(passage.back(other.encode("x", special=False))) == "x"


def test_shared_tokens_are_the_same_strings(lm: TextModel, foreign: Path) -> None:
    other = Tokens.load(foreign)
    shared = Bridge(lm.tokens, other, 300, 290).shared
    assert 256 < len(shared) < 290
    assert all(lm.tokens.piece(one) == other.piece(two) for one, two in shared.items())
