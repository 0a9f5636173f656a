"""Frames of several codebooks: the distribution of the tokens, enumerated, is the product of the books' distributions
along depth, whoever drafts; what mistakes a frame for one token is caught."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.parallel_decoding.jacobi import SPATIAL
from outrider.core.engine.adapters.frames import FrameStore, FrameTarget
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, Method
from outrider.core.protocol import Rule, Scores
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact, GumbelMatch, Token
from outrider.core.testing.conformance import (
    Case,
    SequenceDistribution,
    enumerate_output,
    random_draft_head,
    target_distribution,
    total_variation,
    trial_drafter,
)
from outrider.core.testing.table_target import TableTarget
from outrider.core.tree import Tree
from outrider.core.vocab_mask import RepeatingRanges, frame_tokens, frames
from tests.turns import takes_turn

CODES = 3
CONDITIONS = ([2], [1, 0])  # ids of the inner model that stand before each row
ROOTS = ([0], [1])  # in place of each condition's last


def depth(independent: bool, seed: int = 5) -> tuple[Any, Tensor]:
    """A small decoder along depth: from a state and the codes before, the state of the next book; and its rows."""
    made = torch.Generator().manual_seed(seed)
    heads = torch.randn(3, 8, CODES, generator=made, dtype=torch.float64)
    seen = torch.randn(3, CODES, 8, generator=made, dtype=torch.float64)

    def deeper(states: Tensor, codes: Tensor, count: Tensor) -> Tensor:
        x = states.double() * 0.5
        for book in range(0 if independent else codes.shape[1]):
            x = x + seen[book][codes[:, book]] * (count > book)[:, None]
        return x.tanh() * 1.5

    return deeper, heads.transpose(1, 2)


class Reading(TableTarget):
    """A table that reads frames: its contexts go by their codes, not by the numbers that they happen to have."""

    def __init__(self, store: FrameStore, **given: Any) -> None:
        super().__init__(4096, **given)
        self.store = store

    def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
        return super().begin([self.renamed(torch.tensor(one)).tolist() for one in prompts], sampling, needs)

    def renamed(self, ids: Tensor) -> Tensor:
        codes = self.store.of(ids)
        names = 100 + (codes * CODES ** torch.arange(codes.shape[-1])).sum(-1)
        return torch.where(ids < self.store.conditions, ids, names)

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        return super().score(Draft.guess(self.renamed(draft.tokens), draft.tree, draft.live), since)

    def logits(self, contexts: Tensor, blur: float | None = None) -> Tensor:
        """None: only its states are read."""
        return torch.zeros(*contexts.shape, 0)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        seen = Draft.guess(self.renamed(draft.tokens), draft.tree, draft.live)
        parts = {
            name: getattr(verdict, name) for name in ("path", "accepted", "resampled", "tried", "chance", "p", "q")
        }
        super().keep(seen, Verdict(**parts, token=self.renamed(verdict.token[:, None])[:, 0]), count)


def framed(books: int, independent: bool = False, blur: float = 0.0, guidance: float = 1.0) -> FrameTarget:
    store = FrameStore(len(CONDITIONS) + 1, books)
    inner = Reading(store, seed=1, blur=blur)
    deeper, heads = depth(independent, seed=5 + int(blur > 0))
    return FrameTarget(inner, store, books, CODES, deeper, heads[:books])


class Many(Guided):
    """Rows by their roots, with as many frames under way as asked for."""

    def __init__(self, inner: FrameTarget, guidance: float = 1.0) -> None:
        super().__init__(
            inner,
            CONDITIONS,
            CONDITIONS,
            guidance,
            skip_first=True,
            allowed=RepeatingRanges.codebooks(inner.books, CODES),
        )
        self.free_of = {1.0: CONDITIONS}

    def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
        first = self.vocabulary
        self.conditions = [[first + one for one in CONDITIONS[prompt[0]]] for prompt in prompts]
        self.unconditional = [[first + 2] * len(one) for one in self.conditions]
        return super().begin(prompts, sampling, needs)


def target(books: int, independent: bool = False, blur: float = 0.0, guidance: float = 1.0) -> Many:
    return Many(framed(books, independent, blur), guidance)


def by_hand(books: int, independent: bool, row: int, length: int) -> SequenceDistribution:
    """The distribution of so many tokens of a row: frame by frame, book by book, with no tree, no cache and no frame
    held."""
    (deeper, heads), found = depth(independent), {}
    store = FrameStore(len(CONDITIONS) + 1, books)
    table = Reading(store, seed=1)
    for codes in itertools.product(range(CODES), repeat=length):
        chance = 1.0
        for place in range(length):
            frame, book = divmod(place, books)
            store.codes = store.codes[:0]
            ids = [store.add(torch.tensor(codes[at * books : (at + 1) * books])).item() for at in range(frame)]
            table.begin([[*CONDITIONS[row], *ids]], Sampling(), frozenset({"last"}))
            state = table.score(Draft.empty(1)).hidden["last"][:, 0]
            part = torch.zeros(1, books - 1, dtype=torch.long)
            part[0, :book] = torch.tensor(codes[frame * books : place], dtype=torch.long)
            logits = deeper(state, part, torch.tensor([book])) @ heads[book].T
            chance *= float(logits.softmax(-1)[0, codes[place]])
        tokens = tuple(place % books * CODES + code for place, code in enumerate(codes))
        found[tokens] = found.get(tokens, 0.0) + chance
    return found


@pytest.mark.parametrize(
    ("books", "independent", "length"),
    [(2, False, 3), (2, True, 3), pytest.param(2, False, 5, marks=pytest.mark.slow), (3, False, 4)],
)
def test_the_law_is_the_product_along_depth(books: int, independent: bool, length: int, measured: Any) -> None:
    for row, root in enumerate(ROOTS):
        found = target_distribution(target(books, independent), root, Sampling(), length)
        off = total_variation(found, by_hand(books, independent, row, length))
        measured(
            "frames: total variation of the target's distribution from the product", name=f"{books} books", value=off
        )
        assert off < 1e-12
    assert len(found) == CODES**length


TRIED = (
    "draft-model",
    "sampled-tree",
    "top-k-tree",
    "jacobi",
    "prompt-lookup",
    "suffix",
    "token-recycling",
    "specinfer",
    "dynamic-tree",
    "specexec",
    "cs-drafting",
)


def wide(name: str, options: Mapping[str, Any]) -> bool:
    """Too many ways to go to enumerate three books, or row by row: trees of draws, windows that are drawn anew."""
    return name in ("sampled-tree", "specinfer") or options.get("filler") in SPATIAL


def settings() -> list[Any]:
    found = []
    for name in TRIED:
        for number, options in enumerate(DRAFTERS[name].test_options):
            for books, independent in ((2, False), (2, True), (3, False)):
                if (books == 3 or independent) and wide(name, options):
                    continue
                quick = (
                    name in ("draft-model", "top-k-tree", "dynamic-tree", "specexec", "cs-drafting")
                    and number == 0
                    and (books, independent) == (2, False)
                )
                marks = [] if quick else [pytest.mark.slow]
                label = f"{name}{number}-{books}-{independent}"
                if not quick and not takes_turn(label):
                    continue
                found.append(pytest.param(DRAFTERS[name], options, books, independent, id=label, marks=marks))
    return found


def distance(
    books: int,
    independent: bool,
    rule: Rule,
    drafter: Any,
    make: Any = target,
    guidance: float = 1.0,
    together: bool = True,
) -> float:
    limits = (books + 1, books)
    case = Case(
        target=partial(make, books, independent, guidance=guidance),
        drafter=drafter,
        rule=rule,
        prompts=ROOTS,
        limits=limits,
    )
    distributions = enumerate_output(case, together=together)
    wanted = [
        target_distribution(target(books, independent, guidance=guidance), root, Sampling(), limits[row])
        for row, root in enumerate(ROOTS)
    ]
    return max(total_variation(one, other) for one, other in zip(distributions, wanted, strict=True))


@pytest.mark.parametrize(("method", "options", "books", "independent"), settings())
def test_whoever_drafts_the_law_stays(
    method: Method, options: Mapping[str, Any], books: int, independent: bool, measured: Any
) -> None:
    model = partial(target, books, independent, blur=0.4)
    alike = "columns" not in options and not independent  # else rows of a batch guess in other steps
    off = distance(books, independent, Exact(), partial(trial_drafter, method, options, model), together=alike)
    measured("frames: total variation, exact rule", name=method.name, value=off)
    assert off < 1e-12


def test_under_guidance_too() -> None:
    model = partial(target, 2, False, blur=0.4, guidance=2.0)
    drafter = partial(trial_drafter, DRAFTERS["draft-model"], {"length": 2}, model)
    assert distance(2, False, Token(), drafter, guidance=2.0) < 1e-12


# ---- draft heads


def test_one_output_layer_has_the_distributions_of_all_codebooks() -> None:
    """From the states of a prompt and from those of a draft, which are the same."""
    frames_of = framed(2)
    codes = frame_tokens([[0, 2], [1, 1], [2, 0]], CODES)[:5]
    prompt = [frames_of.vocabulary + 1, frames_of.vocabulary, *codes]
    read = frames_of.begin([[*prompt, 0], prompt[:4]], Sampling(), frozenset({"last"})).hidden["last"]
    frames_of.begin([prompt[:2]], Sampling(), frozenset({"last"}))
    chain = torch.tensor([codes])
    scores = frames_of.score(Draft.guess(chain, Tree.chain(len(codes)), chain >= 0))
    drafted = scores.hidden["last"][0]
    torch.testing.assert_close(read[0, 1:], drafted)
    torch.testing.assert_close(read[1, :3], read[0, :3])
    wanted, inside = scores.logits()[0], torch.arange(6) // CODES == (torch.arange(6) % 2)[:, None]
    torch.testing.assert_close(
        frames_of.network.logits(drafted).log_softmax(-1)[inside],
        wanted.masked_fill(~inside, -torch.inf).log_softmax(-1)[inside],
        atol=1e-9,
        rtol=0,
    )
    with pytest.raises(InvalidOption, match="unknown hidden tap"):
        frames_of.begin([prompt], Sampling(), frozenset({"layer.0"}))


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3"])
def test_whatever_head_drafts_the_law_stays(name: str, measured: Any) -> None:
    taps = {"taps": ("last",)} if name == "eagle3" else {}
    head = random_draft_head(DRAFTERS[name], framed(2), vocabulary=0, **taps)
    off = distance(2, False, Exact(), partial(DRAFTERS[name].make, head))
    measured("frames: total variation, exact rule", name=name, value=off)
    assert off < 1e-12


# ---- negative controls


class WholeFrames:
    """Takes a frame for one token: if its first book is accepted, so is the rest of it."""

    lossless = True

    def __init__(self, books: int) -> None:
        self.books = books

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        from outrider.core.rules.acceptance import strict
        from outrider.core.rules.rejection import rejection

        def accept(distribution: Any, left: Tensor, q: Tensor, depth: Tensor) -> Tensor:
            return torch.where(depth % self.books == 0, strict(left, q), 1)

        return rejection(draft, scores, rng, accept)


class Forgetful(FrameTarget):
    """Forgets what the frame under way holds."""

    def _set_incomplete(self, parts: list[list[int]]) -> None:
        super()._set_incomplete([[0] * len(one) for one in parts])


def test_a_frame_taken_for_one_token_is_caught(measured: Any) -> None:
    drafter = partial(trial_drafter, DRAFTERS["draft-model"], {"length": 2}, partial(target, 2, False, blur=0.4))
    off = distance(2, False, WholeFrames(2), drafter)
    measured("frames: negative controls, which must differ", name="a frame taken for one token", value=off)
    assert off > 0.01


def test_a_frame_forgotten_is_caught(measured: Any) -> None:
    def broken(books: int, independent: bool, guidance: float = 1.0) -> Many:
        store = FrameStore(len(CONDITIONS) + 1, books)
        deeper, heads = depth(independent)
        return Many(Forgetful(Reading(store, seed=1), store, books, CODES, deeper, heads[:books]), guidance)

    drafter = partial(trial_drafter, DRAFTERS["draft-model"], {"length": 2}, partial(target, 2, False, blur=0.4))
    off = distance(2, False, Exact(), drafter, broken)
    measured("frames: negative controls, which must differ", name="a frame under way forgotten", value=off)
    assert off > 0.01


# ---- what the loop sees


def run(drafter: Any, books: int, seeds: Sequence[int], limit: int = 17) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in ROOTS]
    for step in decode(target(books), drafter, GumbelMatch(), ROOTS, max_new_tokens=limit, seed=seeds):
        out[step.row] += step.emitted
    return out


@pytest.mark.parametrize("books", [2, 3])
@pytest.mark.parametrize(
    "name", ["draft-model", "top-k-tree", "jacobi", "suffix", "dynamic-tree", "specexec", "cs-drafting", "predrafted"]
)
def test_the_same_seed_says_the_same(name: str, books: int) -> None:
    method = DRAFTERS[name]
    plain = run(None, books, [3, 4])
    assert all(token // CODES == place % books for row in plain for place, token in enumerate(row))
    drafter = trial_drafter(method, method.test_options[0], partial(target, books, blur=0.3))
    assert run(drafter, books, [3, 4]) == plain


def test_books_within_a_frame_cost_no_pass_of_the_model() -> None:
    whole = framed(3)
    passes: list[int] = []
    score = whole.inner.score
    whole.inner.score = lambda draft, since=None: passes.append(draft.size) or score(draft, since)  # type: ignore
    list(decode(Many(whole), None, GumbelMatch(), [[0]], max_new_tokens=12, seed=1))
    assert len(passes) == 4


def test_frames_and_tokens() -> None:
    codes = [[0, 2, 1], [1, 1, 0]]
    tokens = frame_tokens(codes, 3)
    assert tokens == [0, 5, 7, 1, 4, 6]
    assert frames(tokens, 3, 3) == codes and frames(tokens[:5], 3, 3) == codes[:1]


def test_empty_ranges_are_refused() -> None:
    for make in (
        lambda: RepeatingRanges(()),
        lambda: RepeatingRanges(((2, 2),)),
        lambda: RepeatingRanges(((-1, 3),)),
        lambda: RepeatingRanges.codebooks(0, 4),
        lambda: RepeatingRanges.codebooks(2, 0),
    ):
        with pytest.raises(InvalidOption):
            make()
    assert len(RepeatingRanges.codebooks(3, 4)) == 3 and RepeatingRanges.raster(2, 5).ranges == ((0, 5), (0, 5), (5, 6))
