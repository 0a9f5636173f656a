"""Streams of speech: the steps of the decoding loop, and the sound that becomes available with each.

The utterances of a single text are decoded one after another, so that sound starts early; those of several texts are
decoded as one batch. Independent of how targets and drafters are constructed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.async_stream import pieces
from outrider.core.decode import decode
from outrider.core.step_recorder import Record
from outrider.core.trace import Finish, FinishReason, Step, Trace, conditions
from outrider.speech.audio import Sound, SoundStream
from outrider.speech.mel import RATE
from outrider.speech.options import Options
from outrider.speech.phonemes import ids, phonemes, split_utterances
from outrider.speech.voice import seconds

if TYPE_CHECKING:
    from outrider.speech.model import SpeechModel

_PAUSE = np.zeros(round(0.18 * RATE), np.float32)  # between two utterances
_MARGIN = 4  # tokens that an utterance may exceed its predicted length by


@dataclass(frozen=True)
class Timing:
    """Seconds by component."""

    model: float
    codec: float
    vocoder: float

    @property
    def total(self) -> float:
        return self.model + self.codec + self.vocoder


@dataclass(frozen=True)
class Result:
    """The speech of one text."""

    text: str
    phonemes: tuple[str, ...]  # one string per utterance
    sound: Sound
    tokens: list[int]  # of all utterances, end tokens included
    starts: list[float]  # of each token, in seconds of sound
    trace: Trace
    finish_reason: FinishReason | None  # "stop": every utterance ended by itself; None: the stream was closed early
    timing: Timing
    time_to_first_sound: float | None  # seconds; None: there was none

    def __repr__(self) -> str:
        return f"Result({self.text!r:.60}, {self.sound.seconds:.1f} s, {len(self.tokens)} tokens, {self.trace.method})"

    def save(self, path: str) -> None:
        """Write a WAV file."""
        self.sound.save(path)

    @property
    def real_time_factor(self) -> Timing:
        """Seconds of computation per second of sound."""
        seconds = max(self.sound.seconds, 1e-9)
        return Timing(self.timing.model / seconds, self.timing.codec / seconds, self.timing.vocoder / seconds)


@dataclass(frozen=True)
class Piece:
    """One step of the loop, and the sound that became available with it."""

    text: int  # index of the text
    utterance: int  # index among the text's utterances
    step: Step
    samples: np.ndarray  # continues the text's earlier samples; often empty
    sample_rate: int = RATE


@dataclass(eq=False)
class _Utterance:
    """The state of one utterance."""

    text: int
    index: int  # among the text's utterances
    last: bool  # whether it is the text's last one
    phonemes: str
    stream: SoundStream
    tokens: list[int]
    sound: list[np.ndarray]
    finish: Finish | None = None


class Stream(Iterator[Piece]):
    """An iterator over the pieces of a running generation; `close` stops it."""

    def __init__(self, model: SpeechModel, options: Options, texts: list[str]) -> None:
        self.texts = texts
        self._model, self._options, self._seed = model, options, options.drawn_seed()
        self._rule = model.rule(options)
        self._method = model.drafter_name(options)
        self._utterances = [
            _Utterance(
                text, index, index + 1 == len(parts), phonemes(part), SoundStream(model.codec, model.vocoder), [], []
            )
            for text, parts in enumerate(map(split_utterances, texts))
            for index, part in enumerate(parts)
        ]
        self._steps: list[Step] = []
        self._weight_bytes = 0
        self._first: dict[int, float] = {}
        self._began = time.perf_counter()
        self._pieces = self._run()

    def _run(self) -> Generator[Piece]:
        batches = [self._utterances] if len(self.texts) > 1 else [[utterance] for utterance in self._utterances]
        first_row = 0
        for batch in batches:
            yield from self._decode(batch, first_row)
            first_row += len(batch)

    def _decode(self, batch: list[_Utterance], first_row: int) -> Generator[Piece]:
        model, options = self._model, self._options
        phoneme_ids = [ids(utterance.phonemes) for utterance in batch]
        script = model.voice.script(phoneme_ids, options.speed)
        target = model.target(script)
        self._weight_bytes = target.weight_bytes
        first_index = 1 + max((step.index for step in self._steps), default=-1)
        steps = decode(
            target,
            model.drafter(options, phoneme_ids, script).made,
            self._rule.made,
            [[model.voice.end]] * len(batch),
            sampling=options.sampling(model.voice.end),
            max_new_tokens=[length + _MARGIN for length in script.lengths],
            seed=[self._seed * 1_000_003 + utterance.index for utterance in batch],
            record=Record(logprobs=options.logprobs),
        )
        try:
            for step in steps:
                utterance = batch[step.row]
                renumbered = replace(step, row=first_row + step.row, index=first_index + step.index)
                self._steps.append(renumbered)
                utterance.tokens += step.emitted
                utterance.finish = step.finish
                chunks = utterance.stream.push([token for token in step.emitted if token != model.voice.end])
                if step.finish is not None:
                    chunks.append(utterance.stream.finish())
                    if not utterance.last:
                        chunks.append(_PAUSE)
                samples = np.concatenate([np.zeros(0, np.float32), *chunks])
                utterance.sound.append(samples)
                if len(samples):
                    self._first.setdefault(utterance.text, time.perf_counter() - self._began)
                yield Piece(utterance.text, utterance.index, renumbered, samples)
        finally:
            if isinstance(steps, Generator):
                steps.close()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the generation."""
        self._pieces.close()

    def __aiter__(self) -> AsyncGenerator[Piece, None]:
        return pieces(self)

    @property
    def trace(self) -> Trace:
        """The trace so far, with one row per utterance."""
        return Trace(
            steps=tuple(self._steps),
            method=self._method,
            rule=self._rule.name,
            lossless=self._rule.made.lossless,
            seed=self._seed,
            options={**self._options.facts(), "model": self._model.name, "dtype": self._model.dtype},
            **conditions(self._weight_bytes),
        )

    @property
    def results(self) -> list[Result]:
        """The results so far, one per text."""
        trace = self.trace
        return [self._result(text, trace) for text in range(len(self.texts))]

    def _result(self, text: int, trace: Trace) -> Result:
        rows = [row for row, utterance in enumerate(self._utterances) if utterance.text == text]
        utterances = [self._utterances[row] for row in rows]
        own_trace = replace(trace, steps=tuple(step for step in trace.steps if step.row in rows))
        starts, offset = list[float](), 0.0
        for utterance in utterances:
            starts += [offset + seconds(token) for token in range(len(utterance.tokens))]
            offset += sum(map(len, utterance.sound)) / RATE
        chunks = [chunk for utterance in utterances for chunk in utterance.sound]
        finishes = {utterance.finish for utterance in utterances}
        return Result(
            self.texts[text],
            tuple(utterance.phonemes for utterance in utterances),
            Sound(np.concatenate([np.zeros(0, np.float32), *chunks])),
            [token for utterance in utterances for token in utterance.tokens],
            starts,
            own_trace,
            None if None in finishes else "length" if "limit" in finishes else "stop",
            Timing(
                own_trace.summary().seconds,
                sum(utterance.stream.seconds["codec"] for utterance in utterances),
                sum(utterance.stream.seconds["vocoder"] for utterance in utterances),
            ),
            self._first.get(text),
        )
