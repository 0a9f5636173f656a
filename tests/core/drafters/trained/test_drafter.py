"""Trained drafters: drafting computes what training computed, caches stay valid, and training improves drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.trained.ctc import collapse
from outrider.core.drafters.trained.drafter import Learned, best_shape, shallow
from outrider.core.drafters.trained.head_runner import HeadRunner
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, Method, make_rule
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import random_draft_head
from outrider.core.training.acceptance_curve import Curve, walk
from outrider.core.training.dataset import Lesson, TargetTeacher, read
from outrider.core.training.losses import resolve
from outrider.core.tree import Tree
from tests.turns import takes_turn

SHAPE = Config(vocabulary=31, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)
TRAINED = {name: method for name, method in DRAFTERS.items() if method.make in (Learned,)}
SPOKEN = [method for method in TRAINED.values() if method.name != "ctc"]  # frames are not about places
GREEDY = Sampling(temperature=0)
USUAL = ("medusa", "hydra", "eagle3", "mtp", "dflash")
PARTS = ("attention.qkv", "attention.out", "mlp.up_gate", "mlp.down")


def target(dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder.random(SHAPE, seed=5, dtype=dtype)


def draft_head(method: Method, model: Decoder, **config: Any) -> Any:
    assert method.draft_head is not None
    torch.manual_seed(1)
    return method.draft_head(model, **{**method.test_head_options, **config}).to(model.network.dtype)


def drafted(runner: HeadRunner, model: Decoder, tokens: list[int], depth: int) -> Tensor:
    """The logits [depth, R] along the true tokens behind the first `len - depth + 1`, the last of which is the root."""
    prompt, chain = tokens[: len(tokens) - depth + 1], tokens[len(tokens) - depth + 1 :]
    prefill = model.begin([prompt], Sampling(), runner.draft_head.needs)
    runner.set_hidden(prefill.hidden)
    runner.self_draftable = prefill.self_draftable
    runner.begin([prompt], Sampling())
    found = [runner.score(Draft.empty(1)).logits()[0]]
    for node in range(len(chain)):
        ids = torch.tensor([chain[: node + 1]])
        found.append(runner.score(Draft.guess(ids, Tree.chain(node + 1), ids >= 0), node).logits()[0])
    return torch.cat(found)


CORRECTED = [
    (DRAFTERS[name], config)
    for name, config in (
        ("hydra", {"hidden": 5, "layers": 0}),
        ("eagle3", {"lora": 3}),
        ("amphista", {"lora": 2, "hidden": 12}),
        ("dflash", {"lora": 3}),
        ("dspark", {"lora": 1}),
        ("specdec", {"lora": 2, "encoder": 2}),
        ("falcon", {"lora": 2, "block": 3}),
        ("falcon", {"layers": 2}),
        ("amphista", {"rank": 3, "mixing": 2}),
        ("mtp", {"lora": 2}),
    )
]


@pytest.mark.parametrize(
    ("method", "config"),
    [*((one, {}) for one in SPOKEN), *CORRECTED],
    ids=lambda one: one.name if isinstance(one, Method) else "+".join(one),
)
def test_drafting_computes_what_training_computed(method: Method, config: dict[str, int]) -> None:
    model = target()
    learner = draft_head(method, model, vocabulary=tuple(range(30, 3, -1)), **config)
    with torch.no_grad():
        for weight in learner.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    learner.eval()
    tokens = [random.Random(3).randrange(31) for _ in range(12)]
    batch = read(TargetTeacher(model), [Lesson(tuple(tokens[:2]), tuple(tokens[2:]))], learner.needs)
    with torch.no_grad():
        guesses = sorted(learner.guesses(batch), key=lambda one: one.offset)
    drafter = Learned(learner.drafts(model))
    runner = drafter.model
    depth = len(guesses)
    compared = 0
    for root in range(2, len(tokens) - depth - 1):
        said = drafted(runner, model, tokens[: root + depth], depth)
        for place, guess in enumerate(guesses):
            asked = batch.loss_mask(guess.offset)[0]
            at = root + 1 + place - guess.offset
            if asked[at]:
                row = int(asked[:at].sum())
                torch.testing.assert_close(said[place], guess.logits[row], atol=1e-5, rtol=1e-5)  # rotary tables
                compared += 1
    assert compared > 5


def test_only_low_rank_corrections_are_trained() -> None:
    model = target()
    whole, small = (draft_head(DRAFTERS["eagle3"], model, lora=lora) for lora in (0, 2))
    kept = {name for name, _ in small.named_parameters() if "block" in name}
    assert kept == {
        *(f"block.{part}.{way}" for part in PARTS for way in ("up", "down")),
        "block.mlp_norm.weight",
    }
    assert sum(one.numel() for one in small.parameters()) < sum(one.numel() for one in whole.parameters()) / 1.5
    layer = model.network.layers[-1]
    torch.testing.assert_close(small.block.mlp.down.weight, layer.down.weight, atol=0, rtol=0)
    torch.testing.assert_close(small.block.attention.qkv.weight[:, 32:], layer.qkv.weight, atol=0, rtol=0)
    assert not small.block.attention.qkv.weight[:, :32].any()
    with pytest.raises(InvalidOption, match="configuration"):
        draft_head(DRAFTERS["eagle3"], model, lora=2, hidden=12)
    with pytest.raises(InvalidOption, match="lora is -1"):
        draft_head(DRAFTERS["ctc"], model, lora=-1)


class Audited(Learned):
    """In every round, compares with a new draft head that reads everything again."""

    checked = 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, sampling)
        self.texts = [list(prompt) for prompt in prompts]

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        draft = super().propose(room, rng)
        if int(room.min()) < 0:
            return draft
        said = self.model.score(Draft.empty(draft.rows)).logits()
        for row, text in enumerate(self.texts):
            model, fresh = target(), type(self.model)(self.draft_head)
            prefill = model.begin([text], Sampling(), self.needs)
            fresh.set_hidden(prefill.hidden)
            fresh.self_draftable = prefill.self_draftable
            fresh.begin([text], Sampling())
            wanted = fresh.score(Draft.empty(1)).logits()
            torch.testing.assert_close(said[row], wanted[0], atol=1e-9, rtol=0)
            self.checked += 1
        return draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        super().observe(draft, scores, verdict, rng)
        for text, new in zip(self.texts, verdict.rows(draft), strict=True):
            text += new

    def arrange(self, order: Sequence[int], width: int) -> None:
        super().arrange(order, width)
        self.texts = [self.texts[row] for row in order]


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft_kind", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("tree", "dynamic")), "chain"]
)
@pytest.mark.parametrize("method", TRAINED.values(), ids=lambda method: method.name)
def test_cached_states_stay_valid(method: Method, draft_kind: str) -> None:
    model = target()
    drafter = Audited(
        draft_head(method, model, vocabulary=0).drafts(model), draft_kind=draft_kind, length=3, nodes=12, depth=3
    )
    prompts = [[1, 2, 3, 4], [5, 8], [6, 7, 8]]  # of a single token the first is read, as there is no other
    steps = list(decode(model, drafter, Exact(), prompts, sampling=GREEDY, max_new_tokens=[24, 25, 26], seed=0))
    assert drafter.checked > 20
    assert any(step.accepted for step in steps)


def lessons(model: Decoder, count: int, length: int) -> list[Lesson]:
    """The target's own greedy answers to random prompts."""
    draw = random.Random(0)
    prompts = [[draw.randrange(31) for _ in range(4)] for _ in range(count)]
    found: list[list[int]] = [[] for _ in prompts]
    for step in decode(model, None, Exact(), prompts, sampling=GREEDY, max_new_tokens=length):
        found[step.row] += step.emitted
    return [Lesson(tuple(one), tuple(answer)) for one, answer in zip(prompts, found, strict=True)]


