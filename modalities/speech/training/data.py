"""Speech to learn from: sentences read aloud by the teacher, kept as mel frames, phonemes and how long each one took.

It lies in a folder of small files, each whole or not there at all, so that what was broken off goes on. Frames are kept
in 8 bits (their steps are a tenth of what a codec loses). Once there is a codec, all of it is a few megabytes of tokens
(`Tokens`), from which voices and heads can be trained without the teacher.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.core.assets import npz
from outrider.core.assets.npz import NpzError
from outrider.core.errors import OutriderError
from outrider.core.paths import cache_folder
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.mel import BINS, HOP, RATE, mel_frames
from outrider.speech.phonemes import ids, phonemes
from outrider.speech.training.sentences import KINDS, Sentence, learned

_PART = 32  # sentences a file
LOWEST, STEP = -11.6, 0.056  # of log-mel frames in 8 bits
_SPEED = (0.9, 1.12)  # how much slower or faster a sentence is read
HELD = 40  # one utterance in so many is for judging


class DataError(OutriderError):
    """Speech that can't be read."""


@dataclass(frozen=True)
class Utterance:
    """What was said, and how."""

    text: str
    kind: str
    phonemes: np.ndarray  # [P] ids
    lengths: np.ndarray  # [P] frames
    speed: float
    mel: np.ndarray  # [80, T] in 8 bits; nothing once it is tokens
    codes: np.ndarray  # [T / 2]; nothing before

    @property
    def seconds(self) -> float:
        return int(self.lengths.sum()) * HOP / RATE

    @property
    def held(self) -> bool:
        """Is it for judging? By its text, so that it stays so."""
        return random.Random(self.text).randrange(HELD) == 0

    @property
    def shares(self) -> np.ndarray:
        """[P] tokens that each phoneme takes."""
        ends = np.round(np.cumsum(self.lengths) / FRAMES).astype(np.int64)
        ends[-1] = int(self.lengths.sum()) // FRAMES
        return np.diff(np.minimum(ends, ends[-1]), prepend=0)


def home() -> Path:
    return cache_folder() / "training" / "speech" / "read"


def packed(mel: torch.Tensor) -> np.ndarray:
    """Log-mel frames in 8 bits."""
    return ((mel - LOWEST) / STEP).round().clamp(0, 255).to(torch.uint8).numpy()


def unpacked(mel: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mel).float() * STEP + LOWEST


# ---- having it read


def _processes(count: int) -> Executor:
    return ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def synthesise(
    folder: Path,
    minutes: float,
    *,
    files: int | None = None,
    say: Callable[[str], None] = print,
    readers: int = os.cpu_count() or 1,
    but: Container[str] = (),
    pool: Callable[[int], Executor] = _processes,
) -> float:
    """Have sentences read for so many minutes or until there are so many files, going on where the folder's files end
    -> seconds of speech in all. Sentences whose text is in `but` are there already. Readers work side by side, each a
    process with a teacher of its own. Ctrl-C ends it in good order."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    sentences = (one for one in learned() if one.text not in but)
    there = {path.name for path in folder.glob("*.npz")}
    left = (
        (path, part)
        for number in range(files or sys.maxsize)
        for part in [[next(sentences) for _ in range(_PART)]]
        for path in [folder / f"{number:05}.npz"]
        if path.name not in there
    )
    with pool(readers) as at:
        try:
            at_work = {at.submit(_written, *one) for one in islice(left, readers)}
            while at_work:
                done, at_work = wait(at_work, return_when=FIRST_COMPLETED)
                for one in done:
                    name, seconds = one.result()
                    say(f"{name}: {seconds / 60:.1f} minutes of speech more")
                if time.monotonic() < deadline:
                    at_work |= {at.submit(_written, *one) for one in islice(left, len(done))}
        except KeyboardInterrupt:
            at.shutdown(cancel_futures=True)
            say("broken off; the same command goes on from here")
    return sum(one.seconds for one in load(folder))


@cache
def _teacher() -> Any:
    """A process's own."""
    from outrider.speech.training.kokoro import Teacher

    return Teacher()


def _written(path: Path, part: Sequence[Sentence]) -> tuple[str, float]:
    spoken = list(_read(part, _teacher()))
    save(path, spoken)
    return path.name, sum(one.seconds for one in spoken)


