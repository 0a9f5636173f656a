"""The advice for vLLM's prompt lookup, held against a stand-in with known costs that searches in its own way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.core.advice.replay import Attempt
from outrider.core.bench.runner import Item
from outrider.core.errors import InvalidOption
from outrider.text import TextModel
from outrider.text.bench import engine_advice, peers, vllm_lookup
from outrider.text.bench.advice import Study, methods_of
from outrider.text.bench.peers import Model
from outrider.text.bench.venvs import PeerError
from outrider.text.bench.vllm_lookup import VllmLookup, ngram_and_length, replayed

PLAIN, WITHOUT, GUESS = 0.012, 0.010, 0.002  # seconds of a round, and of a guess
STAND_IN = f"""
import json, sys
options = json.loads(sys.argv[2])
length = options["length"] if options["lookup"] else 0

def draft(tokens):
    for size in range(options["max_ngram"], options["min_ngram"] - 1, -1):
        for end in range(size, len(tokens)):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + length]
    return []

print(json.dumps({{"precision": "any"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    text = [((place % 17) ** 3 // 7 + place // 23 + sum(asked["ids"][:2])) % 13 for place in range(asked["limit"])]
    at, drafted, accepted, passes, seconds = 1, 0, 0, 1, 0.0
    while at < len(text):
        guess = draft(asked["ids"] + text[:at]) if length else []
        right = 0
        while right < len(guess) and at + right < len(text) and guess[right] == text[at + right]:
            right += 1
        drafted, accepted, passes = drafted + len(guess), accepted + right, passes + 1
        seconds += {WITHOUT} + {GUESS} * len(guess) if length else {PLAIN}
        at += right + 1
    counts = {{"passes": passes, "drafted": drafted, "accepted": accepted, "seconds": seconds}}
    print(json.dumps({{"tokens": text, "counts": counts, "seconds": seconds, "memory": 1}}), flush=True)
"""


@pytest.fixture
def study(lm: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    script = tmp_path / "worker.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(peers, "WORKER", script)
    monkeypatch.setattr(vllm_lookup, "python_of", lambda *_: Path(sys.executable))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return Study(lm, [Item(word, "chat", f"one two {word}") for word in ("three", "four four")], tokens=40, longest=6)


def test_what_is_predicted_from_two_lengths_is_measured_at_the_advised_one(study: Study) -> None:
    lookup = VllmLookup(study, Model(Path("x"), None, (), 512))
    best = lookup.advice().best
    assert {ngram_and_length(each) for each in best} == {(size, length) for size in (1, 2, 3) for length in range(1, 7)}
    assert best[0].candidate.pace == pytest.approx((WITHOUT / PLAIN,), rel=0.02)
    assert best[0].speedup > 1.2
    checked = lookup.check(best[0])
    assert checked.length == ngram_and_length(best[0])[1]
    assert abs(checked.error) < 0.02, checked


def test_the_options_to_paste_are_those_of_the_prediction(study: Study, lm: TextModel) -> None:
    given = study.advice(engine_advice.Machine(study.rounds()), methods_of(lm, ("prompt-lookup",)))
    said = list[str]()
    (found,) = engine_advice.engines(study, given, "tiny", measured=("vllm",), check=True, say=said.append)
    config = json.loads(found.options[1])
    assert config["method"] == "ngram" and config["prompt_lookup_max"] == 3
    assert found.checked is not None and found.checked.length == config["num_speculative_tokens"]
    assert found.basis == "prompt lookup, from passes timed in vLLM" and "vLLM, prompt-lookup 8" in said


def test_an_engine_that_is_not_to_be_had_says_why(study: Study, lm: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Path:
        raise PeerError("not installable here")

    monkeypatch.setattr(vllm_lookup, "python_of", missing)
    given = study.advice(engine_advice.Machine(study.rounds()), methods_of(lm, ("prompt-lookup",)))
    (found,) = engine_advice.engines(study, given, "tiny", measured=("vllm",))
    assert found.lines() == ["vLLM: don't draft (not installable here); not measured"]


def test_the_draft_follows_the_earliest_of_the_longest_matches() -> None:
    # the first token is the prompt's; 1 2 has occurred at the start, and the later 1 2 is not taken
    rounds = replayed([1, 2, 5, 1, 2, 6, 1], [2, 5, 1, 9, 9], 1, 3, 2)
    assert rounds == (Attempt(2, 2, 2, 3), Attempt(0, 0, 0, 1))
    assert replayed([1, 2, 3], [4, 5], 1, 3, 4) == (Attempt(0, 0, 0, 1),)


def test_engines_without_advice_are_refused() -> None:
    from outrider.app.commands.advise import _engines

    assert _engines("vllm") == ("vllm",) and _engines("") == ()
    with pytest.raises(InvalidOption, match="none for transformers"):
        _engines("transformers")
