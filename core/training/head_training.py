"""Training draft heads: several learn from one pass of their teacher, the target, and are validated by simulated
acceptance. Independent of what tokens mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import InvalidOption
from outrider.core.training.acceptance_curve import Curve, walk
from outrider.core.training.checkpoint import save
from outrider.core.training.dataset import Lesson, Teacher, batches, read
from outrider.core.training.draft_head import Batch, DraftHead, rank_hits
from outrider.core.training.losses import resolve
from outrider.core.training.optim import TrainingError
from outrider.core.training.trainer import Autocast, Progress, Share, Validation

_RANKS = 10  # of each guess, whose accuracy shapes static trees
Source = Callable[[int, float], Sequence[Lesson]]  # epoch, finished share of the run -> training examples


class HeadTraining:
    """Draft heads by name; weights go to `out`. `losses`: the names of their loss functions."""

    maximize = True  # tokens per target pass

    def __init__(
        self,
        teacher: Teacher,
        draft_heads: Mapping[str, DraftHead],
        source: Source,
        held: Sequence[Lesson],
        out: Path,
        *,
        tokens: int = 4096,
        max_length: int = 768,
        depth: int = 7,
        seed: int = 0,
        losses: Mapping[str, str] | None = None,
    ) -> None:
        """`tokens` per batch, padding included; `max_length` of a row; `depth` of the simulated drafts."""
        if not draft_heads:
            raise InvalidOption("there is nothing to train; give at least one draft head")
        if tokens < 2:
            raise InvalidOption(f"tokens is {tokens}; it must be 2 or more")
        self.teacher, self.models, self.source, self.held, self.out = teacher, draft_heads, source, held, out
        self.tokens, self.max_length, self.depth, self.seed = tokens, max_length, depth, seed
        self.losses = {name: (losses or {}).get(name, "kl") for name in draft_heads}
        self._losses = {name: resolve(loss) for name, loss in self.losses.items()}
        self._needs = frozenset[str]().union(*(head.needs for head in draft_heads.values()))

    def batches(self, progress: Progress, share: Share, rank: int, world: int) -> Iterator[Batch]:
        """Epoch after epoch; each batch is read by the teacher once."""
        position = progress.position
        while True:
            position.begun = share() if position.begun is None else position.begun
            lessons = self.source(position.epoch, position.begun)
            if position.examples is not None:
                lessons = lessons[: position.examples]
            position.examples = len(lessons)
            groups = batches(lessons, self.tokens, self.seed + position.epoch, max_length=self.max_length)
            if len(groups) < world:
                raise TrainingError(
                    f"{len(lessons)} training examples make {len(groups)} batches for {world} devices; add examples"
                )
            while position.batch + world <= len(groups):
                group = groups[position.batch + rank]
                position.batch += world
                batch = read(self.teacher, group, self._needs)
                for head in self.models.values():
                    head.finished = share()
                position.tokens += sum(lesson.size for lesson in group) * world
                position.counted += int(batch.answer.sum()) * world
                yield batch
            position.epoch, position.batch, position.examples, position.begun = position.epoch + 1, 0, None, None

    def loss(self, name: str, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch, self._losses[name])
        return loss

    def validate(self, models: Mapping[str, nn.Module], autocast: Autocast) -> Mapping[str, Validation]:
        """Simulated acceptance on held-out greedy answers."""
        curves: dict[str, Curve] = {}
        by_kind: dict[str, dict[str, Curve]] = {name: {} for name in models}
        ranked: dict[str, tuple[Tensor, Tensor]] = {}
        greedy = [lesson for lesson in self.held if lesson.temperature == 0 and lesson.counts is None]
        for group in batches(greedy, self.tokens, 0, max_length=self.max_length):
            batch = read(self.teacher, group, self._needs)
            for name, model in models.items():
                assert isinstance(model, DraftHead)
                with autocast():
                    hits = model.hits(batch, self.depth)
                    if "accuracy" in model.config:
                        counts = rank_hits(model.guesses(batch), batch, _RANKS)
                        known = ranked.get(name)
                        ranked[name] = counts if known is None else (known[0] + counts[0], known[1] + counts[1])
                curve = walk(hits, batch.answer)
                curves[name] = curves[name] + curve if name in curves else curve
                for kind in dict.fromkeys(lesson.kind for lesson in group):
                    rows = [row for row, lesson in enumerate(group) if lesson.kind == kind]
                    part, before = walk(hits[rows], batch.answer[rows]), by_kind[name].get(kind)
                    by_kind[name][kind] = part if before is None else before + part
        for name, (right, asked) in ranked.items():
            model = models[name]
            assert isinstance(model, DraftHead)
            rates = (right / asked.clamp(min=1)[:, None]).tolist()
            model.config = {**model.config, "accuracy": [[round(rate, 4) for rate in row] for row in rates]}
        results = {}
        for name, curve in curves.items():
            kinds = {kind: part.tokens_per_pass for kind, part in sorted(by_kind[name].items())}
            measures = {"architecture": type(models[name]).__name__, **curve.to_dict(), "kinds": kinds}
            results[name] = Validation(curve.tokens_per_pass, measures)
        return results

    def save(self, name: str, model: nn.Module, provenance: Mapping[str, Any]) -> None:
        assert isinstance(model, DraftHead)
        settings = {"loss": self.losses[name], "tokens": self.tokens, "max_length": self.max_length}
        validation = {"rows": len(self.held), **provenance["validation"]}
        save(model, self.out / f"{name}.safetensors", {**provenance, "settings": settings, "validation": validation})