def judged(learner: Any, teacher: TargetTeacher, held: list[Lesson]) -> Curve:
    batch = read(teacher, held, learner.needs)
    learner.eval()
    with torch.no_grad():
        return walk(learner.hits(batch, 4), batch.answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [one for name, one in TRAINED.items() if name in USUAL or takes_turn(name)],
    ids=lambda method: method.name,
)
def test_training_improves_drafts_as_simulated(method: Method, measured: Any) -> None:
    model = Decoder.random(SHAPE, seed=5)
    teacher = TargetTeacher(model)
    every = lessons(model, 220, 24)
    held, known = every[:40], every[40:]
    learner = draft_head(method, model, vocabulary=0)
    before = judged(learner, teacher, held)
    optimiser = torch.optim.AdamW(learner.parameters(), lr=4e-3)
    loss = resolve("kl")
    batches = [read(teacher, known[start : start + 45], learner.needs) for start in range(0, len(known), 45)]
    curve = []
    learner.train()
    for step in range(90):
        value = learner(batches[step % len(batches)], loss)
        value.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        curve.append(float(value.detach()))
    after = judged(learner, teacher, held)
    first, last = sum(curve[:5]), sum(curve[-5:])
    measured("training on a tiny target: loss, last over first", name=method.name, value=last / first)
    measured("training on a tiny target: simulated tokens a call", name=method.name, value=after.tokens_per_pass)
    assert last < 0.9 * first
    assert after.tokens_per_pass > max(before.tokens_per_pass - 0.1, 1.3)  # some begin as the output layer itself
    length = learner.depth or 4
    drafter = Learned(learner.drafts(model), draft_kind="chain", policy="fixed", length=length, nodes=length)
    steps = decode(model, drafter, Exact(), [one.prompt for one in held], sampling=GREEDY, max_new_tokens=24)
    emitted = [len(step.emitted) for step in steps]
    real = sum(emitted) / len(emitted)
    measured("training on a tiny target: real tokens a call", name=method.name, value=real)
    assert real == pytest.approx(after.tokens_per_pass, rel=0.12)


