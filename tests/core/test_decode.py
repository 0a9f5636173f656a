"""The loop on tables: adversarial drafters, errors, cancellation, determinism, metrics (rungs 2, 4 and 7).

Over 400 lines: the loop's whole contract.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.decode import commit, decode
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree, SampledTree, TopKTree
from outrider.core.drafters.length_policies import Window
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption, NotFinite
from outrider.core.methods import DRAFTERS, RULES, make_drafter, make_rule
from outrider.core.methods.resolve import Catalogue
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact, GumbelMatch
from outrider.core.step_recorder import Record
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step, Summary
from outrider.core.tree import Tree

V = 7
PROMPTS = ([1, 2, 3], [4], [5, 6, 5, 6, 5], [0, 0], [2, 4, 2, 4, 2, 4, 2])
END = Sampling(temperature=0, end=(6,))


def target(**options: Any) -> TableTarget:
    return TableTarget(V, seed=5, sharpness=2, **options)


def run(drafter: Drafter | None, prompts: Prompts = PROMPTS, **options: Any) -> tuple[list[list[int]], list[Step]]:
    rule = options.pop("rule", Exact())
    options = {"max_new_tokens": 24, "sampling": END} | options
    steps = list(decode(target(), drafter, rule, prompts, **options))
    rows = range(len(prompts))
    return [[token for step in steps if step.row == row for token in step.emitted] for row in rows], steps


class Stubborn:
    """Proposes what it is told to, whatever the room."""

    vocabulary, needs, bytes_read = None, frozenset[str](), 0

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], drawn: bool = False) -> None:
        self.tokens, self.tree, self.is_drawn = tokens, Tree.of(tuple(parents)), drawn

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None: ...

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rows = len(room)
        tokens = torch.tensor([list(self.tokens)], dtype=torch.long).expand(rows, -1)
        live = torch.ones_like(tokens, dtype=torch.bool)
        if not self.is_drawn:
            return Draft.guess(tokens, self.tree, live)
        distributions = Distribution(torch.ones(rows, len(self.tokens), 1), tokens[..., None].clamp(0, V - 1), V)
        return Draft(
            tokens, self.tree, live, distributions, torch.arange(len(self.tokens)).expand(rows, -1), replacement=True
        )

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None: ...

    def end(self) -> None: ...


ADVERSARIES: dict[str, Callable[[], Drafter]] = {
    "always wrong": lambda: DraftModel(TableTarget(V, seed=99, sharpness=2), length=4),
    "impossible tokens": lambda: Stubborn([V, -5, 10**9], [-1, -1, 0]),
    "drawn where p is 0": lambda: Stubborn([0, 1, 2], [-1, 0, 1], drawn=True),
    "empty": lambda: Stubborn([], []),
    "end token inside": lambda: Stubborn([6, 6, 6], [-1, 0, -1]),
    "too long": lambda: Stubborn([5] * 60, range(-1, 59)),
    "duplicate siblings": lambda: Stubborn([5, 5, 5, 5, 1, 1], [-1, -1, -1, 0, 0, 1]),
    "duplicate drawn siblings": lambda: Stubborn([5, 5, 5, 5], [-1, -1, 0, 0], drawn=True),
}


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("mode", ["greedy", "gumbel-match"])
def test_whatever_is_drafted_the_output_is_the_same(name: str, mode: str) -> None:
    options: dict[str, Any] = {"rule": Exact()} if mode == "greedy" else {"rule": GumbelMatch()}
    options["sampling"] = END if mode == "greedy" else Sampling(end=(6,))
    assert run(ADVERSARIES[name](), seed=11, **options)[0] == run(None, seed=11, **options)[0]


@pytest.mark.parametrize("sampling", [END, Sampling(), Sampling(top_p=0.8)])
@pytest.mark.parametrize("rule", ["exact", "token", "block"])
def test_the_target_itself_is_always_right(rule: str, sampling: Sampling) -> None:
    _, steps = run(DraftModel(target(), length=3), rule=make_rule(rule), sampling=sampling, seed=4)
    full = [step for step in steps if step.finish is None]
    assert full and all(step.accepted == 3 and len(step.emitted) == 4 for step in full)
    whole = [step for step in steps if not step.finish or step.finish == "limit"]
    assert Summary.of(whole).acceptance_rate == 1


def test_the_bonus_behind_64_guesses_takes_the_65th_random_number() -> None:
    """A table of random numbers has 64, or more where they are asked for."""
    drafter = DraftModel(target(), length=64)
    _, steps = run(drafter, [[1]], rule=make_rule("token"), sampling=Sampling(), max_new_tokens=66)
    assert [len(step.emitted) for step in steps] == [65, 1]


SLOW = pytest.mark.slow
FLEET: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: DraftModel(target(blur=0.4), length=4),
    "window policy": lambda: DraftModel(target(blur=0.4), policy=Window(2)),
    "hotter drafter": lambda: DraftModel(target(blur=0.4), length=3, sampling=Sampling(temperature=1.5)),
    "sampled tree": lambda: SampledTree(target(blur=0.4), tree=(-1, -1, 0, 0, 2)),
    "top-k tree": lambda: TopKTree(target(blur=0.4), tree=(-1, 0, -1, 2, 1)),
    "dynamic tree": lambda: DynamicTree(target(blur=0.4), nodes=6, width=3, depth=3),
    "jacobi": lambda: Jacobi(window=5),
    "redraw": lambda: Jacobi(window=5, renew="redraw", filler="random"),
    "couple": lambda: Jacobi(window=5, renew="couple"),
    "lookup": lambda: PromptLookup(length=6, references=[[1, 2, 3, 4, 5, 0, 1]]),
}


@pytest.mark.parametrize("batch", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 5])
@pytest.mark.parametrize("name", FLEET)
def test_identity_with_plain_decoding(name: str, batch: int) -> None:
    """Rung 2 on tables: greedy, and gumbel-match at T=1 and with penalties, whole batches of different lengths."""
    samplings = [(END, Exact()), (Sampling(), GumbelMatch()), (Sampling(repetition_penalty=1.4), GumbelMatch())]
    for start in range(0, 5, batch):
        prompts = PROMPTS[start : start + batch]
        for sampling, rule in samplings:
            how: dict[str, Any] = {"sampling": sampling, "rule": rule, "seed": list(range(start, start + len(prompts)))}
            assert run(FLEET[name](), prompts, **how)[0] == run(None, prompts, **how)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FLEET)
@pytest.mark.parametrize(
    "rule", ["exact", *(pytest.param(one, marks=pytest.mark.slow) for one in ("token", "lenience"))]
)
def test_a_row_decodes_the_same_alone_and_in_a_batch(name: str, rule: str) -> None:
    """At T=1 a row's tokens depend on its own seed only, and the global generator plays no part."""
    how: dict[str, Any] = {"sampling": Sampling(end=(6,)), "rule": make_rule(rule)}
    state = torch.random.get_rng_state()
    together = run(FLEET[name](), seed=[7, 8, 9, 10, 11], **how)[0]
    torch.manual_seed(1)
    alone = [run(FLEET[name](), [prompt], seed=[7 + i], **how)[0][0] for i, prompt in enumerate(PROMPTS)]
    torch.random.set_rng_state(state)
    assert together == alone
    first = run(FLEET[name](), PROMPTS[:1], seed=3, **how)[0][0]
    assert run(FLEET[name](), [PROMPTS[0], PROMPTS[1]], seed=3, **how)[0][0] == first


