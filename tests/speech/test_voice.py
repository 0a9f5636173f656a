"""The voice: what is told stands where it is spoken, and the decoder that speaks is the one that learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.errors import InvalidOption
from outrider.core.methods import make_drafter
from outrider.core.rules.exact import GumbelMatch
from outrider.core.tree import Tree
from outrider.speech.voice import AHEAD, Speaker, Voice

SAID = [[0, 5, 9, 20, 0], [0, 33, 0]]


def test_phonemes_stand_where_they_are_spoken(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    script = voice.script(SAID, shares=[[1, 3, 0, 2, 1], [2, 2, 1]])
    assert script.lengths == (7, 5) and script.told.shape == (2, 7 + 1 + AHEAD, 32)
    over = script.told[0, 7]
    assert (script.told[0, 7:] == over).all() and (script.told[1, 5:] == over).all()
    assert not (script.told[0, :7] == over).all(1).any()
    ids = torch.tensor([SAID[0]])
    read, _ = voice.reader(ids, torch.ones_like(ids, dtype=torch.bool))
    first = script.told[0, 1] - voice.reader.since[0] - voice.reader.until[2]
    last = script.told[0, 3] - voice.reader.since[2] - voice.reader.until[0]
    torch.testing.assert_close(first, read[0, 1])
    torch.testing.assert_close(last, read[0, 1])


def test_nobody_hears_who_is_read_beside_them(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    for speed in (1.0, 0.7):
        both, alone = voice.script(SAID, speed), voice.script(SAID[1:], speed)
        assert both.shares[1] == alone.shares[0] and len(both.shares[0]) == 5
        length = alone.lengths[0] + 1
        torch.testing.assert_close(both.told[1, :length], alone.told[0, :length])
    assert sum(voice.script(SAID, 0.6).lengths) > sum(voice.script(SAID, 1.5).lengths)


def test_the_decoder_says_what_was_learned(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    script = voice.script(SAID)
    speaker = Speaker(voice.network(torch.float64), script)
    tokens = torch.randint(25, (2, 4), generator=torch.Generator().manual_seed(0))
    read = F.pad(tokens, (1, 0), value=voice.end)
    states = voice.states(read, script.told[:, :5])
    speaker.begin([[voice.end]] * 2, Sampling(), frozenset({"ahead", "last"}))
    scores = speaker.score(Draft.guess(tokens, Tree.chain(4), torch.ones_like(tokens, dtype=torch.bool)))
    torch.testing.assert_close(scores.logits().float(), voice.logits(states), rtol=1e-3, atol=1e-3)
    told = F.pad(script.told, (0, 0, 0, 8), mode="replicate")
    for place in range(5):
        wanted = told[:, place + 1 : place + 1 + AHEAD].flatten(1).double()
        torch.testing.assert_close(scores.hidden["ahead"][:, place], wanted)


@pytest.mark.parametrize(
    "name", ["prompt-lookup", "suffix", "token-recycling", "jacobi", "draft-on-the-fly", "draft-model"]
)
def test_drafting_changes_nothing(name: str, small_voice: Callable[..., Voice]) -> None:
    voice, small = small_voice(), small_voice(16, 3)
    script = voice.script(SAID)
    given = {}
    if name == "draft-model":
        given["model"] = Speaker(small.network(torch.float64), small.script(SAID, shares=script.shares))
    found = []
    for drafter in (None, make_drafter(name, **given)):
        steps = list(
            decode(
                Speaker(voice.network(torch.float64), script),
                drafter,
                GumbelMatch(),
                [[voice.end]] * 2,
                sampling=Sampling(temperature=0.9, end=(voice.end,)),
                max_new_tokens=[length + 4 for length in script.lengths],
                seed=3,
            )
        )
        found.append([[token for step in steps if step.row == row for token in step.emitted] for row in range(2)])
    assert found[0] == found[1] and min(map(len, found[0])) > 0


def test_what_does_not_belong_together_is_said(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    speaker = Speaker(voice.network(torch.float64), voice.script(SAID))
    with pytest.raises(InvalidOption, match="1 prompts and 2 utterances"):
        list(decode(speaker, PromptLookup(), GumbelMatch(), [[voice.end]], max_new_tokens=3))
    with pytest.raises(InvalidOption, match="begins with one token"):
        list(decode(speaker, None, GumbelMatch(), [[voice.end, 1]] * 2, max_new_tokens=3))
    with pytest.raises(InvalidOption, match="heads"):
        type(voice)(codes=25, width=32, heads=5)
