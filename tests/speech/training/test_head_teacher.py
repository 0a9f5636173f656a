"""The voice as a teacher of draft heads: states equal those of drafting, and trained heads change no token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.heads import HydraHeads
from outrider.core.errors import InvalidOption
from outrider.core.methods import make_drafter, make_rule
from outrider.core.training.dataset import read
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.losses import resolve
from outrider.core.tree import Tree
from outrider.speech.conditioned_heads import ConditionedHeads
from outrider.speech.model import SpeechModel
from outrider.speech.training.data import Utterance
from outrider.speech.training.head_teacher import VoiceTeacher
from outrider.speech.voice import LOOKAHEAD, Voice, VoiceDecoder

NO_FRAMES = np.zeros((80, 0), np.uint8)
HEADS = {"medusa": ConditionedHeads, "hydra": HydraHeads, "eagle3": Eagle3Head}


def utterances() -> list[Utterance]:
    rng = np.random.default_rng(0)
    utterances = []
    for number in range(6):
        lengths = np.array([2, 8, 4, 6, 2]) + 2 * number
        phonemes = np.array([0, *rng.integers(1, 60, 3), 0])
        codes = rng.integers(0, 25, lengths.sum() // 2)
        utterances.append(Utterance(f"number {number}", "numbers", phonemes, lengths, 1.0, NO_FRAMES, codes))
    return utterances


def test_training_states_equal_those_of_drafting(small_voice: Callable[..., Voice]) -> None:
    voice = small_voice()
    lessons = utterances()
    teacher = VoiceTeacher(voice, lessons, torch.device("cpu"))
    needs = frozenset({"last", "ahead", "layer.0", "layer.1", "embedding"})
    batch = read(teacher, [teacher.lessons[4], teacher.lessons[1]], needs)
    for row, utterance in enumerate((lessons[4], lessons[1])):
        script = voice.script([utterance.phonemes.tolist()], durations=[utterance.durations.tolist()])
        decoder = VoiceDecoder(teacher.network, script)
        tokens = torch.from_numpy(utterance.codes)[None]
        decoder.begin([[voice.end]], Sampling(), needs)
        draft = Draft.guess(tokens, Tree.chain(tokens.shape[1]), torch.ones_like(tokens, dtype=torch.bool))
        scores = decoder.score(draft)
        count = tokens.shape[1] + 1
        for tap in needs:
            torch.testing.assert_close(batch.taps[tap][row, :count], scores.hidden[tap][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            teacher.logits(batch.taps["last"][row, :count], None), scores.logits()[0], rtol=1e-3, atol=2e-2
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HEADS))
def test_heads_train_and_change_no_token(name: str, small_voice: Callable[..., Voice]) -> None:
    teacher = VoiceTeacher(small_voice(), utterances(), torch.device("cpu"))
    torch.manual_seed(0)
    draft_head: DraftHead = HEADS[name](teacher.target)
    batch = read(teacher, teacher.lessons, frozenset(draft_head.needs))
    trainable = [parameter for parameter in draft_head.parameters() if parameter.requires_grad]
    loss, optimiser = resolve("kl"), torch.optim.Adam(trainable, 3e-3)
    before = float(draft_head.loss(batch, loss).detach())
    for _ in range(25):
        optimiser.zero_grad()
        draft_head.loss(batch, loss).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert float(draft_head.loss(batch, loss).detach()) < 0.8 * before
    voice = teacher.voice
    script = voice.script([[0, 4, 9, 30, 0], [0, 8, 0]])
    outputs, passes = [], []
    target = VoiceDecoder(teacher.network, script)
    for drafter in (None, make_drafter(name, head=draft_head.eval().drafts(target))):
        steps = list(
            decode(
                VoiceDecoder(voice.network(torch.float32), script),
                drafter,
                make_rule("gumbel-match"),
                [[voice.end]] * 2,
                sampling=Sampling(temperature=0.7, end=(voice.end,)),
                max_new_tokens=30,
                seed=5,
            )
        )
        outputs.append([[token for step in steps if step.row == row for token in step.emitted] for row in range(2)])
        passes.append(len(steps))
    assert outputs[0] == outputs[1] and passes[1] <= passes[0]


def test_each_head_reads_the_conditioning_of_its_position(small_voice: Callable[..., Voice]) -> None:
    teacher = VoiceTeacher(small_voice(), utterances(), torch.device("cpu"))
    heads = ConditionedHeads(teacher.target, heads=3)
    torch.nn.init.normal_(heads.about.weight)
    torch.nn.init.normal_(heads.first.weight)
    batch = read(teacher, teacher.lessons[:1], heads.needs)
    state = torch.cat([batch.taps[tap][0, :1] for tap in heads.taps], -1)
    logits = heads.logits(heads.future_states(state, None))  # type: ignore[arg-type]
    for k, guess in enumerate(heads.guesses(batch)):
        torch.testing.assert_close(logits[0, k], guess.logits[0], rtol=1e-4, atol=1e-4)
    other = state.clone()
    other[:, 32 + 32 : 32 + 64] += 1  # the second head's conditioning
    changed = (heads.logits(heads.future_states(other, None)) != logits).any(-1)[0]  # type: ignore[arg-type]
    assert changed.tolist() == [False, True, False]
    with pytest.raises(InvalidOption, match=f"{LOOKAHEAD}, the positions"):
        ConditionedHeads(teacher.target, heads=LOOKAHEAD + 1)


def test_several_recipes_serve_one_drafter(small_voice: Callable[..., Voice], speaker: SpeechModel) -> None:
    """The option `draft_head` names the recipe; tokens equal those of plain decoding."""

    def taught(name: str, target: VoiceDecoder) -> DraftHead:
        return ConditionedHeads(target, heads=6 if name == "medusa-6" else 4).to(torch.float64)

    voice = small_voice()
    model = SpeechModel(voice, speaker.codec, speaker.vocoder, name="small", taught=taught, dtype=torch.float64)
    options = {"drafter": "medusa", "rule": "gumbel-match", "seed": 2}
    plain = model.generate("Yes.", drafter=None, rule="gumbel-match", seed=2)
    deepest = {}
    for name in ("medusa", "medusa-6"):
        drafting = {"head": name, "draft_kind": "chain", "length": 6}
        result = model.generate("Yes.", drafter_options=drafting, **options)  # type: ignore[call-overload]
        assert result.tokens == plain.tokens
        deepest[name] = max(len(step.drafted) for step in result.trace.steps)
    assert deepest == {"medusa": 4, "medusa-6": 6}
    with pytest.raises(InvalidOption, match="draft head of medusa"):
        model.generate("Yes.", drafter_options={"head": "hydra"}, **options)  # type: ignore[call-overload]