def test_identical_prompts_in_a_batch_get_different_streams() -> None:
    rows = run(None, [[1, 2]] * 4, sampling=Sampling(), max_new_tokens=12)[0]
    assert len({tuple(row) for row in rows}) == 4


def test_limits_may_differ_and_are_kept() -> None:
    rows, steps = run(DraftModel(target(), length=5), sampling=Sampling(), max_new_tokens=[1, 2, 3, 9, 30])
    assert [len(row) for row in rows] == [1, 2, 3, 9, 30]
    assert [step.finish for step in steps if step.finish] == ["limit"] * 5
    assert all(len(step.emitted) >= 1 for step in steps)


def test_a_stop_cuts_before_the_limit_and_after_the_end() -> None:
    def stop(row: int, tokens: Sequence[int]) -> int | None:
        return next((i + 1 for i, token in enumerate(tokens) if token == 3), None)

    plain, _ = run(None, stop=stop, sampling=Sampling(end=(6,)))
    fast, steps = run(DraftModel(target(), length=5), stop=stop, sampling=Sampling(end=(6,)), rule=GumbelMatch())
    same, _ = run(None, stop=stop, sampling=Sampling(end=(6,)), rule=GumbelMatch())
    assert fast == same
    for row in plain + fast:
        assert 3 not in row[:-1] and 6 not in row[:-1]
    ended = {step.row: step.finish for step in steps if step.finish}
    for row, finish in ended.items():
        assert (fast[row][-1] == 3) == (finish == "stop") and (fast[row][-1] == 6) == (finish == "end")


