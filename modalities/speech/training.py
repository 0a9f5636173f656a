"""`outrider train speech-...`: from nothing to weights. The teacher reads sentences aloud, or prepared speech is taken;
the codec learns to bring it back, voices to say its tokens.

The parts are outrider.speech.data, outrider.speech.recipes and outrider.core.fit; here they are put in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.errors import InvalidOption
from outrider.core.fit import Fit, Request
from outrider.core.trained import begin, save
from outrider.speech import data, recipes
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.data import Utterance
from outrider.speech.recipes import DATA, MODEL, Recipe, home, recipe
from outrider.speech.teaching import VoiceTeacher
from outrider.speech.voice import Voice

_CROP = 128  # frames that a codec learns from at a time
_JUDGED = (40, 400)  # utterances that judging goes through at most, on a CPU and elsewhere
_NOISE = 0.25  # of what a voice reads of the speech is something else, at most
_TIMING = 0.3  # how much the lengths of phonemes count beside the tokens


class Wanted(Request):
    """The same, of speech."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.recipes:
            recipe(name)


def train(wanted: Wanted, say: Callable[[str], None] = print) -> list[Path]:
    """Train one recipe after another, and give the files of weights (of the speech, its folder)."""
    return [_read(wanted, say) if name == DATA else _train(recipe(name), wanted, say) for name in wanted.recipes]


def _read(wanted: Wanted, say: Callable[[str], None]) -> Path:
    folder = wanted.out or data.home()
    seconds = data.synthesise(folder, wanted.minutes, say=say)
    say(f"{seconds / 3600:.2f} hours of speech are in {folder}")
    return folder


def _train(chosen: Recipe, wanted: Wanted, say: Callable[[str], None]) -> Path:
    device, out = wanted.place, wanted.begin(home(chosen.name))
    batch = wanted.batch or chosen.batch[device.type != "cpu"]
    options = {**chosen.options, **(wanted.options or {})}
    ours = data.home() if chosen.name == "speech-codec" else recipes.learned_from()  # codes are of no use to a codec
    utterances = data.load(wanted.data or ours)
    say(data.describe(utterances))
    if chosen.kind is not None:
        return _teach(chosen, utterances, options, wanted, out, device, say)
    model: nn.Module
    course: CodecCourse | VoiceCourse
    if chosen.name == "speech-codec":
        course = CodecCourse(utterances, batch, wanted.seed, device)
        codec = Codec(**options)
        codec.mean.copy_(course.mean)
        codec.scale.copy_(course.scale)
        model = CodecLearning(codec)
    else:
        utterances, codes = _tokens(utterances, wanted, out, device)
        course = VoiceCourse(utterances, codes, batch, wanted.seed, device)
        model = VoiceLearning(Voice(codes=codes, **options))
    if wanted.start is not None:
        begin(model.part, wanted.start, say)
    facts = _facts(chosen, utterances, wanted) | {"batch": batch}
    file = out / f"{chosen.name.removeprefix(recipes.PREFIX)}.safetensors"

    def keep(learned: nn.Module, told: Mapping[str, Any]) -> None:
        assert isinstance(learned, CodecLearning | VoiceLearning)
        save(learned.part, file, told, 16 if isinstance(learned, CodecLearning) else 8)

    say(f"{chosen.name}: {sum(one.numel() for one in model.parameters()):,} parameters")
    pace = wanted.pace(chosen.rate, chosen.decay, chosen.matrices)
    fit = Fit(
        model.to(device), course, pace, out, keep, device=device, name=chosen.name, facts=facts, quiet=wanted.quiet
    )
    state = fit.run()
    say(f"{chosen.name}: {state.steps:,} steps, best {state.best:.4f}; weights, curve and checkpoint are in {out}")
    return file


def _facts(chosen: Recipe, utterances: Sequence[Utterance], wanted: Wanted) -> dict[str, Any]:
    return {"target": MODEL, **wanted.facts(chosen.name, data.describe(utterances))}


