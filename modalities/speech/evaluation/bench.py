"""What drafters and rules spare a voice, and what relaxed ones do to what is heard.

Every contender speaks the same sentences with the same seeds, in turns; its time is the language model's, codec and
vocoder apart. The quality ladder has the teacher's reading, what the codec leaves of it, plain decoding, and every
setting; intervals are bootstraps over sentences, differences from plain decoding paired. Knows sounds and traces;
nothing of how speech is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.core.bench.runner import PLAIN, SCHEMA, Bench, Contender, Item, Outcome, Run, Same, pooled, row, sweep
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.methods import DRAFTERS, RULES
from outrider.core.trace import machine, versions
from outrider.core.tree import Tree
from outrider.speech.audio import Sound
from outrider.speech.evaluation.metrics import Judges, Rating, compared
from outrider.speech.model import SpeechModel
from outrider.speech.options import Options
from outrider.speech.phonemes import ids, phonemes, pieces
from outrider.speech.stream import Result
from outrider.speech.training.sentences import KINDS, held

_DRAWS = 2000  # of the bootstrap
TEACHER, CODEC = "teacher", "codec"
Read = Callable[[str], Sound]  # a text read aloud by the teacher


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row: who drafts and who judges."""

    drafter: str | None = None
    rule: str = "exact"
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        told = [f"{name}={value}" for name, value in (*self.drafter_options.items(), *self.rule_options.items())]
        parts = [self.drafter or PLAIN, *([] if self.rule == "exact" else [self.rule])]
        return " ".join((*parts, *([f"({', '.join(told)})"] if told else [])))


def settings(
    drafters: Sequence[str], rules: Sequence[str], of_drafters: Mapping[str, Any], of_rules: Mapping[str, Any]
) -> list[Setting]:
    """Every drafter under every rule; a list of values makes a setting of each."""
    return [
        Setting(drafter=drafter, rule=rule, drafter_options=theirs, rule_options=its)
        for drafter, rule in product(drafters, rules)
        for theirs in sweep(drafter, drafters, DRAFTERS, of_drafters)
        for its in sweep(rule, rules, RULES, of_rules)
    ]


