"""`outrider train`: from nothing to weights. Fetches the target, has it write prompts and answer them where no data is
given, trains the draft heads of some recipes side by side, and writes weights with where they come from.

The parts are outrider.text.training.data, outrider.text.recipes and outrider.core.training; here they are put
in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.core.methods import make_drafter
from outrider.core.rules.exact import Exact
from outrider.core.trace import Step
from outrider.core.training.checkpoint import about, begin, vocabulary
from outrider.core.training.dataset import DecoderTeacher, Lesson, rejections, split
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.optim import remove_checkpoint
from outrider.text.loading import load
from outrider.text.model import TextModel
from outrider.text.recipes import find, home, missing, recipe
from outrider.text.recipes import load as load_weights
from outrider.text.training import data

ENOUGH = 200_000  # tokens of answers with which nobody has to write more first
LEARN = ("answers", "on-policy", "served")
_LIVED, _LENGTH = 32, 96  # prompts an epoch, and tokens each, where draft heads learn from what they do themselves
_JUDGES = (24, 256)  # answers that validation goes through at most, on a CPU and elsewhere
_VOCABULARY = 12288  # tokens that a reduced vocabulary keeps at least


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """What `outrider train` was told."""

    recipes: tuple[str, ...]
    model: str = "smollm2-135m"
    device: str = "cpu"
    minutes: float = 30.0
    steps: int | None = None
    out: Path | None = None
    data: tuple[Path, ...] = ()  # answers, as JSON lines of token ids
    prompts: tuple[Path, ...] = ()  # JSON lines with "prompt"
    texts: tuple[Path, ...] = ()  # folders of ordinary text
    text_share: float = 0.3  # of an epoch's lessons, in the first half of the time
    whole: bool = True  # learn from prompts as well, which the target reads anyway
    temperature: float = 0.0  # of answers that are written now
    tokens: int | None = None  # a batch
    rate: float | None = None
    loss: str | None = None
    learn: str = "answers"  # one of LEARN
    vocabulary: int = _VOCABULARY  # 0: all of it
    seed: int = 0
    fresh: bool = False  # forget the checkpoint in the folder
    start: tuple[Path, ...] = ()  # weights to begin from, instead of from chance: of some of the recipes
    quiet: bool = False
    command: str = ""  # that asked for it, noted with the weights

    def __post_init__(self) -> None:
        if not self.recipes:
            raise InvalidOption("there is no recipe to train; `outrider train --list` names them")
        for name in self.recipes:
            recipe(name)
        if len(set(self.recipes)) < len(self.recipes):
            raise InvalidOption(f"a recipe is named twice: {', '.join(self.recipes)}")
        if self.learn not in LEARN:
            raise unknown("way to learn", self.learn, LEARN)
        if not 0 <= self.text_share < 1:
            raise InvalidOption(f"text_share is {self.text_share}; it must be from 0 up to, but not, 1")
        if not self.minutes > 0:
            raise InvalidOption(f"minutes is {self.minutes}; it must be above 0")


def train(wanted: TrainingRequest, say: Callable[[str], None] = print) -> list[Path]:
    """Train, and give the files of weights."""
    from outrider.core.training.head_training import HeadTraining
    from outrider.core.training.trainer import Plan, Trainer

    rank = os.environ.get("LOCAL_RANK", "0")  # of several processes, each with a GPU of its own
    device = f"cuda:{rank}" if wanted.device == "cuda" else wanted.device
    lm = load(wanted.model, device=device, dtype="bfloat16")
    target = lm.target()
    if not isinstance(target, Decoder):
        raise Incompatible(f"{lm.name} does not run on our own decoder, whose states the recipes read")
    out = wanted.out or home(lm.name) / "-".join(wanted.recipes)
    if wanted.fresh and int(os.environ.get("RANK", "0")) == 0:
        remove_checkpoint(out)
        (out / "vocabulary.json").unlink(missing_ok=True)
    start = time.monotonic()
    files = wanted.data or (home(lm.name) / "answers.jsonl",)
    if not wanted.data or wanted.prompts:
        with first_process(wanted.device):
            _write(lm, wanted, files[0], say)
    spent = (time.monotonic() - start) / 60
    lessons = _read(files)
    learned, held = divided(lessons)
    held = held[: _JUDGES[target.device.type != "cpu"]]
    size = sum(len(one.answer) for one in learned)
    say(f"{len(learned):,} answers of {size:,} tokens to learn from, {len(held)} to judge by")
    vocabulary = _vocabulary(wanted, learned, target, out)
    torch.manual_seed(wanted.seed)
    chosen = {name: recipe(name) for name in wanted.recipes}
    draft_heads = {name: one.make(target, vocabulary) for name, one in chosen.items()}
    for name, one in chosen.items():
        if one.watches is not None:
            _watch(draft_heads[name], one.watches, draft_heads, lm.name, target)
    for file in wanted.start:
        begin(_whose(file, draft_heads), file, say)
    plan = Plan(
        minutes=max(wanted.minutes - spent, wanted.minutes / 2) if wanted.steps is None else wanted.minutes,
        steps=wanted.steps,
        seed=wanted.seed,
    )
    facts = {
        "target": lm.name,
        "command": wanted.command,
        "data": [_described(file) for file in files] + [{"folder": str(one)} for one in wanted.texts],
        "vocabulary": None if vocabulary is None else _share(vocabulary, held),
        "seed": wanted.seed,
    }
    training = HeadTraining(
        DecoderTeacher(target),
        draft_heads,
        _Source(lm, files, wanted, draft_heads),
        held,
        out,
        tokens=wanted.tokens or (768 if target.device.type == "cpu" else 32_768),
        seed=wanted.seed,
        losses={name: wanted.loss or one.loss for name, one in chosen.items()},
    )
    rates = {name: wanted.rate or one.rate for name, one in chosen.items()}
    trainer = Trainer(training, plan, out, device=target.device, rates=rates, facts=facts, quiet=wanted.quiet)
    progress = trainer.run()
    for name, best in progress.best.items():
        say(f"{name}: {best:.3f} tokens a target call (simulated chains on held-out answers)")
    say(f"weights, curve and checkpoint are in {out}")
    return [out / f"{name}.safetensors" for name in progress.best]


def _watch(
    draft_head: DraftHead, drafter: str, draft_heads: Mapping[str, DraftHead], name: str, target: Decoder
) -> None:
    """Let a draft head see the one that it learns about: beside it, or trained before."""
    model = draft_heads.get(drafter)
    if model is None:
        path = find(name, drafter)
        if path is None:
            raise missing(name, drafter)
        model = load_weights(path, drafter, target).requires_grad_(False)
    draft_head.watch(model.to(target.device))  # type: ignore[operator]


def _whose(file: Path, draft_heads: Mapping[str, DraftHead]) -> DraftHead:
    """The draft head that a file of weights is of."""
    kind = about(file).get("architecture")
    for draft_head in draft_heads.values():
        if type(draft_head).__name__ == kind:
            return draft_head
    raise Incompatible(f"{file.name} holds a {kind}, which none of {', '.join(draft_heads)} is")


class _Source:
    """What each epoch learns: all answers there are by then, and in the first half of the time ordinary text too; or
    what the draft heads themselves do to the prompts."""

    def __init__(
        self, lm: TextModel, files: Sequence[Path], wanted: TrainingRequest, draft_heads: Mapping[str, DraftHead]
    ) -> None:
        self.lm, self.files, self.wanted, self.draft_heads = lm, files, wanted, draft_heads
        self._texts: list[Lesson] | None = None

    def __call__(self, epoch: int, share: float) -> Sequence[Lesson]:
        if self.wanted.learn != "answers":
            return self._lived(epoch)
        answers = divided(_read(self.files))[0]
        if self.wanted.whole:
            same = shared(answers)
            answers = [replace(one, prompt=one.prompt[:same], answer=one.prompt[same:] + one.answer) for one in answers]
        if not self.wanted.texts or share >= 0.5:
            return answers
        if self._texts is None:
            found = data.passages(self.wanted.texts, seed=self.wanted.seed)
            self._texts = list(data.ordinary(self.lm, list(found), 384))
        count = round(len(answers) * self.wanted.text_share / (1 - self.wanted.text_share))
        start = epoch * count % max(len(self._texts), 1)
        return [*answers, *(self._texts[start:] + self._texts[:start])[:count]]

    def _lived(self, epoch: int) -> list[Lesson]:
        """On-policy: what a draft model writes by itself, to be judged by its teacher's distributions. Served: the
        target's own output, of which the places count where a draft was rejected, and the two behind each."""
        lessons = divided(_read(self.files))[0]
        prompts = [lessons[(epoch * _LIVED + n) % len(lessons)].prompt for n in range(min(_LIVED, len(lessons)))]
        seed = self.wanted.seed + epoch
        sampling = Sampling(temperature=self.wanted.temperature, end=self.lm.end)
        found: list[Lesson] = []
        for name, draft_head in self.draft_heads.items():
            target = self.lm.target()
            model = draft_head.eval().drafts(target)
            if self.wanted.learn == "on-policy":
                if not isinstance(model, Decoder):
                    raise InvalidOption(f"{name} writes nothing by itself, so it can't learn on-policy; take 'served'")
                written = data.outputs(self.lm, prompts, sampling, _LENGTH, seed=seed, model=model)
                found += [Lesson(prompt, tuple(ids), "own", 1.0) for prompt, ids in zip(prompts, written, strict=True)]
                continue
            steps: list[list[Step]] = [[] for _ in prompts]
            drafter = make_drafter(name, model=model)
            for one in decode(target, drafter, Exact(), prompts, sampling=sampling, max_new_tokens=_LENGTH, seed=seed):
                steps[one.row].append(one)
            taught = (rejections(prompt, row, behind=2) for prompt, row in zip(prompts, steps, strict=True))
            found += [one for one in taught if one is not None]
        return found


