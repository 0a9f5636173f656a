"""Benchmark of drafters and acceptance rules on speech: speed, and the quality of relaxed rules.

Contenders speak the same sentences with the same seeds in turns; a contender's time is the token model's, without codec
and vocoder. Quality is measured on a ladder: the teacher's reading, the same through the codec, plain decoding, and
each setting. Intervals are bootstraps over sentences, and differences from plain decoding are paired. Independent of
how speech is synthesised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.core.bench.runner import PLAIN, SCHEMA, Bench, Contender, Item, Outcome, Run, Same, pooled, row
from outrider.core.bench.settings import Setting
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.trace import machine, versions
from outrider.core.tree import Tree
from outrider.speech.audio import Sound
from outrider.speech.evaluation.metrics import Rating, SpeechMetrics, compare
from outrider.speech.model import SpeechModel
from outrider.speech.options import Options
from outrider.speech.phonemes import ids, phonemes, split_utterances
from outrider.speech.stream import Result
from outrider.speech.training.sentences import KINDS, held_out

_RESAMPLES = 2000  # of the bootstrap
TEACHER, CODEC = "teacher", "codec"
Teacher = Callable[[str], Sound]  # reads a text aloud


def sentences(count: int) -> list[Item]:
    """Held-out sentences of all kinds in rotation."""
    by_kind = [held_out(kind, -(-count // len(KINDS))) for kind in KINDS]
    chosen = [sentence for group in zip(*by_kind, strict=True) for sentence in group][:count]
    return [Item(str(index), sentence.kind, sentence.text) for index, sentence in enumerate(chosen)]


@dataclass
class SpeechBench:
    """The contenders for given settings. The first result of each contender and sentence is kept for quality
    metrics."""

    sp: SpeechModel
    settings: Sequence[Setting]
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of every generation, such as temperature and speed
    results: dict[tuple[str, str], Result] = field(default_factory=dict)  # by setting's name and item id

    def contenders(self) -> list[Contender]:
        """Plain decoding, then one contender for each setting."""
        return [self._contender(setting) for setting in (Setting(), *self.settings)]

    def _contender(self, setting: Setting) -> Contender:
        options = {
            **self.options,
            "drafter": setting.drafter,
            "rule": setting.rule,
            "drafter_options": setting.drafter_options,
            "rule_options": setting.rule_options,
        }
        rule = self.sp.rule(Options.of(options)).made

        def run(item: Item) -> Outcome:
            result = self.sp.generate(item.content, **options, seed=self.seed + int(item.id))
            self.results.setdefault((setting.name, item.id), result)
            return Outcome(tuple(result.tokens), result.timing.model, result.trace.steps, result.trace.memory or 0)

        return Contender(setting.name, run, rule=setting.rule, lossless=rule.lossless)


# ---- entropy of the target's distributions


@torch.no_grad()
def entropy(sp: SpeechModel, result: Result, speed: float = 1.0) -> np.ndarray:
    """The entropy in nats of the voice's distribution (temperature 1, no truncation) at each token of a result, end
    tokens included."""
    chunks = []
    rows = sorted({step.row for step in result.trace.steps})
    for row_, utterance in zip(rows, result.phonemes, strict=False):
        tokens = [token for step in result.trace.steps if step.row == row_ for token in step.emitted]
        target = sp.target(sp.voice.script([ids(utterance)], speed))
        try:
            target.begin([[sp.voice.end]], Sampling())
            codes = torch.tensor([tokens], device=target.device)
            chain = Tree.chain(codes.shape[1], target.device)
            scores = target.score(Draft.guess(codes, chain, torch.ones_like(codes, dtype=torch.bool)))
            logs = scores.logits()[0, :-1].float().log_softmax(-1)
            chunks.append(-(logs.exp() * logs).sum(-1).cpu().numpy())
        finally:
            target.end()
    return np.concatenate([np.zeros(0, np.float32), *chunks])


# ---- quality


@dataclass(frozen=True)
class Quality:
    """The metrics of one sentence, spoken once."""

    words: int
    word_errors: int
    letters: int
    letter_errors: int
    signal: float
    background: float
    overall: float
    speaker_similarity: float  # to the reference: the teacher, or plain decoding without one
    duration_ratio: float  # to the reference
    missing_end: bool


_UNRATED = Rating(math.nan, math.nan, math.nan)


def _rated(opinion: float) -> tuple[float, float]:
    return (0, 0) if math.isnan(opinion) else (opinion, 1)


# Each measure is a ratio of sums over sentences: the numerator and the denominator of one sentence.
MEASURES: dict[str, Callable[[Quality], tuple[float, float]]] = {
    "word_error": lambda quality: (quality.word_errors, quality.words),
    "letter_error": lambda quality: (quality.letter_errors, quality.letters),
    "dnsmos": lambda quality: _rated(quality.overall),
    "dnsmos_signal": lambda quality: _rated(quality.signal),
    "dnsmos_background": lambda quality: _rated(quality.background),
    "speaker_similarity": lambda quality: (quality.speaker_similarity, 1),
    "duration_ratio": lambda quality: (quality.duration_ratio, 1),
    "missing_end": lambda quality: (quality.missing_end, 1),
}


def sentence_quality(
    metrics: SpeechMetrics, text: str, sound: Sound, reference: Sound, missing_end: bool = False, *, rate: bool = True
) -> Quality:
    """The metrics of a sound that should say `text`; `rate` includes DNSMOS."""
    if not len(sound.samples):  # every word is missing
        errors, rating, similarity = compare("", text), Rating(1.0, 1.0, 1.0), 0.0
    else:
        errors, rating = metrics.errors(sound, text), metrics.rating(sound) if rate else _UNRATED
        similarity = metrics.similarity(sound, reference)
    return Quality(
        errors.words,
        errors.word_errors,
        errors.letters,
        errors.letter_errors,
        rating.signal,
        rating.background,
        rating.overall,
        similarity,
        sound.seconds / max(reference.seconds, 1e-9),
        missing_end,
    )


def ladder_sounds(speech: SpeechBench, item: Item, teacher: Teacher | None) -> dict[str, tuple[Sound, bool]]:
    """The sounds of an item by rung, each with whether its end is missing: the teacher and the codec if there is a
    teacher, plain decoding, and each setting. Empty if the bench was stopped before all had spoken the item."""
    names = [PLAIN, *(setting.name for setting in speech.settings)]
    results = {name: speech.results[name, item.id] for name in names if (name, item.id) in speech.results}
    if len(results) < len(names):
        return {}
    sounds = {name: (result.sound, result.finish_reason != "stop") for name, result in results.items()}
    if teacher is None:
        return sounds
    reading = teacher(item.content)
    return {TEACHER: (reading, False), CODEC: (speech.sp.resynthesised(reading), False), **sounds}


def ladder(
    speech: SpeechBench,
    items: Sequence[Item],
    metrics: SpeechMetrics,
    teacher: Teacher | None,
    progress: Callable[[str], Any] = lambda name: None,
    rated: int | None = None,
) -> dict[str, list[Quality]]:
    """The quality of each rung on the same sentences, with DNSMOS for the first `rated` (None: all). Sentences run in
    parallel, each in a single-threaded worker, which is faster than multi-threaded metrics one after another."""
    threads = torch.get_num_threads()
    metrics.load()

    def item_quality(index: int, item: Item) -> dict[str, Quality]:
        torch.set_num_threads(1)  # of this worker
        sounds, by_rung = ladder_sounds(speech, item, teacher), dict[str, Quality]()
        for name, (sound, missing_end) in sounds.items():
            reference, _ = sounds.get(TEACHER, sounds[PLAIN])
            rate = rated is None or index < rated
            by_rung[name] = sentence_quality(metrics, item.content, sound, reference, missing_end, rate=rate)
            progress(name)
        return by_rung

    rungs: dict[str, list[Quality]] = {}
    try:
        with ThreadPoolExecutor(threads) as pool:
            for by_rung in pool.map(item_quality, range(len(items)), items):
                for name, quality in by_rung.items():
                    rungs.setdefault(name, []).append(quality)
    finally:
        torch.set_num_threads(threads)
    return rungs


def load_teacher(threads: int = 1) -> Teacher:
    """The voice that our voice was trained on; it reads each utterance of a text separately, as ours does."""
    from outrider.speech.training.kokoro import Kokoro

    kokoro = Kokoro(threads=threads)
    return lambda text: Sound(np.concatenate([kokoro.read(phonemes(part)).sound for part in split_utterances(text)]))


def summarise(qualities: Sequence[Quality], plain: Sequence[Quality], seed: int = 0) -> dict[str, dict[str, float]]:
    """Each measure's value and its paired difference ("apart") from plain decoding's, with 95 % intervals."""
    rng = np.random.default_rng(seed)
    resamples = rng.integers(len(qualities), size=(_RESAMPLES, len(qualities)))
    summary = {}
    for name, fraction in MEASURES.items():
        above, below = np.array([fraction(quality) for quality in qualities], float).T
        plain_above, plain_below = np.array([fraction(quality) for quality in plain], float).T
        with np.errstate(invalid="ignore"):  # a resample may have no rated sentence
            values = above[resamples].sum(1) / below[resamples].sum(1)
            differences = values - plain_above[resamples].sum(1) / plain_below[resamples].sum(1)
        value = above.sum() / below.sum()
        difference = value - plain_above.sum() / plain_below.sum()
        low, high = np.nanquantile(values, (0.025, 0.975))
        apart_low, apart_high = np.nanquantile(differences, (0.025, 0.975))
        figures = {"value": value, "low": low, "high": high}
        figures |= {"apart": difference, "apart_low": apart_low, "apart_high": apart_high}
        summary[name] = {key: float(figure) for key, figure in figures.items()}
    return summary


# ---- the report


def report(
    bench: Bench,
    speech: SpeechBench,
    quality: Mapping[str, Sequence[Quality]],
    *,
    about: Mapping[str, Any],
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON of `outrider bench speech`; `quality` is that of `ladder`."""
    plain = {item: run.outcome.tokens for item, run in bench.first(PLAIN).items()}
    speed = float(speech.options.get("speed", 1.0))
    rows = []
    by_name = {setting.name: setting for setting in (Setting(), *speech.settings)}
    for contender in bench.contenders:
        name = contender.name
        first = bench.first(name)
        same: dict[str, Same] = {
            item: "same" if run.outcome.tokens == plain[item] else "other"
            for item, run in first.items()
            if item in plain
        }
        figures = row(bench, contender, same=same, quality=lambda runs: _sound_figures(runs, speech))
        total, setting = pooled(bench.of(name)), by_name[name]
        nats = [entropy(speech.sp, speech.results[name, item], speed) for item in first]
        figures |= {
            "setting": name,
            "drafter": setting.drafter or PLAIN,
            "drafter_options": _as_json(setting.drafter_options),
            "rule_options": _as_json(setting.rule_options),
            "total_variation_per_token": total.total_variation / max(total.tokens, 1),
            "relaxed_share": total.sources.get("relaxed", 0) / max(total.tokens, 1),
            "target_entropy": float(np.concatenate([np.zeros(0), *nats]).mean()) if nats else 0.0,
        }
        if name in quality:
            figures["quality"] |= summarise(quality[name], quality[PLAIN])
        rows.append(figures)
    rungs = {name: summarise(quality[name], quality[PLAIN]) for name in (TEACHER, CODEC) if name in quality}
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {"model": speech.sp.name, "dtype": speech.sp.dtype, "seed": speech.seed, **speech.options, **about},
        "rows": rows,
        "ladder": rungs,
        "judged": len(quality.get(PLAIN, ())),
        "skipped": dict(skipped or {}),
        "peers": [],
    }


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value) for name, value in options.items()
    }