def _read(part: Sequence[Sentence], teacher: Any) -> Iterator[Utterance]:
    for sentence in part:
        speed = round(random.Random(f"speed/{sentence.text}").uniform(*_SPEED), 3)
        try:
            said = phonemes(sentence.text)
            reading = teacher.read(said, speed)
        except OutriderError:  # what nobody can read out
            continue
        found = utterance(sentence, np.array(ids(said)), reading.sound, reading.lengths, speed)
        if found is not None:
            yield found


def utterance(
    sentence: Sentence, said: np.ndarray, sound: np.ndarray, lengths: np.ndarray, speed: float
) -> Utterance | None:
    """Frames of a sound, an even number; None where sound and phonemes can't belong together."""
    mel = mel_frames(torch.from_numpy(sound))
    count = mel.shape[1] // FRAMES * FRAMES
    lengths = np.diff(np.minimum(np.cumsum(lengths), count), prepend=0)
    lengths[-1] += count - lengths.sum()
    if len(lengths) != len(said) or lengths.max() > 255 or count < 20 or lengths[-1] < 0:
        return None
    return Utterance(sentence.text, sentence.kind, said, lengths, speed, packed(mel[:, :count]), np.zeros(0, np.int64))


# ---- files


def save(path: Path, utterances: Sequence[Utterance]) -> None:
    """One compressed file of plain arrays, whole or not at all."""
    about = [{"text": one.text, "kind": one.kind, "speed": one.speed} for one in utterances]
    counts = [[len(one.phonemes), one.mel.shape[1], len(one.codes)] for one in utterances]
    npz.save(
        path,
        about,
        counts=np.array(counts).reshape(-1, 3),
        phonemes=np.concatenate([np.zeros(0), *(one.phonemes for one in utterances)]).astype(np.uint8),
        lengths=np.concatenate([np.zeros(0), *(one.lengths for one in utterances)]).astype(np.uint8),
        mel=np.concatenate([np.zeros((BINS, 0), np.uint8), *(one.mel for one in utterances)], 1),
        codes=np.concatenate([np.zeros(0), *(one.codes for one in utterances)]).astype(np.uint16),
    )


def load_file(path: Path) -> list[Utterance]:
    try:
        about, held = npz.load(path, ("counts", "phonemes", "lengths", "mel", "codes"))
        counts = held["counts"].astype(np.int64)
        if len(about) != len(counts):
            raise ValueError(f"it tells of {len(about):,} sentences and holds {len(counts):,}")
        parts = [
            np.split(held[name], counts[:, column].cumsum()[:-1], axis)
            for name, column, axis in (("phonemes", 0, 0), ("lengths", 0, 0), ("mel", 1, 1), ("codes", 2, 0))
        ]
        return [
            Utterance(
                str(one["text"]),
                str(one["kind"]),
                said.astype(np.int64),
                lengths.astype(np.int64),
                float(one["speed"]),
                mel,
                codes.astype(np.int64),
            )
            for one, said, lengths, mel, codes in zip(about, *parts, strict=False)
        ]
    except (NpzError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} holds no speech to learn from: {str(error)[:200]}") from None


def load(*paths: Path) -> list[Utterance]:
    """The speech of files, or of all files of folders; of a sentence that was read twice, the first reading."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.npz")))]
    found = {one.text: one for file in reversed(files) for one in reversed(load_file(file))}
    if not found:
        raise DataError(f"there is no speech in {paths[-1]}; have some read first: `outrider train speech-data`")
    return list(reversed(found.values()))


def describe(utterances: Sequence[Utterance]) -> str:
    kinds = [f"{kind} {count:,}" for kind in KINDS if (count := sum(one.kind == kind for one in utterances))]
    hours = sum(one.seconds for one in utterances) / 3600
    held = sum(one.held for one in utterances)
    return f"{len(utterances):,} sentences ({', '.join(kinds)}), {hours:.2f} hours; {held:,} held out"


@torch.no_grad()
def encoded(utterances: Sequence[Utterance], codec: Codec) -> list[Utterance]:
    """The same as tokens, without their frames; those that are tokens already stay what they are."""
    found = []
    for one in utterances:
        if len(one.codes):
            found.append(one)
            continue
        codes = codec.encode(unpacked(one.mel)[None].to(codec.mean.device))[0].cpu().numpy()
        found.append(replace(one, mel=np.zeros((BINS, 0), np.uint8), codes=codes))
    return found