@pytest.mark.parametrize(
    ("emitted", "end", "stop", "limit", "wanted"),
    [
        ([1, 2, 3], [], None, 10, (3, None)),
        ([1, 2, 3], [2], None, 10, (2, "end")),
        ([1, 2, 3], [], None, 5, (3, "limit")),  # two before
        ([1, 2, 3], [], None, 4, (2, "limit")),
        ([1, 2, 3], [3], None, 4, (2, "limit")),  # the end token lies past the limit
        ([1, 2, 3], [3], None, 5, (3, "end")),  # at the limit, the end counts
        ([1, 2, 3], [3], 4, 5, (2, "stop")),
        ([1, 2, 3], [2], 4, 5, (2, "end")),  # at the same place, the end counts
        ([1, 2, 3], [], 1, 9, (0, "stop")),  # what was already out cannot be called back
        ([1, 2, 3], [], 5, 5, (3, "stop")),
    ],
)
def test_commit_order(
    emitted: list[int], end: list[int], stop: int | None, limit: int, wanted: tuple[int, str]
) -> None:
    found = commit(0, [8, 9], emitted, end, None if stop is None else lambda row, tokens: stop, limit)
    assert found == wanted


# ---- what cannot work


class Forward(TableTarget):
    rollback = False


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: decode(target(), None, Exact(), [], max_new_tokens=3), "there are no prompts"),
        (lambda: decode(target(), None, Exact(), [[0, 99]], max_new_tokens=3), "contains token 99"),
        (lambda: decode(target(), None, Exact(), [[1], []], max_new_tokens=3), "prompt 1 is empty"),
        (lambda: decode(target(), None, Exact(), [1, 2], max_new_tokens=3), "wrap it"),  # type: ignore[list-item]
        (lambda: decode(target(), None, Exact(), [[1, V]], max_new_tokens=3), "from 0 to 6"),
        (lambda: decode(target(), None, Exact(), [[-1]], max_new_tokens=3), "contains token -1"),
        (lambda: decode(target(), None, Exact(), [[1]], max_new_tokens=0), "must be 1 or more"),
        (lambda: decode(target(), None, Exact(), [[1]], max_new_tokens=[3, 3]), "max_new_tokens has 2 values for 1"),
        (lambda: decode(target(), None, Exact(), [[1]], max_new_tokens=3, seed=[1, 2]), "2 seeds for 1"),
        (
            lambda: decode(target(), DraftModel(TableTarget(9)), Exact(), [[1]], max_new_tokens=3),
            "9 and the target one of 7",
        ),
        (lambda: decode(Forward(V), PromptLookup(), Exact(), [[1]], max_new_tokens=3), "drafter=None"),
        (lambda: Sampling(temperature=-1), "temperature is -1"),
        (lambda: Sampling(temperature=float("nan")), "temperature is nan"),
        (lambda: Sampling(top_p=0), "top_p is 0"),
        (lambda: Sampling(top_k=-1), "top_k is -1"),
        (lambda: Sampling(min_p=1), "min_p is 1"),
        (lambda: Sampling(repetition_penalty=0), "repetition_penalty is 0"),
        (lambda: Sampling(presence_penalty=float("inf")), "presence_penalty is inf"),
        (lambda: make_drafter("medussa"), "Did you mean 'medusa'"),
        (lambda: make_rule("exakt"), "Did you mean 'exact'?"),
        (lambda: make_rule("typical", gamma=1), "Known: delta, epsilon"),
        (lambda: make_drafter("draft-model"), "needs model="),
        (lambda: make_drafter("draft-model", model=target(), policy="fxed"), "Did you mean 'fixed'?"),
        (lambda: make_drafter("jacobi", renew="x"), "Known: couple, greedy, gumbel, redraw"),
        (lambda: make_drafter("jacobi", filler="x"), "Known: above, copy, left, pad, random"),
        (lambda: make_drafter("jacobi", window=0), "window is 0"),
        (lambda: make_drafter("prompt-lookup", length=0), "length=0"),
        (lambda: make_drafter("dynamic-tree", model=target(), nodes=0), "nodes=0"),
        (lambda: make_drafter("sampled-tree", model=target(), tree=()), "no nodes"),
        (lambda: make_drafter("sampled-tree", model=target(), tree=(3,)), "node 0"),
        (lambda: DraftModel(target(), length=0), "draft length is 0"),
        (lambda: make_rule("threshold", threshold=0), "threshold is 0"),
        (lambda: make_rule("lenience", lenience=2), "lenience is 2"),
        (lambda: make_rule("typical", epsilon=0), "epsilon is 0"),
        (lambda: make_rule("typical", delta=0), "delta is 0"),
        (lambda: make_rule("trust", depth=-1), "depth is -1"),
        (lambda: TableTarget(1), "2 or more"),
    ],
)
def test_errors_say_what_to_do_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises((InvalidOption, Incompatible)) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_block_refuses_what_it_would_bias() -> None:
    with pytest.raises(Incompatible, match="rule='exact'"):
        run(Jacobi(window=3), rule=make_rule("block"))


