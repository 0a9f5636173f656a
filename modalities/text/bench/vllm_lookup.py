"""vLLM's prompt lookup on one's prompts: its passes are timed in vLLM, and its drafts replayed on the text it writes.

vLLM is started plainly and with drafts of two lengths, each in its own process. A check starts it twice more,
plainly and with what is advised, and decodes in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch

from outrider.core.advice.advise import Advice, advise
from outrider.core.advice.measure import RoundCosts
from outrider.core.advice.predict import Candidate, DraftCost, Machine, Prediction
from outrider.core.advice.replay import Attempt
from outrider.core.assets.hub_models import DTYPES
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.protocol import PLAIN
from outrider.text.bench.advice import Checked, Study
from outrider.text.bench.peers import PEERS, Model, Worker, python_of, working

_LENGTHS = (3, 8)  # tokens of a draft, at which passes are timed
_PROMPTS = 4  # on which they are
LONGEST_NGRAM = 3
_CHECKS = 2

Tokens = Sequence[int]


@dataclass(frozen=True)
class Fit:
    """Milliseconds of a round without a draft, and of a guess more."""

    without: float
    guess: float


class VllmLookup:
    """vLLM and its prompt lookup on the prompts of a study."""

    def __init__(self, study: Study, model: Model, say: Callable[[str], None] = lambda line: None) -> None:
        self.study, self.model, self.say = study, model, say
        self.prompts = [study.lm.encode(item.content) for item in study.items]
        self.peer = PEERS["vllm"].on(torch.device(study.lm.device).type)
        self.python = python_of(self.peer, say)

    @contextmanager
    def _engine(self, min_ngram: int = 0, length: int = 0) -> Iterator[Worker]:
        """vLLM with prompt lookup, or plainly if the length is 0."""
        mode = PROMPT_LOOKUP.name if length else PLAIN
        self.say(f"vLLM, {mode} {length or ''}".strip())
        peer = replace(self.peer, length=length or 1, max_ngram=LONGEST_NGRAM, min_ngram=min_ngram or 1)
        dtype = self.study.lm.dtype if self.study.lm.dtype in DTYPES else "bfloat16"
        threads, device = torch.get_num_threads(), str(self.study.lm.device)
        with working(peer, self.model, mode, threads, dtype, device, self.python) as (worker, _):
            worker.ask(self.prompts[0], 8)  # warms up
            yield worker

    def advice(self) -> Advice:
        """The shortest n-gram and the draft length to use, or none."""
        with self._engine() as plain:
            texts, speeds = zip(*(self._decoded(plain, ids) for ids in self.prompts), strict=True)
        plain_ms = 1e3 * sum(seconds for seconds, _ in speeds) / sum(rounds for _, rounds in speeds)
        fits = {length: self._fit(length, texts, plain_ms) for length in _LENGTHS}
        without = float(np.mean([fit.without for fit in fits.values()]))
        costs = {(1, 1): without} | {(1, length + 1): without + fit.guess * length for length, fit in fits.items()}
        machine = Machine(RoundCosts.of(costs))
        candidates = [
            self._candidate(texts, min_ngram, length, without / plain_ms)
            for min_ngram in range(1, LONGEST_NGRAM + 1)
            for length in range(1, self.study.longest + 1)
        ]
        return advise(machine, candidates)

    def _decoded(self, worker: Worker, ids: Tokens) -> tuple[list[int], tuple[float, int]]:
        """The text, and the seconds and the rounds after the prompt's."""
        answer = worker.ask(ids, self.study.tokens)
        return answer["tokens"], (answer["counts"]["seconds"], answer["counts"]["passes"] - 1)

    def _fit(self, length: int, texts: Sequence[Tokens], plain_ms: float) -> Fit:
        """Rounds timed on some prompts, where few n-grams are found, and on prompts that hold the answer, where most
        are. One plain round is added, which matters if every round had a draft."""
        rows, times = [(1, 0)], [plain_ms]
        with self._engine(LONGEST_NGRAM, length) as worker:
            for ids, text in list(zip(self.prompts, texts, strict=True))[:_PROMPTS]:
                for prompt in (list(ids), [*ids, *text, *ids]):
                    answer = worker.ask(prompt, self.study.tokens)["counts"]
                    rows.append((answer["passes"] - 1, answer["drafted"]))
                    times.append(1e3 * answer["seconds"])
        without, guess = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0]
        return Fit(float(without), max(float(guess), 0.0))

    def _candidate(self, texts: Sequence[Tokens], min_ngram: int, length: int, pace: float) -> Candidate:
        records = tuple(
            replayed(prompt, text, min_ngram, LONGEST_NGRAM, length)
            for prompt, text in zip(self.prompts, texts, strict=True)
        )
        options = {"min_ngram": min_ngram, "length": length}
        return Candidate(PROMPT_LOOKUP.name, records, DraftCost({}), options=options, pace=(pace,))

    def check(self, predicted: Prediction) -> Checked:
        """The prediction held against vLLM, in turns with plain decoding."""
        speeds = []
        shortest, length = ngram_and_length(predicted)
        with self._engine() as plain, self._engine(shortest, length) as drafting:
            for _ in range(_CHECKS):
                spent = {plain: 0.0, drafting: 0.0}
                written = {plain: 0, drafting: 0}
                for ids in self.prompts:
                    for worker in spent:
                        text, (seconds, _) = self._decoded(worker, ids)
                        spent[worker] += seconds
                        written[worker] += len(text) - 1
                speeds.append(written[drafting] / spent[drafting] * spent[plain] / written[plain])
        found = float(np.median(speeds))
        about = (predicted.speedup, predicted.low, predicted.high)
        return Checked("vLLM, ngram", length, *about, found, min(speeds), max(speeds))


def ngram_and_length(predicted: Prediction) -> tuple[int, int]:
    """The shortest n-gram and the draft length of a prediction."""
    options = predicted.candidate.options
    return int(str(options["min_ngram"])), int(str(options["length"]))


def replayed(prompt: Tokens, text: Tokens, min_ngram: int, max_ngram: int, length: int) -> tuple[Attempt, ...]:
    """The rounds after the prompt's in which vLLM's prompt lookup would have written this text: it drafts what followed
    the earliest occurrence of the longest n-gram that ends the text and has occurred before."""
    tokens, found = [*prompt, *text], dict[tuple[int, ...], int]()
    rounds, at, indexed = [], len(prompt) + 1, 0
    while at < len(tokens):
        for end in range(indexed + 1, at):
            for size in range(min_ngram, min(max_ngram, end) + 1):
                found.setdefault(tuple(tokens[end - size : end]), end)
        indexed = at - 1
        sizes = range(min(max_ngram, at), min_ngram - 1, -1)
        start = next((found[key] for size in sizes if (key := tuple(tokens[at - size : at])) in found), at)
        draft = tokens[start : min(start + length, at)]
        right = takewhile(lambda pair: pair[0] == pair[1], zip(draft, tokens[at:], strict=False))
        accepted = len(list(right))
        emitted = min(accepted + 1, len(tokens) - at)
        rounds.append(Attempt(len(draft), len(draft), accepted, emitted))
        at += emitted
    return tuple(rounds)
