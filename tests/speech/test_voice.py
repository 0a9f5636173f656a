"""The voice: conditioning by position, equality of training and inference, and drafting that changes nothing."""

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
from outrider.speech.voice import LOOKAHEAD, Voice, VoiceDecoder

PHONEMES = [[0, 5, 9, 20, 0], [0, 33, 0]]


def test_conditioning_follows_the_durations(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    script = voice.script(PHONEMES, durations=[[1, 3, 0, 2, 1], [2, 2, 1]])
    assert script.lengths == (7, 5) and script.conditioning.shape == (2, 7 + 1 + LOOKAHEAD, 32)
    over = script.conditioning[0, 7]
    assert (script.conditioning[0, 7:] == over).all() and (script.conditioning[1, 5:] == over).all()
    assert not (script.conditioning[0, :7] == over).all(1).any()
    ids = torch.tensor([PHONEMES[0]])
    encoded, _ = voice.reader(ids, torch.ones_like(ids, dtype=torch.bool))
    first = script.conditioning[0, 1] - voice.reader.since[0] - voice.reader.until[2]
    last = script.conditioning[0, 3] - voice.reader.since[2] - voice.reader.until[0]
    torch.testing.assert_close(first, encoded[0, 1])
    torch.testing.assert_close(last, encoded[0, 1])


def test_utterances_of_a_batch_do_not_affect_each_other(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    for speed in (1.0, 0.7):
        both, alone = voice.script(PHONEMES, speed), voice.script(PHONEMES[1:], speed)
        assert both.durations[1] == alone.durations[0] and len(both.durations[0]) == 5
        length = alone.lengths[0] + 1
        torch.testing.assert_close(both.conditioning[1, :length], alone.conditioning[0, :length])
    assert sum(voice.script(PHONEMES, 0.6).lengths) > sum(voice.script(PHONEMES, 1.5).lengths)


def test_inference_equals_training(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    script = voice.script(PHONEMES)
    decoder = VoiceDecoder(voice.network(torch.float64), script)
    tokens = torch.randint(25, (2, 4), generator=torch.Generator().manual_seed(0))
    inputs = F.pad(tokens, (1, 0), value=voice.end)
    states = voice.states(inputs, script.conditioning[:, :5])
    decoder.begin([[voice.end]] * 2, Sampling(), frozenset({"ahead", "last"}))
    scores = decoder.score(Draft.guess(tokens, Tree.chain(4), torch.ones_like(tokens, dtype=torch.bool)))
    torch.testing.assert_close(scores.logits().float(), voice.logits(states), rtol=1e-3, atol=1e-3)
    conditioning = F.pad(script.conditioning, (0, 0, 0, 8), mode="replicate")
    for position in range(5):
        expected = conditioning[:, position + 1 : position + 1 + LOOKAHEAD].flatten(1).double()
        torch.testing.assert_close(scores.hidden["ahead"][:, position], expected)


@pytest.mark.parametrize(
    "name", ["prompt-lookup", "suffix", "token-recycling", "jacobi", "draft-on-the-fly", "draft-model"]
)
def test_drafting_changes_nothing(name: str, small_voice: Callable[..., Voice]) -> None:
    voice, small = small_voice(), small_voice(16, 3)
    script = voice.script(PHONEMES)
    options = {}
    if name == "draft-model":
        options["model"] = VoiceDecoder(
            small.network(torch.float64), small.script(PHONEMES, durations=script.durations)
        )
    outputs = []
    for drafter in (None, make_drafter(name, **options)):
        steps = list(
            decode(
                VoiceDecoder(voice.network(torch.float64), script),
                drafter,
                GumbelMatch(),
                [[voice.end]] * 2,
                sampling=Sampling(temperature=0.9, end=(voice.end,)),
                max_new_tokens=[length + 4 for length in script.lengths],
                seed=3,
            )
        )
        outputs.append([[token for step in steps if step.row == row for token in step.emitted] for row in range(2)])
    assert outputs[0] == outputs[1] and min(map(len, outputs[0])) > 0


def test_wrong_arguments_are_refused(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    decoder = VoiceDecoder(voice.network(torch.float64), voice.script(PHONEMES))
    with pytest.raises(InvalidOption, match="1 prompts and 2 utterances"):
        list(decode(decoder, PromptLookup(), GumbelMatch(), [[voice.end]], max_new_tokens=3))
    with pytest.raises(InvalidOption, match="must be the end token alone"):
        list(decode(decoder, None, GumbelMatch(), [[voice.end, 1]] * 2, max_new_tokens=3))
    with pytest.raises(InvalidOption, match="heads"):
        type(voice)(codes=25, width=32, heads=5)