def test_frames_collapse() -> None:
    frames = torch.tensor([[7, 7, 9, 7, 9, 9], [9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [1, 9, 1, 1, 9, 2]])
    assert collapse(frames, 9, 4).tolist() == [[7, 7, -1, -1], [-1] * 4, [1, 2, 3, 4], [1, 1, 2, -1]]


def test_shapes() -> None:
    assert shallow((-1, 0, 1, -1, 3), 2) == (-1, 0, -1, 2)
    assert len(best_shape(16, 4)) == 16


def test_what_cannot_be_is_refused() -> None:
    model = target()
    heads = random_draft_head(DRAFTERS["medusa"], model)
    with pytest.raises(InvalidOption, match="draft_kind"):
        Learned(heads, draft_kind="weed")
    with pytest.raises(InvalidOption, match="1 or more"):
        Learned(heads, nodes=0)
    with pytest.raises(InvalidOption, match="each once"):
        DRAFTERS["medusa"].draft_head(model, vocabulary=(1, 1))  # type: ignore[misc]
    assert make_rule("exact").lossless


class Weighed(Decoder):
    """Records how many tokens each pass reads."""

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        if since is None:
            self.waited = [*getattr(self, "waited", []), self.cache.rows.pending.shape[1]]
        return super().score(draft, since)


@pytest.mark.parametrize("name", ["dynamic-tree", "specexec"])
def test_a_rewound_model_does_not_read_everything_again(name: str) -> None:
    model = Weighed(target().network)
    drafter = DRAFTERS[name].make(model=model, **DRAFTERS[name].test_options[0])
    prompts = [[1, 2, 3], [4, 5]]
    for _ in decode(target(), drafter, Exact(), prompts, sampling=GREEDY, max_new_tokens=60, seed=0):
        pass
    assert len(model.waited) > 5 and max(model.waited) < 12  # the last step's tokens, of sixty and more
