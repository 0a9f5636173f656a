"""Layer skipping: the chosen sublayers per row; search, saving and loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.self_speculative.layer_search import SkipSet, search
from outrider.core.drafters.self_speculative.layer_skip import (
    SelfDrafter,
    draft_on_the_fly,
    draft_verify,
    skip_count,
    swift,
)
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.engine.types import Layer
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill
from outrider.core.rules.exact import Exact
from outrider.core.testing.table_target import TableTarget

SHAPE = Config(vocabulary=31, hidden_size=32, layers=6, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 9, 4, 17, 9], [8], [20, 21, 22, 1, 2, 3, 4]]
BOTH = ("attention", "mlp")
IDLE = ("attention.1", "mlp.2", "attention.3", "mlp.3")


def target() -> Decoder:
    """A decoder in which some sublayers change almost nothing."""
    network = Decoder.random(SHAPE, seed=4).network

    def quiet(layer: Layer, index: int) -> Layer:
        if f"attention.{index}" in IDLE:
            layer = replace(layer, out=scaled(layer.out))
        return replace(layer, down=scaled(layer.down)) if f"mlp.{index}" in IDLE else layer

    def scaled(linear: Any) -> Any:
        return type(linear)(linear.weight * 1e-3, None)

    layers = [quiet(layer, index) for index, layer in enumerate(network.layers)]
    return Decoder(network.map_linears(lambda linear: linear, layers))


def run(drafter: SelfDrafter | None, prompts: list[list[int]] = PROMPTS, limit: int = 40) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in prompts]
    for step in decode(target(), drafter, Exact(), prompts, sampling=GREEDY, max_new_tokens=limit):
        out[step.row] += step.emitted
    return out


def test_sublayers_that_change_least_on_the_prompt_are_skipped() -> None:
    drafter = draft_on_the_fly(skip_ratio=0.5, min_similarity=0.999, parts=BOTH)
    assert run(drafter) == run(None)
    model = target()
    sets = drafter.chooser.begin(model, drafter._model, PROMPTS) if model.begin(PROMPTS, GREEDY) else []
    assert sets and all(one == frozenset(IDLE) for one in sets)


def test_each_row_has_its_own_set_in_any_batch() -> None:
    together = draft_on_the_fly(skip_ratio=0.4, parts=BOTH)
    model = target()
    model.begin(PROMPTS, GREEDY)
    sets = together.chooser.begin(model, None, PROMPTS)  # type: ignore[arg-type]
    for prompt, found in zip(PROMPTS, sets, strict=True):
        model.begin([prompt], GREEDY)
        assert together.chooser.begin(model, None, [prompt]) == [found]  # type: ignore[arg-type]
    assert len(set(sets)) > 1


def test_swift_goes_on_searching_in_the_next_request_and_then_only_drafts() -> None:
    model, plain = target(), run(None, limit=30)
    costs, tried = [], []
    for _ in range(4):  # with a new drafter each, as `generate` makes one
        drafter = swift(skip_ratio=0.5, window=8, trials=30, bayes_interval=7)
        steps = list(decode(model, drafter, Exact(), PROMPTS[:1], sampling=GREEDY, max_new_tokens=30))
        assert [token for step in steps for token in step.emitted] == plain[0]
        (search,) = drafter.chooser.searches  # type: ignore[attr-defined]
        tried.append(len(search.tried))
        costs.append(sum(step.cost for step in steps))
    assert 0 < tried[0] < tried[1] and tried[2] == tried[3], tried
    assert search.ended and search.match == max(match for _, match in search.tried)
    assert costs[3] < costs[0] - 0.5 * (tried[0] - 1), "no pass of the search is left"
    other = swift(skip_ratio=0.4, window=8, bayes_interval=7)  # other settings, a search of their own
    list(decode(model, other, Exact(), PROMPTS[:1], sampling=GREEDY, max_new_tokens=10))
    assert len(other.chooser.searches[0].tried) < 3  # type: ignore[attr-defined]


@pytest.mark.slow
def test_swift_finds_a_better_set_while_decoding_in_any_batch() -> None:
    drafter = swift(skip_ratio=0.5, window=16, trials=30, bayes_interval=4)
    assert run(drafter, limit=60) == run(None, limit=60)
    searches = drafter.chooser.searches  # type: ignore[attr-defined]
    for layer_search in searches:
        matches = [match for _, match in layer_search.tried]
        assert layer_search.match == max(matches) > matches[0]
    alone = swift(skip_ratio=0.5, window=16, trials=30, bayes_interval=4)
    run(alone, [PROMPTS[1]], limit=60)
    assert alone.chooser.searches[0].best == searches[1].best  # type: ignore[attr-defined]


def test_swift_scores_sets_on_whole_windows_only() -> None:
    drafter = swift(skip_ratio=0.5, window=16, bayes_interval=0)  # each run has a model of its own
    assert run(drafter, limit=15) == run(None, limit=15)
    assert not any(layer_search.tried for layer_search in drafter.chooser.searches)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_search_finds_idle_sublayers_reproducibly(tmp_path: Path) -> None:
    found = list(search(target(), PROMPTS, tokens=24, trials=60, seed=1))
    assert len(found) == 60
    assert [one.speedup for one in found] == sorted(one.speedup for one in found)
    best = found[-1]
    assert best.speedup > found[0].speedup and 0 < best.cost < 1 and best.skip
    assert list(search(target(), PROMPTS, tokens=24, trials=60, seed=1))[-1] == best
    best.save(tmp_path / "skip.json")
    assert SkipSet.load(tmp_path / "skip.json") == best
    assert run(draft_verify(tmp_path / "skip.json", threshold=0.1)) == run(None)
    for text in ("[]", '{"skip": 3}', "nonsense"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidOption, match="not a saved search result"):
            draft_verify(str(tmp_path / "bad.json"))


def test_the_search_starts_with_sublayers_that_change_least() -> None:
    found = list(search(target(), PROMPTS, tokens=24, trials=6, seed=1))
    assert found[-1].acceptance > 0.9 and set(found[-1].skip) == set(IDLE), found[-1]


def test_idle_sublayers_cost_no_acceptance() -> None:
    drafter = draft_verify(IDLE, length=5, threshold=0.0)
    steps = list(decode(target(), drafter, Exact(), [PROMPTS[0]], sampling=GREEDY, max_new_tokens=40))
    assert len(steps) <= 9
    assert steps[0].cost < 6, "five passes of the view, each cheaper than the whole"


def test_unknown_sublayers_and_other_targets_are_refused() -> None:
    class Foreign(TableTarget):
        def begin(self, prompts, sampling, needs=frozenset()):  # type: ignore[no-untyped-def]
            super().begin(prompts, sampling, needs)
            return Prefill()

    with pytest.raises(Incompatible, match="SWIFT drafts with the target's own layers"):
        list(decode(Foreign(5), swift(bayes_interval=0), Exact(), [[1]], max_new_tokens=3))
    with pytest.raises(InvalidOption, match=r"no sublayer 'mlp\.9'"):
        list(decode(TableTarget(5), draft_verify("mlp.9"), Exact(), [[1]], max_new_tokens=3))
    with pytest.raises(InvalidOption, match="skip_ratio=1"):
        swift(skip_ratio=1)
    with pytest.raises(InvalidOption, match="attention, mlp or both"):
        draft_on_the_fly(parts=("heads",))


@pytest.mark.parametrize(("share", "count", "wanted"), [(0.01, 10, 1), (0.5, 10, 5), (0.99, 4, 3)])
def test_at_least_one_sublayer_is_skipped_and_never_all(share: float, count: int, wanted: int) -> None:
    assert skip_count(share, ["x"] * count) == wanted
