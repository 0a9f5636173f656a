"""Lookahead: the comb is the paper's Jacobi window, and its n-grams are reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.lookup.trie import Trie, to_draft
from outrider.core.drafters.parallel_decoding.lookahead import Lookahead, _Row
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores
from outrider.core.rules.exact import Exact

GREEDY = Sampling(temperature=0)
CONFIG = Config(vocabulary=61, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)


def test_the_window_is_a_comb_whose_teeth_see_the_spine_before_them() -> None:
    row = _Row([5, 6, 7], 3, 4, 8, 0)
    row.levels = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    trie = Trie()
    row.comb(trie)
    tree = to_draft([trie], torch.device("cpu")).tree
    seen = {
        token: [other for other, yes in zip(trie.tokens, line, strict=True) if yes]
        for token, line in zip(trie.tokens, tree.ancestors[0].tolist(), strict=True)
    }
    assert seen[12] == [10, 11, 12]
    assert seen[21] == [10, 11, 21] and seen[31] == [10, 11, 21, 31]
    assert tree.depths[0].tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4], "the place each stands for"


def test_the_window_moves_by_a_step_and_by_the_emitted_tokens() -> None:
    row = _Row([5, 6, 7], 3, 3, 8, 0)
    row.levels = [[10, 11, 12], [20, 21, 22]]
    row.move([30, 31, 32], [9])
    assert row.levels == [[20, 21, 22], [30, 31, 32]]
    assert (20, 30) in row.pool[10] and (22, 32) in row.pool[12]
    row.move([40, 41, 42], [8, 8])
    assert [level[:2] for level in row.levels] == [[31, 32], [41, 42]]
    assert all(level[2] in row.prompt for level in row.levels), "filled up from the prompt"


def test_the_pool_keeps_the_latest_few() -> None:
    row = _Row([5], 1, 3, 2, 0)
    for last in (1, 2, 3, 2):
        row.note([9, 0, last])
    assert [*row.pool[9]] == [(0, 3), (0, 2)] and row.candidates(1, 5) == []
    row.text = [9]
    assert row.candidates(1, 5) == [(0, 2)] and row.candidates(2, 1) == [(0,), (0,)]


def test_probes_are_scored_and_never_tried() -> None:
    model = Decoder.random(CONFIG, seed=1, dtype=torch.float64)
    drafter = Lookahead(window=4, ngram=3, guesses=3)
    steps = list(decode(model, drafter, Exact(), [[4, 9, 7]], sampling=GREEDY, max_new_tokens=60))
    assert all(len(step.drafted) <= 3 * 2 for step in steps), "only candidates count as drafted"
    assert sum(step.accepted for step in steps) > 0


class Counting:
    """A target whose next token is the last one plus 1."""

    vocabulary, device, rollback, weight_bytes = 1000, torch.device("cpu"), True, 0

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self.last = torch.tensor([prompt[-1] for prompt in prompts])
        self.pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        return Prefill()

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        said = (torch.cat([self.last[:, None], draft.tokens], 1) + 1) % self.vocabulary
        logits = torch.nn.functional.one_hot(said, self.vocabulary).double()
        return Scores(draft, self.pipeline, torch.zeros(draft.rows), logits)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self.last = self.last + count

    def mark(self) -> object:
        return self.last

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Tensor)
        self.last = mark

    def end(self) -> None:
        self.last = torch.zeros(0)


def test_trajectories_predict_a_text_without_repetitions() -> None:
    """A text that no lookup can predict, but Jacobi passes can: each token follows from the one before."""
    taken = {}
    for drafter in (Lookahead(window=6, ngram=5), PromptLookup()):
        steps = list(decode(Counting(), drafter, Exact(), [[10, 18, 26, 34, 2]], sampling=GREEDY, max_new_tokens=40))
        assert [token for step in steps for token in step.emitted] == list(range(3, 43))
        taken[type(drafter)] = len(steps)
    assert taken[PromptLookup] >= 36 and taken[Lookahead] < 32


@pytest.mark.parametrize("options", [{"window": 0}, {"ngram": 1}, {"guesses": 0}, {"pool": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Lookahead(**options)
