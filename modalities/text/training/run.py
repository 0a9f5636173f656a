"""`outrider train`: loads the target, generates training data if none is given, trains draft heads, and saves weights.

Several recipes are trained together, and their weights record how they were made. Combines outrider.text.training.data,
outrider.text.recipes and outrider.core.training.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from outrider.core.assets.files import write_atomically
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.core.methods import make_drafter
from outrider.core.rules.exact import Exact
from outrider.core.trace import Step
from outrider.core.training.checkpoint import about, begin, vocabulary
from outrider.core.training.dataset import Lesson, TargetTeacher, Teacher, rejections, split
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.kept_states import KeptStates
from outrider.core.training.optim import TrainingError, remove_checkpoint
from outrider.text.loading import load
from outrider.text.model import TextModel
from outrider.text.recipes import find, home, missing, recipe
from outrider.text.recipes import load as load_weights
from outrider.text.training import data

ENOUGH = 200_000  # stop generating answers at this number of tokens
TRAIN_ON = ("answers", "on-policy", "served")
_SELF_PROMPTS, _SELF_TOKENS = 32, 96  # prompts per epoch and tokens each, for on-policy and served training
_MAX_HELD_OUT = (24, 256)  # answers used for validation, on a CPU and elsewhere
_VOCABULARY = 12288  # default size of a reduced vocabulary
BATCH = 768  # tokens, on a CPU


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """The options of `outrider train`."""

    recipes: tuple[str, ...]
    model: str = "smollm2-135m"
    device: str = "cpu"
    dtype: str = "bfloat16"  # of the target
    minutes: float = 30.0
    steps: int | None = None
    out: Path | None = None
    data: tuple[Path, ...] = ()  # answers, as JSON lines of token ids
    prompts: tuple[Path, ...] = ()  # JSON lines with "prompt"
    corpus: tuple[Path, ...] = ()  # folders of ordinary text
    corpus_fraction: float = 0.3  # share of an epoch's lessons, in the first half of the time
    answers_only: bool = False  # do not train on prompts
    temperature: float = 0.0  # of answers that are generated
    batch_size: int | None = None  # tokens per batch
    rate: float | None = None
    loss: str | None = None
    train_on: str = "answers"  # one of TRAIN_ON
    draft_vocab_size: int = _VOCABULARY  # 0: the whole vocabulary
    seed: int = 0
    fresh: bool = False  # delete the checkpoint in the folder
    start: tuple[Path, ...] = ()  # initial weights of some of the recipes
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the heads, by recipe, over the recipe's
    keep_states: float = 0.0  # GB of the target's states that are kept on disk for later epochs
    validations: int = 6
    patience: int = 0  # end after so many validations without longer accepted drafts; 0: never
    work: bool = False  # count minutes of the processor's work, not of the clock
    quiet: bool = False
    command: str = ""  # the command line, recorded with the weights

    def __post_init__(self) -> None:
        if not self.recipes:
            raise InvalidOption("there is no recipe to train; `outrider train --list` lists them")
        for name in self.recipes:
            recipe(name)
        if len(set(self.recipes)) < len(self.recipes):
            raise InvalidOption(f"a recipe is given twice: {', '.join(self.recipes)}")
        if self.train_on not in TRAIN_ON:
            raise unknown("train_on", self.train_on, TRAIN_ON)
        if not 0 <= self.corpus_fraction < 1:
            raise InvalidOption(f"corpus_fraction is {self.corpus_fraction}; it must be at least 0 and below 1")
        for name in self.options:
            if name not in self.recipes:
                raise unknown("recipe with options", name, self.recipes)
        if not self.minutes > 0:
            raise InvalidOption(f"minutes is {self.minutes}; it must be above 0")
        if not self.keep_states >= 0:
            raise InvalidOption(f"keep_states is {self.keep_states}; it must be 0 (off) or more GB")


def train(request: TrainingRequest, say: Callable[[str], None] = print, teacher: Teacher | None = None) -> list[Path]:
    """Train and return the files of weights. `teacher`: the target's states; None: computed, or kept as requested."""
    from outrider.core.training.head_training import HeadTraining
    from outrider.core.training.trainer import Plan, Trainer

    rank = os.environ.get("LOCAL_RANK", "0")  # with several processes, each has its own GPU
    device = f"cuda:{rank}" if request.device == "cuda" else request.device
    lm = load(request.model, device=device, dtype=request.dtype)
    target = lm.target()
    if not isinstance(target, Decoder):
        raise Incompatible(f"{lm.name} does not run on our own decoder, whose hidden states the recipes need")
    out = request.out or home(lm.name) / "-".join(request.recipes)
    if request.fresh and int(os.environ.get("RANK", "0")) == 0:
        remove_checkpoint(out)
        (out / "vocabulary.json").unlink(missing_ok=True)
    recipes = {name: recipe(name) for name in request.recipes}
    teacher = teacher or TargetTeacher(target)
    if request.keep_states:
        limit, name = round(request.keep_states * 1e9), f"{lm.name} {request.dtype}"
        teacher = KeptStates(teacher, out / f"states-{rank}", limit, name=name)
    start = time.monotonic()
    files = request.data or (home(lm.name) / "answers.jsonl",)
    if not request.data or request.prompts:
        with first_process(request.device):
            until = time.monotonic() + 20 * request.minutes  # at most a third of the time
            write_answers(lm, request, files[0], say, until, **_recorded(target, request, teacher))
    minutes_spent = (time.monotonic() - start) / 60
    lessons = _read(files)
    training_lessons, held_out = divided(lessons)
    held_out = held_out[: _MAX_HELD_OUT[target.device.type != "cpu"]]
    size = sum(len(item.answer) for item in training_lessons)
    say(f"{len(training_lessons):,} answers with {size:,} tokens for training, {len(held_out)} held out")
    vocabulary = _vocabulary(request, training_lessons, target, out)
    torch.manual_seed(request.seed)
    draft_heads = {
        name: item.make(target, vocabulary, **request.options.get(name, {})) for name, item in recipes.items()
    }
    for name, item in recipes.items():
        if item.watches is not None:
            _watch(draft_heads[name], item.watches, draft_heads, lm.name, target)
    for file in request.start:
        begin(_head_of(file, draft_heads), file, say)
    plan = Plan(
        minutes=max(request.minutes - minutes_spent, request.minutes / 2) if request.steps is None else request.minutes,
        steps=request.steps,
        seed=request.seed,
        validations=request.validations,
        patience=request.patience,
        work=request.work,
    )
    facts = {
        "target": lm.name,
        "command": request.command,
        "data": [described(file) for file in files] + [{"folder": str(item)} for item in request.corpus],
        "vocabulary": None if vocabulary is None else _share(vocabulary, held_out),
        "seed": request.seed,
    }
    training = HeadTraining(
        teacher,
        draft_heads,
        _Source(lm, files, request, draft_heads),
        held_out,
        out,
        tokens=request.batch_size or (BATCH if target.device.type == "cpu" else 32_768),
        seed=request.seed,
        losses={name: request.loss or item.loss for name, item in recipes.items()},
    )
    rates = {name: request.rate or item.rate for name, item in recipes.items()}
    trainer = Trainer(training, plan, out, device=target.device, rates=rates, facts=facts, quiet=request.quiet)
    progress = trainer.run()
    for name, best in progress.best.items():
        say(f"{name}: {best:.3f} tokens per target pass (simulated chains on held-out answers)")
    say(f"weights, curve and checkpoint are in {out}")
    return [out / f"{name}.safetensors" for name in progress.best]