def sentences(count: int) -> list[Item]:
    """Held-out sentences, every kind in turn; the novel's are of a book that nobody has learned from."""
    each = -(-count // len(KINDS))
    by_kind = [held(kind, each) for kind in KINDS]
    found = [one for group in zip(*by_kind, strict=True) for one in group][:count]
    return [Item(str(place), one.kind, one.text) for place, one in enumerate(found)]


@dataclass
class Speech:
    """Contenders over some sentences. What each first said of every one is kept, to be judged."""

    sp: SpeechModel
    settings: Sequence[Setting]
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of every generation: temperature, speed ...
    said: dict[tuple[str, str], Result] = field(default_factory=dict)  # by contender and item

    def contenders(self) -> list[Contender]:
        """Plain decoding, and one for each setting."""
        return [self._contender(one) for one in (Setting(), *self.settings)]

    def _contender(self, setting: Setting) -> Contender:
        given = {
            **self.options,
            "drafter": setting.drafter,
            "rule": setting.rule,
            "drafter_options": setting.drafter_options,
            "rule_options": setting.rule_options,
        }
        rule = self.sp.rule(Options.of(given)).made

        def run(item: Item) -> Outcome:
            found = self.sp.generate(item.content, **given, seed=self.seed + int(item.id))
            self.said.setdefault((setting.name, item.id), found)
            return Outcome(tuple(found.tokens), found.spent.model, found.trace.steps, found.trace.memory or 0)

        return Contender(setting.name, run, rule=setting.rule, lossless=rule.lossless)


# ---- how open the distributions are


@torch.no_grad()
def entropy(sp: SpeechModel, found: Result, speed: float = 1.0) -> np.ndarray:
    """Nats of the voice's own distribution (temperature 1, nothing cut off) at each token that was said, its end
    included."""
    each = []
    rows = sorted({step.row for step in found.trace.steps})
    for row_, said in zip(rows, found.phonemes, strict=False):
        tokens = [token for step in found.trace.steps if step.row == row_ for token in step.emitted]
        target = sp.target(sp.voice.script([ids(said)], speed))
        try:
            target.begin([[sp.voice.end]], Sampling())
            codes = torch.tensor([tokens], device=target.device)
            chain = Tree.chain(codes.shape[1], target.device)
            scores = target.score(Draft.guess(codes, chain, torch.ones_like(codes, dtype=torch.bool)))
            logs = scores.logits()[0, :-1].float().log_softmax(-1)
            each.append(-(logs.exp() * logs).sum(-1).cpu().numpy())
        finally:
            target.end()
    return np.concatenate([np.zeros(0, np.float32), *each])


# ---- how it is heard


@dataclass(frozen=True)
class Heard:
    """What judges make of one sentence said once."""

    words: int
    wrong: int
    letters: int
    off: int
    signal: float
    background: float
    overall: float
    alike: float  # the voice, beside the teacher's (without one: beside plain decoding's)
    ratio: float  # how long it takes beside the same
    unended: bool


_UNRATED = Rating(math.nan, math.nan, math.nan)


def _rated(opinion: float) -> tuple[float, float]:
    return (0, 0) if math.isnan(opinion) else (opinion, 1)


# What is reported of many: a sum over another. Lower is better in the first two, and where there is no end.
MEASURES: dict[str, Callable[[Heard], tuple[float, float]]] = {
    "word_error": lambda one: (one.wrong, one.words),
    "letter_error": lambda one: (one.off, one.letters),
    "dnsmos": lambda one: _rated(one.overall),
    "dnsmos_signal": lambda one: _rated(one.signal),
    "dnsmos_background": lambda one: _rated(one.background),
    "speaker_similarity": lambda one: (one.alike, 1),
    "duration_ratio": lambda one: (one.ratio, 1),
    "missing_end": lambda one: (one.unended, 1),
}


def judged(
    judges: Judges, text: str, sound: Sound, beside: Sound, unended: bool = False, *, rate: bool = True
) -> Heard:
    if not len(sound.samples):  # nothing was said: all of it is missing
        missed = compared("", text)
        return Heard(missed.words, missed.wrong, missed.letters, missed.off, 1.0, 1.0, 1.0, 0.0, 0.0, unended)
    errors, rating = judges.errors(sound, text), judges.rating(sound) if rate else _UNRATED
    return Heard(
        errors.words,
        errors.wrong,
        errors.letters,
        errors.off,
        rating.signal,
        rating.background,
        rating.overall,
        judges.alike(sound, beside),
        sound.seconds / max(beside.seconds, 1e-9),
        unended,
    )


def rungs(speech: Speech, item: Item, read: Read | None) -> dict[str, tuple[Sound, bool]]:
    """What everybody says of an item, and whether it lacks its end: before them the teacher, if it can be had, and what
    the codec leaves of that. Nothing where it was stopped before all had said it."""
    names = [PLAIN, *(one.name for one in speech.settings)]
    own = {name: speech.said[name, item.id] for name in names if (name, item.id) in speech.said}
    if len(own) < len(names):
        return {}
    sounds = {name: (one.sound, one.finish != "end") for name, one in own.items()}
    if read is None:
        return sounds
    heard = read(item.content)
    return {TEACHER: (heard, False), CODEC: (speech.sp.resynthesised(heard), False), **sounds}


def ladder(
    speech: Speech,
    items: Sequence[Item],
    judges: Judges,
    read: Read | None,
    progress: Callable[[str], Any] = lambda name: None,
    rated: int | None = None,
) -> dict[str, list[Heard]]:
    """Every rung's verdicts on the same sentences, in their order, of which the first so many are `rated` too. Several
    are listened to side by side, each in a thread that computes alone: that is quicker than many threads for one."""
    threads = torch.get_num_threads()
    judges.ready()

    def verdicts(place: int, item: Item) -> dict[str, Heard]:
        torch.set_num_threads(1)  # of this thread
        sounds, found = rungs(speech, item, read), dict[str, Heard]()
        for name, (sound, unended) in sounds.items():
            beside, _ = sounds.get(TEACHER, sounds[PLAIN])
            rate = rated is None or place < rated
            found[name] = judged(judges, item.content, sound, beside, unended, rate=rate)
            progress(name)
        return found

    found: dict[str, list[Heard]] = {}
    try:
        with ThreadPoolExecutor(threads) as pool:
            for each in pool.map(verdicts, range(len(items)), items):
                for name, one in each.items():
                    found.setdefault(name, []).append(one)
    finally:
        torch.set_num_threads(threads)
    return found


def teacher(threads: int = 1) -> Read:
    """The voice that was learned from, reading what the draft head reads, piece by piece."""
    from outrider.speech.training.kokoro import Teacher

    made = Teacher(threads=threads)
    return lambda text: Sound(np.concatenate([made.read(phonemes(part)).sound for part in pieces(text)]))


def measured(found: Sequence[Heard], plain: Sequence[Heard], seed: int = 0) -> dict[str, dict[str, float]]:
    """Of each measure its value and 95 % interval, and how far it is from plain decoding's, drawn in pairs."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(found), size=(_DRAWS, len(found)))
    result = {}
    for name, parts in MEASURES.items():
        above, below = np.array([parts(one) for one in found], float).T
        base, under = np.array([parts(one) for one in plain], float).T
        with np.errstate(invalid="ignore"):  # of which nobody was rated
            draws = above[drawn].sum(1) / below[drawn].sum(1)
            apart = draws - base[drawn].sum(1) / under[drawn].sum(1)
        value = above.sum() / below.sum()
        low, high = np.nanquantile(draws, (0.025, 0.975))
        least, most = np.nanquantile(apart, (0.025, 0.975))
        difference = value - base.sum() / under.sum()
        told = {"value": value, "low": low, "high": high, "apart": difference, "apart_low": least, "apart_high": most}
        result[name] = {key: float(one) for key, one in told.items()}
    return result


# ---- the report


def report(
    bench: Bench,
    speech: Speech,
    heard: Mapping[str, Sequence[Heard]],
    *,
    about: Mapping[str, Any],
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON of `outrider bench speech`."""
    plain = {item: run.outcome.tokens for item, run in bench.first(PLAIN).items()}
    speed = float(speech.options.get("speed", 1.0))
    rows = []
    by_name = {one.name: one for one in (Setting(), *speech.settings)}
    for one in bench.contenders:
        first = bench.first(one.name)
        same: dict[str, Same] = {
            item: "same" if run.outcome.tokens == plain[item] else "other"
            for item, run in first.items()
            if item in plain
        }
        told = row(bench, one, same=same, quality=lambda runs: _sounding(runs, speech))
        total, setting = pooled(bench.of(one.name)), by_name[one.name]
        nats = [entropy(speech.sp, speech.said[one.name, item], speed) for item in first]
        told |= {
            "setting": one.name,
            "drafter": setting.drafter or PLAIN,
            "drafter_options": _plain(setting.drafter_options),
            "rule_options": _plain(setting.rule_options),
            "price_per_token": total.total_variation / max(total.tokens, 1),
            "relaxed_share": total.sources.get("relaxed", 0) / max(total.tokens, 1),
            "target_entropy": float(np.concatenate([np.zeros(0), *nats]).mean()) if nats else 0.0,
        }
        if one.name in heard:
            told["quality"] |= measured(heard[one.name], heard[PLAIN])
        rows.append(told)
    rungs = {name: measured(heard[name], heard[PLAIN]) for name in (TEACHER, CODEC) if name in heard}
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {"model": speech.sp.name, "dtype": speech.sp.dtype, "seed": speech.seed, **speech.options, **about},
        "rows": rows,
        "ladder": rungs,
        "judged": len(heard.get(PLAIN, ())),
        "skipped": dict(skipped or {}),
        "peers": [],
    }


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one if isinstance(one, str | int | float | bool) else str(one) for name, one in options.items()}


