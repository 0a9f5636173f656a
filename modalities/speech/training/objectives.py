"""What is learned for speech: batches by number, and what a part loses on one.

A listener hears phonemes in frames; a codec brings frames back, so that a listener hears the same where there is one;
voices say tokens. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.errors import InvalidOption
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.training import data
from outrider.speech.training.data import Utterance
from outrider.speech.training.phoneme_recogniser import PhonemeRecogniser
from outrider.speech.voice import Voice

JUDGED = (40, 400)  # utterances that judging goes through at most, on a CPU and elsewhere
_CROP = 128  # frames that are learned from at a time
_NOISE = 0.25  # of what a voice reads of the speech is something else, at most
_TIMING = 0.3  # how much the lengths of phonemes count beside the tokens


# ---- frames


class FramesTask:
    """Crops of frames, and of each the phoneme that is being said."""

    def __init__(self, utterances: Sequence[Utterance], batch: int, seed: int, device: torch.device) -> None:
        learned = [one for one in utterances if not one.held and one.mel.shape[1] >= _CROP]
        if not learned:
            raise InvalidOption(f"there is no speech of {_CROP} frames or more to learn from")
        self.seed, self.size, self.device = seed, batch, device
        self.frames = torch.from_numpy(np.concatenate([one.mel for one in learned], 1)).to(device)
        self.said = torch.from_numpy(np.concatenate([_said(one) for one in learned])).to(device)
        ends = np.cumsum([one.mel.shape[1] for one in learned])
        self.starts = np.concatenate(
            [np.arange(end - one.mel.shape[1], end - _CROP + 1) for one, end in zip(learned, ends, strict=True)]
        )
        some = data.unpacked(self.frames[:, :: max(self.frames.shape[1] // 100_000, 1)].cpu().numpy())
        self.mean, self.scale = some.mean(1, keepdim=True), some.std(1, keepdim=True).clamp(min=0.1)
        held = [one for one in utterances if one.held][: JUDGED[device.type != "cpu"]]
        self.held = [(one.mel, torch.from_numpy(_said(one)).to(device)) for one in held]

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        draw = np.random.default_rng([self.seed, number])
        starts = torch.from_numpy(draw.choice(self.starts, self.size)).to(self.device)
        index = starts[:, None] + torch.arange(_CROP, device=self.device)
        crops = self.frames[:, index].permute(1, 0, 2).float() * data.STEP + data.LOWEST
        return crops, self.said[index]

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, RecogniserObjective | CodecObjective)
        each = [model.judged(data.unpacked(mel)[None].to(self.device), said[None]) for mel, said in self.held]
        found = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        if isinstance(model, CodecObjective):
            codes = [model.part.encode(data.unpacked(mel)[None].to(self.device)).flatten() for mel, _ in self.held]
            share = torch.cat(codes).bincount(minlength=model.part.codes).float()
            share = share[share > 0] / share.sum()
            found |= {"code entropy": float(-(share * share.log()).sum()), "codes used": float(len(share))}
        return found


def _said(one: Utterance) -> np.ndarray:
    """[T] the phoneme of every frame."""
    return np.repeat(one.phonemes, one.lengths)


class RecogniserObjective(nn.Module):
    """The listener as something that has a loss."""

    def __init__(self, listener: PhonemeRecogniser) -> None:
        super().__init__()
        self.part = listener

    def forward(self, mel: Tensor, said: Tensor) -> Tensor:
        return F.cross_entropy(self.part.hears(mel)[1].float(), said)

    def judged(self, mel: Tensor, said: Tensor) -> dict[str, float]:
        logits = self.part.hears(mel)[1].float()
        right = (logits.argmax(1) == said).float().mean()
        return {"held-out nats a frame": float(F.cross_entropy(logits, said)), "frames heard": float(right)}


class CodecObjective(nn.Module):
    """The codec as something that has a loss; of one whose codes are to stay, only the decoder learns."""

    def __init__(self, codec: Codec, listener: PhonemeRecogniser | None = None, stays: bool = False) -> None:
        super().__init__()
        self.part = codec
        self._listener = [listener.eval().requires_grad_(False)] if listener else []  # in a list: no part of it
        codec.encoder.requires_grad_(not stays)

    def forward(self, mel: Tensor, said: Tensor) -> Tensor:
        back = self.part.back(mel)
        lost = self.part.distance(mel, back)
        return lost + sum(one.to(mel.device).misheard(back, mel, said) for one in self._listener)

    def judged(self, mel: Tensor, said: Tensor) -> dict[str, float]:
        back = self.part.back(mel)
        found = {"held-out loss": float(self(mel, said)), "log-mel distance": float((back - mel).abs().mean())}
        for one in self._listener:
            heard = one.to(mel.device).hears(back)[1].argmax(1)
            found["frames heard"] = float((heard == said).float().mean())
        return found


# ---- voices


class VoiceObjective(nn.Module):
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


class VoiceTask:
    """Saying the tokens of utterances, some of what is read being something else."""

    def __init__(
        self, utterances: Sequence[Utterance], codes: int, batch: int, seed: int, device: torch.device
    ) -> None:
        self.seed, self.size, self.codes, self.device = seed, batch, codes, device
        self.learned = [one for one in utterances if not one.held]
        self.held = [one for one in utterances if one.held][: JUDGED[device.type != "cpu"]]
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
        assert isinstance(model, VoiceObjective)
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