def _teach(
    chosen: Recipe,
    utterances: list[Utterance],
    options: Mapping[str, Any],
    wanted: Wanted,
    out: Path,
    device: torch.device,
    say: Callable[[str], None],
) -> Path:
    """Have the voice teach a drafter."""
    from outrider.core.trainer import Plan, Trainer

    assert chosen.kind is not None
    utterances, codes = _tokens(utterances, wanted, out, device)
    voice = recipes.voice()
    if voice.end < codes:
        raise InvalidOption(f"the voice has {voice.end:,} codes and the speech {codes:,}: they don't belong together")
    teacher = VoiceTeacher(voice, utterances, device)
    learned = [lesson for lesson, one in zip(teacher.lessons, utterances, strict=True) if not one.held]
    held = [lesson for lesson, one in zip(teacher.lessons, utterances, strict=True) if one.held]
    name = chosen.name.removeprefix(recipes.PREFIX)
    pupil = chosen.kind(teacher.target, **options)
    if wanted.start is not None:
        begin(pupil, wanted.start, say)
    trainer = Trainer(
        teacher,
        {name: pupil},
        lambda epoch, share: learned,
        held[: _JUDGED[device.type != "cpu"]],
        Plan(
            minutes=wanted.minutes,
            steps=wanted.steps,
            tokens=wanted.batch or chosen.batch[device.type != "cpu"],
            longest=1024,
            seed=wanted.seed,
        ),
        out,
        losses={name: chosen.loss},
        rates={name: wanted.rate or chosen.rate},
        facts=_facts(chosen, utterances, wanted),
        quiet=wanted.quiet,
    )
    for one, best in trainer.run().best.items():
        say(f"{one}: {best:.3f} tokens a target call (simulated chains on held-out speech); weights are in {out}")
    return out / f"{name}.safetensors"


def _tokens(
    utterances: list[Utterance], wanted: Wanted, out: Path, device: torch.device
) -> tuple[list[Utterance], int]:
    """Utterances as tokens, and how many codes there are; what had to be coded is kept beside the weights."""
    if all(len(one.codes) for one in utterances):
        ours = recipes.codec().codes if wanted.data is None else 0  # some may never have been said
        return utterances, max(ours, *(1 + int(one.codes.max()) for one in utterances))
    codec = recipes.codec().to(device)
    coded = data.encoded(utterances, codec)
    data.save(out / "tokens.npz", coded)
    return coded, codec.codes


# ---- the codec


