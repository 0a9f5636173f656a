"""Speech under way: the loop's steps, and the sound that is settled by them.

A text of several utterances is spoken one after another, so that the first can be heard soon; of several texts, all
utterances are decoded side by side. Knows nothing of how targets and drafters are made.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.decode import decode
from outrider.core.device import peak_memory
from outrider.core.step_recorder import Record
from outrider.core.trace import Finish, Step, Trace, machine, versions
from outrider.speech.audio import Sound, Sounding
from outrider.speech.mel import RATE
from outrider.speech.options import Options
from outrider.speech.phonemes import ids, phonemes, pieces
from outrider.speech.voice import seconds

if TYPE_CHECKING:
    from outrider.speech.model import SpeechModel

_PAUSE = np.zeros(round(0.18 * RATE), np.float32)  # between two utterances
_MORE = 4  # tokens that an utterance may take longer than was planned


@dataclass(frozen=True)
class Spent:
    """Seconds, by what they were spent on."""

    model: float
    codec: float
    vocoder: float

    @property
    def total(self) -> float:
        return self.model + self.codec + self.vocoder


@dataclass(frozen=True)
class Result:
    """One text's outcome."""

    text: str
    phonemes: tuple[str, ...]  # of its utterances
    sound: Sound
    tokens: list[int]  # of all utterances, each up to its end
    starts: list[float]  # when each token begins to be heard, in seconds
    trace: Trace
    finish: Finish | None  # "end": every utterance came to its end; None: it was broken off
    spent: Spent
    first: float | None  # seconds until something could be heard; None: nothing was

    def save(self, path: str) -> None:
        """As a WAV file."""
        self.sound.save(path)

    @property
    def factor(self) -> Spent:
        """Seconds of work for a second of sound: the real-time factor."""
        whole = max(self.sound.seconds, 1e-9)
        return Spent(self.spent.model / whole, self.spent.codec / whole, self.spent.vocoder / whole)


@dataclass(frozen=True)
class Piece:
    """What one step brought: sound that can be played, if some was settled."""

    text: int  # which of the texts
    utterance: int  # which of its utterances
    step: Step
    samples: np.ndarray  # to be played after those before; often none
    rate: int = RATE


@dataclass(eq=False)
class _Utterance:
    """One utterance under way."""

    text: int
    place: int  # among its text's
    last: bool  # of its text's
    said: str
    way: Sounding
    tokens: list[int]
    sound: list[np.ndarray]
    finish: Finish | None = None


class Stream(Iterator[Piece]):
    """A generation under way; closing it ends it."""

    def __init__(self, model: SpeechModel, options: Options, texts: list[str]) -> None:
        self.texts = texts
        self._model, self._options, self._seed = model, options, options.drawn_seed()
        self._rule = model.rule(options)
        self._method = model.drafter_name(options)
        self._all = [
            _Utterance(
                number, place, place + 1 == len(parts), phonemes(part), Sounding(model.codec, model.vocoder), [], []
            )
            for number, parts in enumerate(map(pieces, texts))
            for place, part in enumerate(parts)
        ]
        self._steps: list[Step] = []
        self._first: dict[int, float] = {}
        self._began = time.perf_counter()
        self._pieces = self._run()

    def _run(self) -> Generator[Piece]:
        together = [self._all] if len(self.texts) > 1 else [[one] for one in self._all]
        before = 0
        for group in together:
            yield from self._speak(group, before)
            before += len(group)

    def _speak(self, group: list[_Utterance], before: int) -> Generator[Piece]:
        """Some utterances side by side."""
        model, options = self._model, self._options
        said = [ids(one.said) for one in group]
        script = model.voice.script(said, options.speed)
        target = model.target(script)
        rounds = 1 + max((step.index for step in self._steps), default=-1)
        steps = decode(
            target,
            model.drafter(options, said, script).made,
            self._rule.made,
            [[model.voice.end]] * len(group),
            sampling=options.sampling(model.voice.end),
            max_new_tokens=[length + _MORE for length in script.lengths],
            seed=[self._seed * 1_000_003 + one.place for one in group],
            record=Record(logprobs=options.logprobs),
        )
        try:
            for step in steps:
                one = group[step.row]
                known = replace(step, row=before + step.row, index=rounds + step.index)
                self._steps.append(known)
                one.tokens += step.emitted
                one.finish = step.finish
                heard = one.way.push([token for token in step.emitted if token != model.voice.end])
                if step.finish is not None:
                    heard.append(one.way.finish())
                    if not one.last:
                        heard.append(_PAUSE)
                samples = np.concatenate([np.zeros(0, np.float32), *heard])
                one.sound.append(samples)
                if len(samples):
                    self._first.setdefault(one.text, time.perf_counter() - self._began)
                yield Piece(one.text, one.place, known, samples)
        finally:
            if isinstance(steps, Generator):
                steps.close()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here."""
        self._pieces.close()

    @property
    def trace(self) -> Trace:
        """Of all utterances, a row each, as far as it has come."""
        return Trace(
            steps=tuple(self._steps),
            method=self._method,
            rule=self._rule.name,
            lossless=self._rule.made.lossless,
            seed=self._seed,
            options={**self._options.facts(), "model": self._model.name, "dtype": self._model.dtype},
            machine=machine(),
            versions=versions(),
            memory=peak_memory(),
        )

    @property
    def results(self) -> list[Result]:
        """One for each text, as far as it has come."""
        trace = self.trace
        return [self._result(number, trace) for number in range(len(self.texts))]

    def _result(self, number: int, trace: Trace) -> Result:
        rows = [row for row, one in enumerate(self._all) if one.text == number]
        mine = [self._all[row] for row in rows]
        own = replace(trace, steps=tuple(step for step in trace.steps if step.row in rows))
        starts, at = list[float](), 0.0
        for one in mine:
            starts += [at + seconds(place) for place in range(len(one.tokens))]
            at += sum(map(len, one.sound)) / RATE
        ends = {one.finish for one in mine}
        return Result(
            self.texts[number],
            tuple(one.said for one in mine),
            Sound(np.concatenate([np.zeros(0, np.float32), *(part for one in mine for part in one.sound)])),
            [token for one in mine for token in one.tokens],
            starts,
            own,
            None if None in ends else "limit" if "limit" in ends else "end",
            Spent(
                own.summary().seconds,
                sum(one.way.seconds["codec"] for one in mine),
                sum(one.way.seconds["vocoder"] for one in mine),
            ),
            self._first.get(number),
        )
