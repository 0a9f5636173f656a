"""Speculation of frames along time, depth or both, and the model on which it is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.tree import Tree
from outrider.speech.hub.csm import Csm, target
from outrider.speech.hub.model import PublishedSpeech
from outrider.speech.training.data import Utterance
from tests.speech.two_axes import AXES, BOOKS, AlongAxis, digits, made, nats, trained

FRAMES = 6


def utterance(seed: int, held_out: bool = False) -> Utterance:
    rng, number = np.random.default_rng(seed), 0
    while True:
        text, number = f"{seed} {number}", number + 1
        spoken = (
            rng.integers(1, 30, 5),
            np.ones(5, int),
            1.0,
            np.zeros((80, 0), np.uint8),
            rng.integers(0, 1000, FRAMES),
        )
        found = Utterance(text, "examples", *spoken)
        if found.held_out == held_out:
            return found


def test_nats_are_those_of_decoding() -> None:
    model, one = made(width=32, layers=1).eval(), utterance(0)
    decoder = target(model, {"input_ids": torch.from_numpy(one.phonemes)[None]})
    codes = digits(one.codes)
    tokens = (codes + torch.arange(BOOKS) * decoder.vocabulary // BOOKS).flatten()[None]
    decoder.begin([[0]], Sampling())
    draft = Draft.guess(tokens, Tree.chain(tokens.shape[1]), torch.ones_like(tokens, dtype=torch.bool))
    laws = decoder.score(draft).distributions()
    with torch.no_grad():
        wanted = nats(model, [utterance(1), one])[FRAMES + 1 :][:FRAMES]
    found = -laws.at_rows(torch.arange(tokens.shape[1])[None], tokens[..., None]).log()
    torch.testing.assert_close(found.view(FRAMES, BOOKS).to(wanted.dtype), wanted)


def test_training_lowers_them() -> None:
    model = made(width=32, layers=1)
    utterances = [*map(utterance, range(12)), utterance(12, held_out=True)]
    with torch.no_grad():
        before = float(nats(model, utterances[:12]).mean())
    trained(model, utterances, 0.02)
    with torch.no_grad():
        assert float(nats(model, utterances[:12]).mean()) < before - 0.05


@pytest.mark.parametrize("axis", AXES)
def test_drafts_keep_to_their_axis_and_change_no_token(axis: str) -> None:
    sp = PublishedSpeech(Csm(made(width=32, layers=1).eval()), name="csm")
    prompt = torch.arange(1, 6)
    plain = sp.generate(prompt, max_new_tokens=FRAMES)
    drafted = sp.generate(prompt, drafter=AlongAxis(axis, 6), max_new_tokens=FRAMES)
    assert drafted.tokens == plain.tokens and any(step.drafted for step in drafted.trace.steps)
    place = 0
    for step in drafted.trace.steps:
        count, left = len(step.drafted), FRAMES * BOOKS - place
        if axis == "depth":
            assert count <= BOOKS - 1 - place % BOOKS
        elif axis == "time":
            assert not count or place % BOOKS == 0
        else:
            assert count == min(6, left - 1) or count == min(6, left)
        place += len(step.emitted)
