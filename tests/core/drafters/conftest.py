"""A target that generates a given text, so that a drafter's gain can be counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores
from outrider.core.rules.exact import Exact
from outrider.core.trace import Step

GREEDY = Sampling(temperature=0)


class Script:
    """Says `texts`, one a row, while the drafted path agrees with them; off it, token 0. Behind the likeliest come the
    tokens after it in order of their ids, so that there are runners-up too."""

    rollback = True
    weight_bytes = 0

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int) -> None:
        self.texts, self.vocabulary, self.device = texts, vocabulary, torch.device("cpu")

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        self.at = [0] * len(prompts)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        return Prefill()

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        said = []
        for row, (parents, tokens) in enumerate(
            zip(draft.tree.parents.expand(draft.rows, -1).tolist(), draft.tokens.tolist(), strict=True)
        ):
            depth: list[int | None] = []
            for parent, token in zip(parents, tokens, strict=True):
                above = 0 if parent < 0 else depth[parent]
                right = above is not None and token == self.word(row, above)
                depth.append(above + 1 if right and above is not None else None)
            said.append([self.word(row, 0), *(0 if one is None else self.word(row, one) for one in depth)])
        order = (torch.arange(self.vocabulary) - torch.tensor(said)[..., None]) % self.vocabulary
        return Scores(draft, self.pipeline, self.lengths, -order.float())

    def word(self, row: int, ahead: int) -> int:
        place = self.at[row] + ahead
        return self.texts[row][place] if place < len(self.texts[row]) else 0

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self.at = [place + one for place, one in zip(self.at, count.tolist(), strict=True)]

    def mark(self) -> object:
        return list(self.at)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, list)
        self.at = mark

    def end(self) -> None:
        self.at = []


Say = Callable[..., list[list[Step]]]


@pytest.fixture
def say() -> Say:
    """Decode given texts after given prompts -> the steps of each row; checks that the output is the texts."""

    def run(
        drafter: Drafter,
        prompts: Prompts,
        texts: Sequence[Sequence[int]],
        vocabulary: int = 64,
        end: tuple[int, ...] = (),
    ) -> list[list[Step]]:
        found: list[list[Step]] = [[] for _ in prompts]
        limits = [len(text) for text in texts]
        sampling = Sampling(temperature=0, end=end)
        for step in decode(
            Script(texts, vocabulary), drafter, Exact(), prompts, sampling=sampling, max_new_tokens=limits
        ):
            found[step.row].append(step)
        for steps, text in zip(found, texts, strict=True):
            said = [token for step in steps for token in step.emitted]
            assert said == list(text)[: len(said)] and (end or len(said) == len(text))
        return found

    return run
