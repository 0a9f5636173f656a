"""Models of transformers with a recurrent state: what is rejected leaves no trace in it, and no pass is added."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel, SampledTree
from outrider.core.engine.adapters.recurrent import _REREAD, RecurrentTarget, adapter
from outrider.core.errors import Incompatible
from outrider.core.methods import make_drafter, make_rule
from outrider.core.protocol import Drafter
from outrider.core.testing.cache_audit import emitted, paths, random_draft, random_verdict
from outrider.core.tree import Tree

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
import class_sweep

WORDS = class_sweep.WORDS
# a state alone, two kinds between layers of attention, and one within layers with a window
NAMES = ["rwkv", "lfm3", "olmo_hybrid", "inkling_text"]
PROMPTS = [[7, 21, 33, 21, 33, 8, 21], [5, 40, 11], [2]]
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def made(name: str) -> Any:
    model = class_sweep.model_of(name)
    if name == "inkling_text":
        model.config.sliding_window = 8  # shorter than the texts here
    return model


def fresh(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 3])
def test_audit(name: str, rows: int) -> None:
    rng, model = random.Random(f"{name}{rows}"), made(name)
    target = RecurrentTarget(model)
    texts = [list(prompt) * 3 for prompt in PROMPTS[:rows]]
    target.begin(texts, Sampling())
    mark, marked = target.mark(), [list(text) for text in texts]
    for step in range(6):
        if step == 3:
            target.rewind(mark)
            texts = marked
        draft, parents = random_draft(rng, rows, WORDS, 4)
        half = draft.size // 2
        part = Draft.guess(draft.tokens[:, :half], Tree(draft.tree.parents[:, :half]), draft.live[:, :half])
        pieces = [target.score(part), target.score(draft, half)] if rng.random() < 0.4 else [target.score(draft)]
        found = torch.cat([piece.logits() for piece in pieces], 1)
        for row, text in enumerate(texts):
            for path in [[], *paths(parents[row])]:
                wanted = fresh(model, [*text, *(int(draft.tokens[row, node]) for node in path)])
                torch.testing.assert_close(found[row, path[-1] + 1 if path else 0], wanted, atol=2e-3, rtol=0)
        verdict, count = random_verdict(rng, draft, parents, WORDS)
        target.keep(draft, verdict, count)
        texts = [[*text, *emitted(draft, verdict, row, int(count[row]))] for row, text in enumerate(texts)]


def drafters(name: str) -> dict[str, Drafter | None]:
    small = class_sweep.model_of(name, seed=1)
    return {
        "plain": None,
        "chain": DraftModel(RecurrentTarget(small), length=3),
        "tree": SampledTree(RecurrentTarget(small), tree=(-1, -1, 0)),
        "window": make_drafter("jacobi", window=4),
        "lookup": make_drafter("suffix"),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_p=0.9)], ids=["greedy", "sampled"])
def test_drafting_changes_no_token(name: str, sampling: Sampling) -> None:
    outputs = {}
    for drafter, drafts in drafters(name).items():
        rows: list[list[int]] = [[] for _ in PROMPTS]
        steps = decode(
            RecurrentTarget(made(name)),
            drafts,
            make_rule("gumbel-match"),
            PROMPTS,
            sampling=sampling,
            max_new_tokens=12,
            seed=[1, 2, 3],
        )
        for step in steps:
            rows[step.row] += step.emitted
        outputs[drafter] = rows
    assert {name: rows for name, rows in outputs.items() if rows != outputs["plain"]} == {}


def test_rejections_add_tokens_to_passes_but_hardly_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes = RecurrentTarget(made("rwkv")), list[int]()
    forward = RecurrentTarget._forward

    def counted(self: RecurrentTarget, cache: Any, ids: Any, start: int) -> Any:
        sizes.append(len(ids))
        return forward(self, cache, ids, start)

    monkeypatch.setattr(RecurrentTarget, "_forward", counted)
    steps = list(
        decode(
            target,
            DraftModel(adapter(class_sweep.model_of("gpt2")), length=3),  # another model, which is hardly ever right
            make_rule(),
            [PROMPTS[0]],
            sampling=Sampling(temperature=0),
            max_new_tokens=60,
        )
    )
    accepted = sum(step.accepted for step in steps)
    assert accepted < len(steps), "most drafts are rejected"
    assert max(sizes[1:]) <= _REREAD + 4
    assert len(sizes) - 1 <= len(steps) * (1 + 2 / _REREAD)


def test_states_at_the_taps() -> None:
    target = RecurrentTarget(made("olmo_hybrid"))
    prefill = target.begin(PROMPTS[:1], Sampling(), frozenset(target.taps))
    scores = target.score(Draft.empty(1))
    with torch.no_grad():
        out = made("olmo_hybrid")(torch.tensor(PROMPTS[:1]), output_hidden_states=True)
    for tap, states in zip(target.taps, out.hidden_states, strict=True):
        torch.testing.assert_close(prefill.hidden[tap], states[:, :-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(scores.hidden[tap][0, 0], states[0, -1], atol=1e-4, rtol=1e-4)


def test_a_class_that_reads_token_by_token_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"MambaForCausalLM reads one token per pass once it has a state"):
        adapter(made("mamba"))
