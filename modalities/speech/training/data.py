"""The speech training set: sentences read by the teacher, stored as mel frames with phonemes and their durations.

It is a folder of small files, each written atomically, so an interrupted run can continue. Frames are stored in 8 bits,
whose step is a tenth of a codec's error. A codec turns the set into a few megabytes of codes, which suffice to train
voices and draft heads.
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
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.mel import BINS, HOP, RATE, mel_frames
from outrider.speech.phonemes import ids, phonemes
from outrider.speech.training.sentences import KINDS, Sentence, training_sentences

_PER_FILE = 32  # sentences
LOWEST, STEP = -11.6, 0.056  # quantisation of log-mel frames to 8 bits
_SPEED = (0.9, 1.12)  # the slowest and fastest reading
_HELD_OUT_EVERY = 40  # about one utterance in 40 is for validation


class DataError(OutriderError):
    """A speech file cannot be read, or there is none."""


@dataclass(frozen=True)
class Utterance:
    """A sentence with its phonemes and their durations, as mel frames or as codes."""

    text: str
    kind: str
    phonemes: np.ndarray  # [P] ids
    lengths: np.ndarray  # [P] mel frames per phoneme
    speed: float
    mel: np.ndarray  # [80, T] in 8 bits; T is 0 after encoding
    codes: np.ndarray  # [T / 2]; empty before encoding

    @property
    def seconds(self) -> float:
        return int(self.lengths.sum()) * HOP / RATE

    @property
    def held_out(self) -> bool:
        """Whether the utterance is for validation; depends on its text alone."""
        return random.Random(self.text).randrange(_HELD_OUT_EVERY) == 0

    @property
    def durations(self) -> np.ndarray:
        """Tokens per phoneme [P]."""
        ends = np.round(np.cumsum(self.lengths) / FRAMES).astype(np.int64)
        ends[-1] = int(self.lengths.sum()) // FRAMES
        return np.diff(np.minimum(ends, ends[-1]), prepend=0)


def quantise(mel: torch.Tensor) -> np.ndarray:
    """Log-mel frames -> 8 bits."""
    return ((mel - LOWEST) / STEP).round().clamp(0, 255).to(torch.uint8).numpy()


def dequantise(mel: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mel).float() * STEP + LOWEST


# ---- synthesis


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
    workers: int = os.cpu_count() or 1,
    exclude: Container[str] = (),
    pool: Callable[[int], Executor] = _processes,
) -> float:
    """Read training sentences, except those in `exclude`, into new files of the folder for `minutes`, or until there
    are `files` files. Each worker is a process with its own teacher; Ctrl-C keeps finished files. Returns the seconds
    of speech in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    sentences = (sentence for sentence in training_sentences() if sentence.text not in exclude)
    existing = {path.name for path in folder.glob("*.npz")}
    remaining = (
        (path, part)
        for number in range(files or sys.maxsize)
        for part in [[next(sentences) for _ in range(_PER_FILE)]]
        for path in [folder / f"{number:05}.npz"]
        if path.name not in existing
    )
    with pool(workers) as executor:
        try:
            running = {executor.submit(_write, *job) for job in islice(remaining, workers)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name, seconds = future.result()
                    say(f"{name}: {seconds / 60:.1f} more minutes of speech")
                if time.monotonic() < deadline:
                    running |= {executor.submit(_write, *job) for job in islice(remaining, len(done))}
        except KeyboardInterrupt:
            executor.shutdown(cancel_futures=True)
            say("interrupted; run the same command again to continue")
    return sum(utterance.seconds for utterance in load(folder))


@cache
def _teacher() -> Any:
    """The worker's own teacher."""
    from outrider.speech.training.kokoro import Kokoro

    return Kokoro()


def _write(path: Path, sentences: Sequence[Sentence]) -> tuple[str, float]:
    utterances = list(_read(sentences, _teacher()))
    save(path, utterances)
    return path.name, sum(utterance.seconds for utterance in utterances)


def _read(sentences: Sequence[Sentence], teacher: Any) -> Iterator[Utterance]:
    for sentence in sentences:
        speed = round(random.Random(f"speed/{sentence.text}").uniform(*_SPEED), 3)
        try:
            symbols = phonemes(sentence.text)
            reading = teacher.read(symbols, speed)
        except OutriderError:  # the sentence has no phonemes or too many
            continue
        utterance = align(sentence, np.array(ids(symbols)), reading.sound, reading.lengths, speed)
        if utterance is not None:
            yield utterance


def align(
    sentence: Sentence, phoneme_ids: np.ndarray, sound: np.ndarray, lengths: np.ndarray, speed: float
) -> Utterance | None:
    """An utterance of an even number of mel frames, or None if the phonemes' lengths do not fit the sound."""
    mel = mel_frames(torch.from_numpy(sound))
    count = mel.shape[1] // FRAMES * FRAMES
    lengths = np.diff(np.minimum(np.cumsum(lengths), count), prepend=0)
    lengths[-1] += count - lengths.sum()
    if len(lengths) != len(phoneme_ids) or lengths.max() > 255 or count < 20 or lengths[-1] < 0:
        return None
    frames, no_codes = quantise(mel[:, :count]), np.zeros(0, np.int64)
    return Utterance(sentence.text, sentence.kind, phoneme_ids, lengths, speed, frames, no_codes)


# ---- files


def save(path: Path, utterances: Sequence[Utterance]) -> None:
    """Write one compressed file of plain arrays, atomically."""
    metadata = [{"text": each.text, "kind": each.kind, "speed": each.speed} for each in utterances]
    counts = [[len(each.phonemes), each.mel.shape[1], len(each.codes)] for each in utterances]
    npz.save(
        path,
        metadata,
        counts=np.array(counts).reshape(-1, 3),
        phonemes=np.concatenate([np.zeros(0), *(each.phonemes for each in utterances)]).astype(np.uint8),
        lengths=np.concatenate([np.zeros(0), *(each.lengths for each in utterances)]).astype(np.uint8),
        mel=np.concatenate([np.zeros((BINS, 0), np.uint8), *(each.mel for each in utterances)], 1),
        codes=np.concatenate([np.zeros(0), *(each.codes for each in utterances)]).astype(np.uint16),
    )


def load_file(path: Path) -> list[Utterance]:
    try:
        metadata, arrays = npz.load(path, ("counts", "phonemes", "lengths", "mel", "codes"))
        counts = arrays["counts"].astype(np.int64)
        if len(metadata) != len(counts):
            raise ValueError(f"it lists {len(metadata):,} sentences and has arrays for {len(counts):,}")
        parts = [
            np.split(arrays[name], counts[:, column].cumsum()[:-1], axis)
            for name, column, axis in (("phonemes", 0, 0), ("lengths", 0, 0), ("mel", 1, 1), ("codes", 2, 0))
        ]
        return [
            Utterance(
                str(entry["text"]),
                str(entry["kind"]),
                phoneme_ids.astype(np.int64),
                lengths.astype(np.int64),
                float(entry["speed"]),
                mel,
                codes.astype(np.int64),
            )
            for entry, phoneme_ids, lengths, mel, codes in zip(metadata, *parts, strict=False)
        ]
    except (NpzError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is not a speech training file: {str(error)[:200]}") from None


def load(*paths: Path) -> list[Utterance]:
    """The utterances of files and of folders' files; of repeated sentences the first."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.npz")))]
    by_text = {utterance.text: utterance for file in reversed(files) for utterance in reversed(load_file(file))}
    if not by_text:
        raise DataError(f"there is no speech in {paths[-1]}; make some first: `outrider train speech-data`")
    return list(reversed(by_text.values()))


def describe(utterances: Sequence[Utterance]) -> str:
    kinds = [f"{kind} {count:,}" for kind in KINDS if (count := sum(each.kind == kind for each in utterances))]
    hours = sum(utterance.seconds for utterance in utterances) / 3600
    held_out = sum(utterance.held_out for utterance in utterances)
    return f"{len(utterances):,} sentences ({', '.join(kinds)}), {hours:.2f} hours; {held_out:,} held out"


@torch.no_grad()
def encode(utterances: Sequence[Utterance], codec: Codec) -> list[Utterance]:
    """The utterances as codes, without mel frames. Utterances that have codes are returned as they are."""
    encoded = []
    for utterance in utterances:
        if not len(utterance.codes):
            codes = codec.encode(dequantise(utterance.mel)[None].to(codec.mean.device))[0].cpu().numpy()
            utterance = replace(utterance, mel=np.zeros((BINS, 0), np.uint8), codes=codes)
        encoded.append(utterance)
    return encoded