def divided(lessons: Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """To learn from and to judge by; of a handful, the last one judges."""
    learned, held = split(lessons)
    if learned and any(one.temperature == 0 for one in held):
        return learned, held
    if len(lessons) < 2:
        raise InvalidOption("there is one answer only; one to learn from and one to judge by are the least")
    return list(lessons[:-1]), list(lessons[-1:])


def shared(lessons: Sequence[Lesson]) -> int:
    """How many tokens all prompts begin with alike, such as a system prompt; of one prompt, all."""
    first, last = min(one.prompt for one in lessons), max(one.prompt for one in lessons)
    alike = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return max(alike, 1)


def _read(files: Sequence[Path]) -> list[Lesson]:
    found = [lesson for file in files for lesson in data.read(file)]
    if not found:
        raise InvalidOption(f"there are no answers in {', '.join(map(str, files))}")
    return found


@contextmanager
def first_process(device: str) -> Iterator[None]:
    """Of several processes the first does what is within, and the others find it done."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    from accelerate import PartialState

    with PartialState(cpu=device == "cpu").main_process_first():
        yield


def _write(lm: TextModel, wanted: TrainingRequest, file: Path, say: Callable[[str], None]) -> None:
    """Have the target answer the prompts given; or, where there are few answers yet, prompts of its own. For at most a
    third of the minutes."""
    from tqdm import tqdm

    given = [("given", text) for path in wanted.prompts for text in data.prompts_of(path)]
    here = sum(len(one.answer) for one in data.read(file))
    if not given and here >= ENOUGH:
        return
    rows = 32 if lm.device == "cpu" else 256
    writer = data.Writer(lm, file, rows=rows, seed=wanted.seed + here)
    deadline = time.monotonic() + 20 * wanted.minutes
    say(f"{lm.name} writes answers to learn from, into {file}")
    with tqdm(total=ENOUGH, initial=here, unit=" tokens", disable=wanted.quiet) as bar:
        number, own = 0, not given
        while given or (own and here < ENOUGH):
            if not given:
                written = data.write_prompts(lm, rows, seed=wanted.seed + 7919 * number + here, batch=rows)
                given = [("own", text) for text in written]
            now, given = given[: 4 * rows], given[4 * rows :]
            for one in writer.answer(now, wanted.temperature, until=deadline if here else None):
                here += len(one.answer)
                bar.update(len(one.answer))
            number += 1
            if time.monotonic() > deadline:
                break


def _vocabulary(wanted: TrainingRequest, lessons: Sequence[Lesson], target: Decoder, out: Path) -> torch.Tensor | None:
    """The tokens kept: the same again when a run goes on; those of the weights begun from, and more if asked."""
    if not wanted.vocabulary or wanted.vocabulary >= target.vocabulary:
        return None
    path = out / "vocabulary.json"
    said = [found for file in wanted.start if (found := vocabulary(file)) is not None]
    if path.is_file():
        kept = torch.tensor(json.loads(path.read_text(encoding="utf-8")))
    elif said and len(said[0]) >= wanted.vocabulary:
        kept = said[0]
    else:
        kept = data.commonest(lessons, target.vocabulary, wanted.vocabulary, *said[:1])
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept.tolist()), encoding="utf-8")
    return kept.to(target.device)


def _share(vocabulary: torch.Tensor, lessons: Sequence[Lesson]) -> Mapping[str, Any]:
    """How much of unseen answers a reduced vocabulary covers."""
    tokens = torch.tensor([token for one in lessons for token in one.answer])
    inside = torch.isin(tokens, vocabulary.cpu()).double().mean()
    return {"kept": len(vocabulary), "covers_held_out": round(float(inside), 5)}


def _described(file: Path) -> Mapping[str, Any]:
    lessons = data.read(file)
    kinds: dict[str, int] = {}
    for one in lessons:
        kinds[one.kind] = kinds.get(one.kind, 0) + 1
    tokens = sum(len(one.answer) for one in lessons)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"file": file.name, "answers": len(lessons), "tokens": tokens, "kinds": kinds, "sha256": digest}
