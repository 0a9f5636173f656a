"""Rules and penalties on a small voice: which tokens are alike, and that an end is never taken lightly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.methods import RULES
from outrider.core.protocol import Plain
from outrider.core.rng import CounterRNG
from outrider.core.trace import Step
from outrider.core.tree import Tree
from outrider.speech.model import SpeechModel
from outrider.speech.options import Options
from outrider.speech.phonemes import ids, phonemes

LOOSE = {"coarse-groups": {"similarity": 0.05}, "additive-beta": {"beta": 0.9}, "top-k-membership": {"k": 30}}


class Ending(Plain):
    """Always guesses that a token comes and then the end, or the end at once."""

    def __init__(self, end: int) -> None:
        self.end_token = end

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        tokens = torch.tensor([[self.end_token, 3, self.end_token]]).expand(len(room), -1)
        live = (room[:, None] >= torch.tensor([1, 1, 2])) & (room[:, None] > 0)
        return Draft.guess(tokens.contiguous(), Tree.of((-1, -1, 1)), live)


def told(speaker: SpeechModel, name: str, **given: Any) -> list[Step]:
    """What the loop does under a rule, without sound."""
    end = speaker.voice.end
    script = speaker.voice.script([ids(phonemes("Where is the station?"))] * 2)
    rule = speaker.rule(Options(rule=name, rule_options=given)).made
    sampling = Sampling(end=(end,))
    return list(
        decode(
            speaker.target(script),
            Ending(end),
            rule,
            [[end]] * 2,
            sampling=sampling,
            max_new_tokens=[12, 9],
            seed=[3, 4],
        )
    )


def test_every_relaxed_rule_takes_an_end_as_the_exact_one_does(speaker: SpeechModel) -> None:
    end = speaker.voice.end
    names = [name for name in speaker.rules if RULES[name].lossless is False]
    assert {"tolerance", "additive-beta", "top-k-membership", "coarse-groups", "lantern", "grouped"} <= set(names)
    bent = set()
    for name in names:
        ends = 0
        for step in told(speaker, name, **LOOSE.get(name, {})):
            for token, tried, chance, p in zip(step.drafted, step.tried, step.chance, step.p, strict=True):
                if tried and token == end:
                    assert abs(chance - p) < 1e-6, (name, chance, p)
                    ends += 1
                elif tried and abs(chance - p) > 1e-3:
                    bent.add(name)
        assert ends, name
    assert {"tolerance", "additive-beta", "top-k-membership", "coarse-groups", "lantern"} <= bent


def test_the_end_is_like_no_code(speaker: SpeechModel) -> None:
    end = speaker.voice.end
    near, places = speaker.neighbours, speaker.places
    assert near.shape == (end + 1, end - 1) and not (near == end).any()
    assert all(sorted([code, *near[code].tolist()]) == list(range(end)) for code in range(end))
    far = torch.cdist(places, places)
    assert far[end, :end].min() > 100
    points = speaker.codec.quantiser.points(torch.arange(end))
    one_step = (points[:, None] - points).abs().sum(-1).sub(0.5).abs() < 1e-6  # of five levels, on one axis
    assert one_step[0].sum() == 2 and far[:end, :end][one_step].sub(0.45).abs().max() < 1e-4
    for code in range(end):
        assert one_step[code][near[code, : one_step[code].sum()]].all()
    assert not speaker.embeddings[end].any() and speaker.embeddings[:end].any(1).all()


def test_rules_are_handed_what_they_look_at(speaker: SpeechModel) -> None:
    for name, given in (("lantern", "neighbours"), ("grouped", "codes"), ("coarse-groups", "embeddings")):
        resolved = speaker.rule(Options(rule=name))
        rule, told = resolved.made, resolved.name
        assert told == name and len(getattr(rule, given)) == speaker.voice.end + 1
    rule = speaker.rule(Options(rule="lantern", rule_options={"k": 4})).made
    assert getattr(rule, "k", None) == 4


@pytest.mark.slow
def test_penalties_follow_each_path(speaker: SpeechModel) -> None:
    """Drafting changes nothing of what is said under penalties either, and less is said again."""
    text = "The harbour was quiet."
    said = {}
    for penalty in (0.0, 2.0):
        options = {"frequency_penalty": penalty, "rule": "gumbel-match", "temperature": 0.6, "seed": 5}
        plain = speaker.generate(text, **options)  # type: ignore[arg-type]
        for drafter in ("token-recycling", "draft-model"):
            found = speaker.generate(text, drafter=drafter, **options)  # type: ignore[arg-type]
            assert found.tokens == plain.tokens, drafter
        assert plain.trace.options["frequency_penalty"] == penalty
        said[penalty] = max(map(plain.tokens.count, plain.tokens)) / len(plain.tokens)
    assert said[2.0] < said[0.0]