def test_a_target_without_rollback_decodes_plainly() -> None:
    steps = list(decode(Forward(V, seed=5, sharpness=2), None, Exact(), PROMPTS, sampling=END, max_new_tokens=24))
    assert [step.emitted for step in steps] == [step.emitted for step in run(None)[1]]


# ---- cancellation, records, metrics


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_a_model_that_computes_nan_is_refused(drafter: str | None) -> None:
    """It would give token 0 for ever, or whatever comparisons with NaN lead to."""
    config = Config(vocabulary=40, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=32)
    broken = Decoder.random(config)
    broken.network.embedding[3, 0] = torch.nan
    made = None if drafter is None else make_drafter(drafter)
    with pytest.raises(NotFinite, match=r"not numbers .* check the weight files"):
        list(decode(broken, made, Exact(), [[3, 5, 3]], max_new_tokens=4))


def test_closing_the_generator_frees_target_and_drafter() -> None:
    ended: list[str] = []

    class Watched(TableTarget):
        def end(self) -> None:
            ended.append("target" if not self.blur else "drafter")
            super().end()

    steps = decode(Watched(V), DraftModel(Watched(V, blur=0.1)), Exact(), [[1]], max_new_tokens=50)
    next(steps)
    assert not ended
    steps.close()  # type: ignore[attr-defined]
    assert sorted(ended) == ["drafter", "target"]


def test_records_contain_what_was_requested() -> None:
    sampling = Sampling(temperature=0.8, top_k=4)
    how: dict[str, Any] = {"sampling": sampling, "rule": GumbelMatch(), "seed": 2}
    _, steps = run(FLEET["chain"](), record=Record(alternatives=3, logprobs=True), **how)
    _, plain = run(None, record=Record(alternatives=3, logprobs=True), **how)
    for row in range(5):
        fast = [(a, lp) for s in steps if s.row == row for a, lp in zip(s.alternatives, s.logprobs, strict=True)]
        slow = [(a, lp) for s in plain if s.row == row for a, lp in zip(s.alternatives, s.logprobs, strict=True)]
        assert [a for a, _ in fast] == [a for a, _ in slow]
        assert [lp for _, lp in fast] == pytest.approx([lp for _, lp in slow])
        assert all(len(a) == 3 and a[0][1] >= a[1][1] >= a[2][1] > 0 for a, _ in fast)
    _, bare = run(FLEET["chain"](), record=Record(nodes=False), **how)
    assert [step.emitted for step in bare] == [step.emitted for step in steps]
    assert not any(step.drafted or step.alternatives or step.logprobs for step in bare)