def _sound_figures(runs: Sequence[Run], speech: SpeechBench) -> dict[str, Any]:
    """The real-time factors of model, codec and vocoder, and the median seconds until the first sound."""
    results = [speech.results[run.contender, run.item.id] for run in runs]
    seconds = max(sum(result.sound.seconds for result in results), 1e-9)
    first = [result.time_to_first_sound for result in results if result.time_to_first_sound is not None]
    return {
        "seconds_of_sound": seconds,
        "factor_model": sum(result.timing.model for result in results) / seconds,
        "factor_codec": sum(result.timing.codec for result in results) / seconds,
        "factor_vocoder": sum(result.timing.vocoder for result in results) / seconds,
        "first_sound_seconds": float(np.median(first)) if first else None,
    }


def plot(report: Mapping[str, Any], path: Path) -> bool:
    """Plot word error against tokens per target pass, one line for each drafter and rule. Returns False without
    matplotlib or quality metrics."""
    rows = [row for row in report["rows"] if "word_error" in row["quality"]]
    if not rows:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    names = {id(row): row["drafter"] if row["drafter"] == PLAIN else f"{row['drafter']} {row['rule']}" for row in rows}
    for number, name in enumerate(dict.fromkeys(names.values())):
        line = sorted((row for row in rows if names[id(row)] == name), key=lambda row: row["tokens_per_pass"])
        errors = [row["quality"]["word_error"] for row in line]
        values = np.array([error["value"] for error in errors])
        bounds = np.abs(np.array([[error["low"], error["high"]] for error in errors]).T - values)
        tokens, style = [row["tokens_per_pass"] for row in line], f"{'os^'[number // 10 % 3]}-"
        axes.errorbar(tokens, 100 * values, 100 * bounds, fmt=style, color=f"C{number % 10}", capsize=3, label=name)
        for figures, value in zip(line, values, strict=True):
            label = ", ".join(f"{key}={option}" for key, option in figures["rule_options"].items())
            axes.annotate(label, (figures["tokens_per_pass"], 100 * value), textcoords="offset points", xytext=(5, 5))
    for name, rung in report["ladder"].items():
        axes.axhline(100 * rung["word_error"]["value"], linestyle=":", color="grey")
        axes.annotate(name, (1.0, 100 * rung["word_error"]["value"]), xytext=(2, 2), textcoords="offset points")
    axes.set(xlabel="tokens per target pass", ylabel="word error, % (95 % intervals)")
    axes.margins(x=0.1)  # room for the labels of the last points
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)
    return True
