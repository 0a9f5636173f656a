"""PaSS: drafting reads look-ahead embeddings as training did, wherever an accepted path ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.trained.lookahead_embeddings import LookaheadEmbeddings, PaSS, grown
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import DRAFTERS
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import random_draft_head
from outrider.core.training.dataset import Lesson, TargetTeacher, read
from outrider.core.training.losses import resolve
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=31, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48, qk_norm=True
)
GREEDY = Sampling(temperature=0)


def target(dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder.random(SHAPE, seed=5, dtype=dtype)


def draft_head(model: Decoder, **config: Any) -> LookaheadEmbeddings:
    torch.manual_seed(1)
    found: LookaheadEmbeddings = LookaheadEmbeddings(model, **{"embeddings": 3, **config}).to(model.network.dtype)
    return found


def said(model: Decoder, embeddings: Tensor, tokens: list[int], guesses: list[int] | None = None) -> Tensor:
    """The logits [L, V] behind the embeddings that follow the tokens, of which the last may be guesses in a draft."""
    guesses = guesses or []
    model.begin([tokens], Sampling())
    count = len(embeddings)
    size = len(guesses) + count
    ids = torch.tensor([[*guesses, *(SHAPE.vocabulary + k for k in range(count))]])
    draft = Draft.guess(ids, Tree.chain(size), torch.ones(1, size, dtype=torch.bool))
    draft = replace(draft, probe=ids >= SHAPE.vocabulary, embeddings=embeddings)
    return model.score(draft).logits()[0, -count:]


@pytest.mark.slow
def test_training_reads_what_drafting_reads() -> None:
    model = target()
    for vocabulary in (0, tuple(range(30, 3, -1))):
        learner = draft_head(model, vocabulary=vocabulary)
        rows = [[random.Random(n).randrange(31) for _ in range(size)] for n, size in enumerate((40, 12))]
        batch = read(TargetTeacher(model), [Lesson(tuple(row[:2]), tuple(row[2:])) for row in rows], learner.needs)
        with torch.no_grad():
            guesses = list(learner.guesses(batch))
        assert [one.offset for one in guesses] == [2, 3, 4]
        kept = slice(None) if learner.words.vocabulary is None else learner.words.vocabulary
        compared = 0
        for row, tokens in enumerate(rows):
            for root in range(1, len(tokens) - 2):
                wanted = said(model, learner.embeddings.detach(), tokens[: root + 1])[:, kept]
                for place, guess in enumerate(guesses):
                    asked = batch.loss_mask(guess.offset)
                    if asked[row, root]:
                        at = int(asked.flatten()[: row * asked.shape[1] + root].sum())
                        torch.testing.assert_close(guess.logits[at], wanted[place], atol=1e-5, rtol=1e-5)
                        compared += 1
        assert compared > 100


def test_embeddings_follow_guesses_too() -> None:
    model = target()
    rows = draft_head(model).embeddings.detach()
    for known in (6, 3):
        torch.testing.assert_close(
            said(model, rows, [4, 7, 9, 1, 5, 2]), said(model, rows, [4, 7, 9, 1, 5, 2][:known], [1, 5, 2][: 6 - known])
        )
    assert not torch.equal(said(model, rows, [4, 7, 9]), said(model, rows + 1, [4, 7, 9]))


def test_only_the_embeddings_learn() -> None:
    model = target(torch.float32)
    before = [layer.qkv.weight.clone() for layer in model.network.layers]
    learner = draft_head(model)
    batch = read(TargetTeacher(model), [Lesson((1, 2), tuple(range(3, 28)))], learner.needs)
    torch.autograd.backward(learner.loss(batch, resolve("kl")))
    assert [name for name, _ in learner.named_parameters()] == ["embeddings"] == list(learner.state_dict())
    assert learner.embeddings.grad is not None and (learner.embeddings.grad.abs().sum(1) > 0).all()
    assert all(torch.equal(one, layer.qkv.weight) for one, layer in zip(before, model.network.layers, strict=True))


def test_the_tree() -> None:
    assert grown((), 2) == (-1, 0)
    assert grown((-1, -1, 0), 2) == (-1, -1, 0, -1, 3, 0, 5, 1, 7, 2, 9)
    assert grown((-1, 0), 0) == (-1, 0)


class Audited(PaSS):
    """In every round, compares with a new pass of the target over the embeddings."""

    checked = 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, sampling)
        self.texts = [list(prompt) for prompt in prompts]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        super().observe(draft, scores, verdict, rng)
        for row, (text, emitted) in enumerate(zip(self.texts, verdict.rows(draft), strict=True)):
            text += emitted
            if self._distribution is not None and len(text) < 20:
                wanted = said(target(), self.embeddings, text[:-1])[: self._ahead]
                found = self._distribution.probs[row]
                torch.testing.assert_close(found, wanted.softmax(-1), atol=1e-9, rtol=0)
                self.checked += 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tree": (-1, -1, 0, 0, 2)}, {"separate_passes": True}, {"length": 2}])
def test_guesses_come_from_the_end_of_the_accepted_path(options: dict[str, Any]) -> None:
    model = target()
    learned = draft_head(model).drafts(model)
    prompts = [[1, 2, 3, 4], [5], [6, 7, 8]]
    for sampling in (GREEDY, Sampling()):
        drafter = Audited(learned, **options)
        steps = list(decode(model, drafter, Exact(), prompts, sampling=sampling, max_new_tokens=[24, 25, 26], seed=0))
        assert drafter.checked > 10
        most = max(len(step.drafted) for step in steps)
        assert most == len(drafter.parents), "probes are no guesses"
        if options.get("separate_passes"):
            assert {len(step.drafted) for step in steps if step.row == 0} >= {0, 3}


def test_penalties_ignore_probes() -> None:
    model = target()
    learned = random_draft_head(DRAFTERS["pass"], model)
    sampling = Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2)
    outputs = []
    for drafter in (None, PaSS(learned)):
        steps = decode(model, drafter, Exact(), [[1, 2, 3]], sampling=sampling, max_new_tokens=30)
        outputs.append([token for step in steps for token in step.emitted])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_training_improves_drafts_as_simulated(measured: Any) -> None:
    from outrider.core.training.acceptance_curve import walk

    model = target(torch.float32)
    draw = random.Random(0)
    prompts = [[draw.randrange(31) for _ in range(4)] for _ in range(120)]
    answers: list[list[int]] = [[] for _ in prompts]
    for step in decode(model, None, Exact(), prompts, sampling=GREEDY, max_new_tokens=24):
        answers[step.row] += step.emitted
    every = [Lesson(tuple(one), tuple(two)) for one, two in zip(prompts, answers, strict=True)]
    held, known, teacher, learner = every[:30], every[30:], TargetTeacher(model), draft_head(model)
    optimiser = torch.optim.AdamW(learner.parameters(), lr=3e-2)
    curve = []
    for turn in range(60):
        part = known[(turn * 45) % 90 : (turn * 45) % 90 + 45]
        value = learner.loss(read(teacher, part, learner.needs), resolve("kl"))
        torch.autograd.backward(value)
        optimiser.step()
        optimiser.zero_grad()
        curve.append(float(value.detach()))
    batch = read(teacher, held, learner.needs)
    with torch.no_grad():
        foreseen = walk(learner.hits(batch, 3), batch.answer).tokens_per_pass
    assert sum(curve[-5:]) < 0.95 * sum(curve[:5])
    steps = decode(
        model, PaSS(learner.drafts(model)), Exact(), [one.prompt for one in held], sampling=GREEDY, max_new_tokens=24
    )
    emitted = [len(step.emitted) for step in steps]
    real = sum(emitted) / len(emitted)
    measured("training on a tiny target: real tokens a call", name="pass", value=real)
    assert real == pytest.approx(foreseen, rel=0.12)


def test_what_cannot_be_is_refused() -> None:
    model = target()
    learned = draft_head(model).drafts(model)
    with pytest.raises(InvalidOption, match="1 or more"):
        draft_head(model, embeddings=0)
    with pytest.raises(InvalidOption, match="1 or more"):
        PaSS(learned, length=0)
    with pytest.raises(InvalidOption, match="no nodes"):
        PaSS(learned, tree=())
    with pytest.raises(Incompatible, match="learned embeddings"):
        PaSS(learned).begin(Prefill(), [[1]], GREEDY)