def test_the_summary_counts_committed_tokens_only() -> None:
    rows, steps = run(DraftModel(target(), length=5), sampling=Sampling(), max_new_tokens=8)
    summary = Summary.of(steps)
    assert summary.tokens == sum(map(len, rows)) == 40
    assert summary.target_passes == 10 and summary.tokens_per_pass == 4
    assert summary.histogram == (0, 5, 0, 0, 0, 5) and sum(summary.sources.values()) == 40
    assert summary.by_position == (1, 1, 1, 1, 1)[: len(summary.by_position)]
    assert summary.total_variation == 0 and summary.equivalents_per_token == 10 / 40
    assert summary.seconds == pytest.approx(summary.times.total)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    rows, size = draw(st.integers(1, 3)), draw(st.integers(0, 7))
    parents = torch.tensor([[draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(rows)])
    parents = parents.view(rows, size).long()
    tokens = (
        torch.tensor([[draw(st.integers(-1, V)) for _ in range(size)] for _ in range(rows)]).view(rows, size).long()
    )
    tree = Tree(parents)
    own = torch.tensor([[draw(st.booleans()) for _ in range(size)] for _ in range(rows)]).view(rows, size).bool()
    live = (own[:, None, :] | ~tree.ancestors).all(-1) if size else own
    if not size or draw(st.booleans()):
        return Draft.guess(tokens, tree, live)
    distributions = torch.rand(rows, 2, V, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) + 0.05
    source = torch.tensor([[draw(st.integers(-1, 1)) for _ in range(size)] for _ in range(rows)])
    tokens = torch.where(source < 0, tokens, tokens.clamp(0, V - 1))
    return Draft(
        tokens,
        tree,
        live,
        Distribution(distributions / distributions.sum(-1, keepdim=True), None, V),
        source,
        replacement=True,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drafts(), st.sampled_from([name for name in RULES if name != "block"]), st.sampled_from([0.0, 1.0]))
def test_any_verdict_is_a_path_from_the_root_and_one_token(draft: Draft, rule: str, temperature: float) -> None:
    model = target()
    model.begin([[1, 2]] * draft.rows, Sampling(temperature=temperature, end=(0,)))
    scores = model.score(draft)
    verdict = make_rule(rule)(draft, scores, CounterRNG.of(1, draft.rows))
    for row in range(draft.rows):
        path = verdict.path[row, : int(verdict.accepted[row])].tolist()
        assert [int(draft.tree.parents.expand(draft.rows, -1)[row, node]) for node in path] == [-1, *path][:-1]
        assert all(bool(draft.live[row, node]) and bool(verdict.tried[row, node]) for node in path)
        assert 0 <= int(verdict.token[row]) < V
        assert len(verdict.rows(draft)[row]) == len(path) + 1
    assert bool(((verdict.chance >= 0) & (verdict.chance <= 1)).all())
    if verdict.total_variation is not None:
        assert bool(((verdict.total_variation > -1e-9) & (verdict.total_variation <= 1 + 1e-9)).all())


def test_every_method_has_its_metadata() -> None:
    for method in [*DRAFTERS.values(), *RULES.values()]:
        assert method.systems and method.summary and method.module.startswith("outrider."), method.name
        assert re.search("arXiv [0-9]|ACL [0-9]|https:", method.paper), method.name
        assert (method.make.__doc__ or "").strip()


@pytest.mark.slow
def test_a_run_abandoned_at_exit_ends_quietly() -> None:
    code = (
        "from outrider.core.decode import decode\n"
        "from outrider.core.engine.transformer import Config, Decoder\n"
        "from outrider.core.rules.exact import Exact\n"
        "small = Config(vocabulary=9, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, "
        "intermediate_size=16)\n"
        "steps = decode(Decoder.random(small), None, Exact(), [[1, 2]], max_new_tokens=9)\n"
        "next(steps)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("least", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("sampling", [END, Sampling(top_k=3, end=(6,))], ids=["greedy", "few"])
def test_a_dynamic_tree_is_the_same_alone_and_in_a_batch(sampling: Sampling, least: float) -> None:
    def steps(prompts: Prompts, seeds: list[int]) -> list[Step]:
        tree = DynamicTree(target(blur=0.4), nodes=6, width=3, depth=3, min_probability=least)
        return run(tree, prompts, sampling=sampling, rule=GumbelMatch(), seed=seeds)[1]

    together = steps(PROMPTS, list(range(len(PROMPTS))))
    for row, prompt in enumerate(PROMPTS):
        alone = steps([prompt], [row])
        assert [(step.drafted, step.parents, step.emitted) for step in alone] == [
            (step.drafted, step.parents, step.emitted) for step in together if step.row == row
        ]
    assert any(len(step.drafted) > 1 for step in together)


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "jacobi", "draft-model"])
@pytest.mark.parametrize("guidance", [None, 2.0])
def test_finished_rows_leave_the_pass(drafter: str | None, guidance: float | None) -> None:
    """And the others' tokens, numbers and stops stay theirs."""
    config = Config(vocabulary=29, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
    network = Decoder.random(config, 1, dtype=torch.float64).network
    small = Decoder.random(config, 2, dtype=torch.float64).network
    read: list[int] = []

    class Watched(Decoder):
        def score(self, draft: Draft, since: int | None = None) -> Scores:
            read.append(draft.rows)
            return super().score(draft, since)

    def target(rows: Sequence[int]) -> Any:
        watched = Watched(network)
        return watched if guidance is None else Guided(watched, [[row, 1] for row in rows], [0, 1], guidance)

    def make() -> Drafter | None:
        options = {"jacobi": {"window": 4, "renew": "couple", "filler": "above", "columns": 3}}
        options["draft-model"] = {"model": Decoder(small), "length": 3}
        return None if drafter is None else make_drafter(drafter, **options.get(drafter, {}))

    def said(rows: Sequence[int]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in rows]
        for step in decode(
            target(rows),
            make(),
            Exact(),
            [[3 + row, 7, 3 + row] for row in rows],
            max_new_tokens=[5 + 6 * row for row in rows],
            stop=lambda row, emitted: 11 if rows[row] == 4 and len(emitted) > 11 else None,
            seed=[90 + row for row in rows],
        ):
            tokens[step.row] += step.emitted
        return tokens

    together = said(range(8))
    streams = 1 if guidance is None else 2
    assert read[0] == 8 * streams and read[-1] <= 2 * streams and read == sorted(read, reverse=True)
    assert [len(tokens) for tokens in together] == [5, 11, 17, 23, 11, 35, 41, 47]
    assert together == [said([row])[0] for row in range(8)]


@pytest.mark.parametrize("name", RULES)
def test_no_rule_minds_that_rows_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(vocabulary=29, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
    networks = [Decoder.random(config, seed, dtype=torch.float64).network for seed in (1, 2)]

    def said() -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in range(6)]
        for step in decode(
            Decoder(networks[0]),
            DraftModel(Decoder(networks[1]), length=3),
            make_rule(name, **RULES[name].test_options[0]),
            [[3 + row, 7] for row in range(6)],
            max_new_tokens=[4 + 5 * row for row in range(6)],
            seed=[*range(6)],
        ):
            tokens[step.row] += step.emitted
        return tokens

    leaving = said()
    monkeypatch.setattr("outrider.core.decode._CLOSE_UP", 0.0)
    assert leaving == said()


def test_rows_stay_with_a_guarded_drafter_that_drafts_for_all_of_them() -> None:
    """It moves no rows; in a continuous batch one is made for each."""
    config = Config(vocabulary=29, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
    drafter = Catalogue().drafter("guarded", {"drafter": "anpd"}).made
    limits = [4 + 5 * row for row in range(6)]
    steps = decode(
        Decoder.random(config, 1), drafter, Exact(), [[3 + row, 7] for row in range(6)], max_new_tokens=limits
    )
    assert sum(len(step.emitted) for step in steps) == sum(limits)


def test_the_cost_of_a_round_is_what_it_read_itself() -> None:
    """And not what the drafter has read before."""
    shape = Config(vocabulary=9, hidden_size=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate_size=12)
    target, small = Decoder.random(shape, 1), Decoder.random(shape, 2)
    steps = list(decode(target, DraftModel(small, length=2), Exact(), [[1, 2, 3]], max_new_tokens=24, seed=1))
    costs = [step.cost for step in steps if len(step.drafted) == 2]
    assert len(costs) > 3 and costs == pytest.approx([1 + 2 * small.weight_bytes / target.weight_bytes] * len(costs))