class CodecLearning(nn.Module):
    """The codec as something that has a loss."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.part = codec

    def forward(self, mel: Tensor) -> Tensor:
        return self.part.distance(mel)


class CodecCourse:
    """Bringing frames back."""

    def __init__(self, utterances: Sequence[Utterance], batch: int, seed: int, device: torch.device) -> None:
        learned = [one.mel for one in utterances if not one.held and one.mel.shape[1] >= _CROP]
        if not learned:
            raise InvalidOption(f"there is no speech of {_CROP} frames or more to learn from")
        self.seed, self.size, self.device = seed, batch, device
        self.frames = torch.from_numpy(np.concatenate(learned, 1)).to(device)
        self.starts = np.concatenate(
            [
                start + np.arange(one.shape[1] - _CROP + 1)
                for one, start in zip(learned, np.cumsum([0, *(one.shape[1] for one in learned[:-1])]), strict=True)
            ]
        )
        some = data.unpacked(self.frames[:, :: max(self.frames.shape[1] // 100_000, 1)].cpu().numpy())
        self.mean, self.scale = some.mean(1, keepdim=True), some.std(1, keepdim=True).clamp(min=0.1)
        self.held = [one.mel for one in utterances if one.held][: _JUDGED[device.type != "cpu"]]

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        draw = np.random.default_rng([self.seed, number])
        starts = torch.from_numpy(draw.choice(self.starts, self.size)).to(self.device)
        index = starts[:, None] + torch.arange(_CROP, device=self.device)
        crops = self.frames[:, index].permute(1, 0, 2).float() * data.STEP + data.LOWEST
        return (crops,)

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, CodecLearning)
        lost, off, codes = [], [], []
        for mel in self.held:
            frames = data.unpacked(mel)[None].to(self.device)
            code = model.part.encode(frames)
            lost.append(float(model.part.distance(frames)))
            off.append(float((model.part.decode(code) - frames).abs().mean()))
            codes.append(code.flatten())
        share = torch.cat(codes).bincount(minlength=model.part.codes).float()
        share = share[share > 0] / share.sum()
        return {
            "held-out loss": float(np.mean(lost)),
            "log-mel distance": float(np.mean(off)),
            "code entropy": float(-(share * share.log()).sum()),
            "codes used": float(len(share)),
        }


# ---- voices


class VoiceLearning(nn.Module):
    """A voice as something that has a loss: what its tokens surprise it, and how far off its lengths are."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.part = voice

    def forward(
        self, said: Tensor, there: Tensor, shares: Tensor, logs: Tensor, read: Tensor, label: Tensor, counts: Tensor
    ) -> Tensor:
        surprise, off = self.measured(said, there, shares, logs, read, label, counts)
        return surprise[counts].mean() + _TIMING * off

    def measured(
        self, said: Tensor, there: Tensor, shares: Tensor, logs: Tensor, read: Tensor, label: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Nats of every token [B, T], and how far off the logarithms of lengths are on the average."""
        voice = self.part
        what, long = voice.reader(said, there)
        states = voice.states(read, voice.reader.placed(what, shares, read.shape[1]))
        each = F.cross_entropy(voice.logits(states).flatten(0, 1).float(), label.flatten(), reduction="none")
        return each.view_as(label), (long.float() - logs)[there].abs().mean()


class VoiceCourse:
    """Saying the tokens of utterances, some of what is read being something else."""

    def __init__(
        self, utterances: Sequence[Utterance], codes: int, batch: int, seed: int, device: torch.device
    ) -> None:
        self.seed, self.size, self.codes, self.device = seed, batch, codes, device
        self.learned = [one for one in utterances if not one.held]
        self.held = [one for one in utterances if one.held][: _JUDGED[device.type != "cpu"]]
        if not self.learned or not self.held:
            raise InvalidOption(
                f"{len(self.learned)} utterances to learn from and {len(self.held)} to judge by: too few"
            )
        self._epoch, self._groups = -1, self._grouped(0)
        self._each = len(self._groups)  # epochs differ a little in how many batches they make: count by the first

    def _grouped(self, epoch: int) -> list[list[int]]:
        """Utterances of similar length side by side, in batches of about so many tokens."""
        draw = np.random.default_rng([self.seed, epoch])
        sizes = np.array([len(one.codes) for one in self.learned])
        order = np.argsort(sizes * draw.uniform(0.85, 1.15, len(sizes)))
        groups, group = list[list[int]](), list[int]()
        for place in order.tolist():
            longest = max([sizes[place], *(sizes[one] for one in group)])
            if group and (len(group) + 1) * longest > self.size:
                groups.append(group)
                group = []
            group.append(place)
        groups.append(group)
        draw.shuffle(groups)
        return groups

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        epoch, at = divmod(number, self._each)
        if epoch != self._epoch:
            self._epoch, self._groups = epoch, self._grouped(epoch)
        group = self._groups[at % len(self._groups)]
        return self.rows([self.learned[place] for place in group], np.random.default_rng([self.seed, 1, number]))

    def rows(self, chosen: Sequence[Utterance], noise: np.random.Generator | None = None) -> tuple[Tensor, ...]:
        """Padded tensors: phonemes, where there are any, their tokens, the logarithm of those at the usual speed; what
        is read, what is to be said, and where that counts."""
        wide, long = max(len(one.phonemes) for one in chosen), 1 + max(len(one.codes) for one in chosen)
        said, shares = np.zeros((2, len(chosen), wide), np.int64)
        there, logs = np.zeros((len(chosen), wide), bool), np.zeros((len(chosen), wide), np.float32)
        read, label = np.full((2, len(chosen), long), self.codes)
        counts = np.zeros((len(chosen), long), bool)
        for row, one in enumerate(chosen):
            size, tokens = len(one.phonemes), len(one.codes)
            said[row, :size], shares[row, :size], there[row, :size] = one.phonemes, one.shares, True
            logs[row, :size] = np.log(np.clip(one.lengths / FRAMES * one.speed, 0.3, 40))
            seen = one.codes
            if noise is not None:
                wrong = noise.random(tokens) < _NOISE * noise.random()
                seen = np.where(wrong, noise.choice(one.codes, tokens), seen)
            read[row, 1 : tokens + 1], label[row, :tokens], counts[row, : tokens + 1] = seen, one.codes, True
        parts = (said, there, shares, logs, read, label, counts)
        return tuple(torch.from_numpy(part).to(self.device) for part in parts)

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, VoiceLearning)
        surprise, off, ends = [], [], []
        for start in range(0, len(self.held), 16):
            rows = self.rows(self.held[start : start + 16])
            each, far = model.measured(*rows)
            surprise.append(each[rows[6]].float())
            ends.append(each[(rows[5] == self.codes) & rows[6]].float())
            off.append(float(far))
        return {
            "held-out nats a token": float(torch.cat(surprise).mean()),
            "nats of the end": float(torch.cat(ends).mean()),
            "log length off by": float(np.mean(off)),
        }