def _sounding(runs: Sequence[Run], speech: Speech) -> dict[str, Any]:
    """Seconds of work for a second of sound, by what does it; and until something is heard."""
    found = [speech.said[run.contender, run.item.id] for run in runs]
    seconds = max(sum(one.sound.seconds for one in found), 1e-9)
    first = [one.first for one in found if one.first is not None]
    return {
        "seconds_of_sound": seconds,
        "factor_model": sum(one.spent.model for one in found) / seconds,
        "factor_codec": sum(one.spent.codec for one in found) / seconds,
        "factor_vocoder": sum(one.spent.vocoder for one in found) / seconds,
        "first_heard": float(np.median(first)) if first else None,
    }


def plot(told: Mapping[str, Any], path: Path) -> bool:
    """Tokens a call against word error, a line for each drafter and rule; False without matplotlib or verdicts."""
    rows = [one for one in told["rows"] if "word_error" in one["quality"]]
    if not rows:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    names = {id(one): one["drafter"] if one["drafter"] == PLAIN else f"{one['drafter']} {one['rule']}" for one in rows}
    for number, name in enumerate(dict.fromkeys(names.values())):
        own = sorted((one for one in rows if names[id(one)] == name), key=lambda one: one["tokens_per_pass"])
        error = [one["quality"]["word_error"] for one in own]
        value = np.array([one["value"] for one in error])
        bounds = np.abs(np.array([[one["low"], one["high"]] for one in error]).T - value)
        calls, look = [one["tokens_per_pass"] for one in own], f"{'os^'[number // 10 % 3]}-"
        axes.errorbar(calls, 100 * value, 100 * bounds, fmt=look, color=f"C{number % 10}", capsize=3, label=name)
        for one, at in zip(own, value, strict=True):
            label = ", ".join(f"{key}={value}" for key, value in one["rule_options"].items())
            axes.annotate(label, (one["tokens_per_pass"], 100 * at), textcoords="offset points", xytext=(5, 5))
    for name, rung in told["ladder"].items():
        axes.axhline(100 * rung["word_error"]["value"], linestyle=":", color="grey")
        axes.annotate(name, (1.0, 100 * rung["word_error"]["value"]), xytext=(2, 2), textcoords="offset points")
    axes.set(xlabel="tokens a target call", ylabel="words wrong, % (95 % intervals)")
    axes.margins(x=0.1)  # room for what the last points say
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)
    return True