def _recorded(target: Decoder, request: TrainingRequest, teacher: Teacher) -> dict[str, Any]:
    """What `data.Writer` needs to keep the states of answers while they are written."""
    if not isinstance(teacher, KeptStates):
        return {}
    return {
        "states": teacher,
        "needs": needs(target, {name: request.options.get(name, {}) for name in request.recipes}),
    }


def needs(target: Decoder, options: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """The target's states that draft heads with these options train on, by recipe."""
    return frozenset[str]().union(*(recipe(name).make(target, None, **given).needs for name, given in options.items()))


def _watch(
    draft_head: DraftHead, drafter: str, draft_heads: Mapping[str, DraftHead], name: str, target: Decoder
) -> None:
    """Give a draft head the one whose acceptance it predicts: trained with it, or before."""
    model = draft_heads.get(drafter)
    if model is None:
        path = find(name, drafter)
        if path is None:
            raise missing(name, drafter)
        model = load_weights(path, drafter, target).requires_grad_(False)
    draft_head.watch(model.to(target.device))  # type: ignore[operator]


def _head_of(file: Path, draft_heads: Mapping[str, DraftHead]) -> DraftHead:
    """Return the draft head to which a file of weights belongs."""
    kind = about(file).get("architecture")
    for draft_head in draft_heads.values():
        if type(draft_head).__name__ == kind:
            return draft_head
    raise Incompatible(f"{file.name} contains a {kind}, which is none of {', '.join(draft_heads)}")


class _Source:
    """The lessons of each epoch: all answers so far, with ordinary text in the first half of the time; or lessons from
    running the draft heads (on-policy, served)."""

    def __init__(
        self, lm: TextModel, files: Sequence[Path], request: TrainingRequest, draft_heads: Mapping[str, DraftHead]
    ) -> None:
        self.lm, self.files, self.request, self.draft_heads = lm, files, request, draft_heads
        self._texts: list[Lesson] | None = None

    def __call__(self, epoch: int, share: float) -> Sequence[Lesson]:
        if self.request.train_on != "answers":
            return self._self_generated(epoch)
        answers = divided(_read(self.files))[0]
        if not self.request.answers_only:
            prefix = shared(answers)
            answers = [
                replace(lesson, prompt=lesson.prompt[:prefix], answer=lesson.prompt[prefix:] + lesson.answer)
                for lesson in answers
            ]
        if not self.request.corpus or share >= 0.5:
            return answers
        if self._texts is None:
            passages = data.passages(self.request.corpus, seed=self.request.seed)
            self._texts = list(data.ordinary(self.lm, list(passages), 384))
        count = round(len(answers) * self.request.corpus_fraction / (1 - self.request.corpus_fraction))
        start = epoch * count % max(len(self._texts), 1)
        return [*answers, *(self._texts[start:] + self._texts[:start])[:count]]

    def _self_generated(self, epoch: int) -> list[Lesson]:
        """On-policy: texts written by the draft model, trained on the teacher's distributions. Served: the target's
        output, of which the positions of rejected drafts and the two after each count."""
        lessons = divided(_read(self.files))[0]
        prompts = [
            lessons[(epoch * _SELF_PROMPTS + n) % len(lessons)].prompt for n in range(min(_SELF_PROMPTS, len(lessons)))
        ]
        seed = self.request.seed + epoch
        sampling = Sampling(temperature=self.request.temperature, end=self.lm.end)
        lessons_made: list[Lesson] = []
        for name, draft_head in self.draft_heads.items():
            target = self.lm.target()
            model = draft_head.eval().drafts(target)
            if self.request.train_on == "on-policy":
                if not isinstance(model, Decoder):
                    raise InvalidOption(
                        f"{name} cannot generate text by itself, so it cannot be trained on-policy; use 'served'"
                    )
                written = data.outputs(self.lm, prompts, sampling, _SELF_TOKENS, seed=seed, model=model)
                lessons_made += [
                    Lesson(prompt, tuple(ids), "own", 1.0) for prompt, ids in zip(prompts, written, strict=True)
                ]
                continue
            steps: list[list[Step]] = [[] for _ in prompts]
            drafter = make_drafter(name, model=model)
            for item in decode(
                target, drafter, Exact(), prompts, sampling=sampling, max_new_tokens=_SELF_TOKENS, seed=seed
            ):
                steps[item.row].append(item)
            selected = (rejections(prompt, row, after=2) for prompt, row in zip(prompts, steps, strict=True))
            lessons_made += [item for item in selected if item is not None]
        return lessons_made


def divided(lessons: Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """Split into training and held-out lessons; of a few, the last one is held out."""
    training, held_out = split(lessons)
    if training and any(lesson.temperature == 0 for lesson in held_out):
        return training, held_out
    if len(lessons) < 2:
        raise InvalidOption("there is only one answer; give at least two, one for training and one held out")
    return list(lessons[:-1]), list(lessons[-1:])


def shared(lessons: Sequence[Lesson]) -> int:
    """Return the length of the prompts' common prefix, such as a system prompt."""
    first, last = min(lesson.prompt for lesson in lessons), max(lesson.prompt for lesson in lessons)
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return max(length, 1)


def _read(files: Sequence[Path]) -> list[Lesson]:
    lessons = [lesson for file in files for lesson in data.read(file)]
    if not lessons:
        raise InvalidOption(f"there are no answers in {', '.join(map(str, files))}")
    return lessons


@contextmanager
def first_process(device: str) -> Iterator[None]:
    """Run the block in the first of several processes, before the others."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    from accelerate import PartialState

    with PartialState(cpu=device == "cpu").main_process_first():
        yield


def write_answers(
    lm: TextModel,
    request: TrainingRequest,
    file: Path,
    say: Callable[[str], None],
    until: float = math.inf,
    **recorded: Any,
) -> None:
    """Let the target answer the given prompts, or its own if there are few answers yet, `until` (of time.monotonic)."""
    from tqdm import tqdm

    pending = [pair for path in request.prompts for pair in data.prompts_of(path)]
    tokens = sum(len(lesson.answer) for lesson in data.read(file))
    if not pending and tokens >= ENOUGH:
        return
    rows = 32 if lm.device == "cpu" else 1024
    writer = data.Writer(lm, file, rows=rows, seed=request.seed + tokens, **recorded)
    say(f"{lm.name} generates training answers in {file}")
    with tqdm(total=ENOUGH, initial=tokens, unit=" tokens", disable=request.quiet) as bar:
        number, own = 0, not pending
        while pending or (own and tokens < ENOUGH):
            if not pending:
                written = data.write_prompts(lm, rows, seed=request.seed + 7919 * number + tokens, batch=rows)
                pending = [("own", text) for text in written]
            batch, pending = pending[: 4 * rows], pending[4 * rows :]
            for lesson in writer.answer(batch, request.temperature, until=until if tokens else None):
                tokens += len(lesson.answer)
                bar.update(len(lesson.answer))
            number += 1
            if time.monotonic() > until:
                break


def _vocabulary(request: TrainingRequest, lessons: Sequence[Lesson], target: Decoder, out: Path) -> torch.Tensor | None:
    """Return the reduced vocabulary: that of the resumed run or of the initial weights, extended if requested."""
    if not request.draft_vocab_size or request.draft_vocab_size >= target.vocabulary:
        return None
    path = out / "vocabulary.json"
    initial = [ids for file in request.start if (ids := vocabulary(file)) is not None]
    if path.is_file():
        known = TypeAdapter(list[Annotated[int, Field(strict=True, ge=0, lt=target.vocabulary)]])
        try:
            stored = known.validate_json(path.read_bytes())
        except ValueError:
            stored = []
        if not stored or len(set(stored)) < len(stored):
            raise TrainingError(f"{path} is damaged; give --no-resume to start over, or another folder")
        kept = torch.tensor(stored)
    elif initial and len(initial[0]) >= request.draft_vocab_size:
        kept = initial[0]
    else:
        kept = data.commonest(lessons, target.vocabulary, request.draft_vocab_size, *initial[:1])
        write_atomically(path, json.dumps(kept.tolist()))
    return kept.to(target.device)


def _share(vocabulary: torch.Tensor, lessons: Sequence[Lesson]) -> Mapping[str, Any]:
    """Return the size of a reduced vocabulary and the share of held-out tokens that it covers."""
    tokens = torch.tensor([token for lesson in lessons for token in lesson.answer])
    inside = torch.isin(tokens, vocabulary.cpu()).double().mean()
    return {"kept": len(vocabulary), "covers_held_out": round(float(inside), 5)}


def described(file: Path) -> Mapping[str, Any]:
    """The number of answers and tokens in a file, by kind, and its digest."""
    lessons = data.read(file)
    kinds: dict[str, int] = {}
    for lesson in lessons:
        kinds[lesson.kind] = kinds.get(lesson.kind, 0) + 1
    tokens = sum(len(lesson.answer) for lesson in lessons)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"file": file.name, "answers": len(lessons), "tokens": tokens, "kinds": kinds, "sha256": digest}
