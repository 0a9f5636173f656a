"""Losses, batches and validation measures of the speech models.

Tasks of outrider.core.training.model_training: recognising the phoneme of each mel frame, reconstructing frames through
codes, and predicting an utterance's codes from its phonemes. An objective is a module whose forward pass is the loss.
Independent of files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.errors import InvalidOption
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.phoneme_recogniser import PhonemeRecogniser
from outrider.speech.training import data
from outrider.speech.training.data import Utterance
from outrider.speech.voice import Voice

VALIDATION_SIZE = (40, 400)  # utterances to validate on: on a CPU, elsewhere
_CROP = 128  # frames per training example
_NOISE = 0.25  # the largest share of input codes that a voice reads as other codes
_DURATION_WEIGHT = 0.3  # of the durations' loss, relative to the codes'


# ---- frames


class FramesTask:
    """Crops of mel frames with the phoneme of each frame."""

    def __init__(self, utterances: Sequence[Utterance], batch: int, seed: int, device: torch.device) -> None:
        training = [each for each in utterances if not each.held_out and each.mel.shape[1] >= _CROP]
        if not training:
            raise InvalidOption(f"no training utterance has {_CROP} frames or more; make more speech first")
        self.seed, self.size, self.device = seed, batch, device
        self.frames = torch.from_numpy(np.concatenate([each.mel for each in training], 1)).to(device)
        self.phonemes = torch.from_numpy(np.concatenate([_frame_phonemes(each) for each in training])).to(device)
        lengths = [each.mel.shape[1] for each in training]
        ends = np.cumsum(lengths)
        self.starts = np.concatenate(
            [np.arange(end - length, end - _CROP + 1) for length, end in zip(lengths, ends, strict=True)]
        )
        sample = data.dequantise(self.frames[:, :: max(self.frames.shape[1] // 100_000, 1)].cpu().numpy())
        self.mean, self.scale = sample.mean(1, keepdim=True), sample.std(1, keepdim=True).clamp(min=0.1)
        held_out = [each for each in utterances if each.held_out][: VALIDATION_SIZE[device.type != "cpu"]]
        self.validation = [(each.mel, torch.from_numpy(_frame_phonemes(each)).to(device)) for each in held_out]

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        rng = np.random.default_rng([self.seed, number])
        starts = torch.from_numpy(rng.choice(self.starts, self.size)).to(self.device)
        index = starts[:, None] + torch.arange(_CROP, device=self.device)
        crops = self.frames[:, index].permute(1, 0, 2).float() * data.STEP + data.LOWEST
        return crops, self.phonemes[index]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, RecogniserObjective | CodecObjective)
        mels = [data.dequantise(mel)[None].to(self.device) for mel, _ in self.validation]
        each = [model.measure(mel, phonemes[None]) for mel, (_, phonemes) in zip(mels, self.validation, strict=True)]
        measures = {name: float(np.mean([values[name] for values in each])) for name in each[0]}
        if isinstance(model, CodecObjective):
            codes = [model.part.encode(mel).flatten() for mel in mels]
            share = torch.cat(codes).bincount(minlength=model.part.codes).float()
            share = share[share > 0] / share.sum()
            measures |= {"code entropy": float(-(share * share.log()).sum()), "codes used": float(len(share))}
        return measures


def _frame_phonemes(utterance: Utterance) -> np.ndarray:
    """The phoneme of each frame [T]."""
    return np.repeat(utterance.phonemes, utterance.lengths)


class RecogniserObjective(nn.Module):
    """The phoneme recogniser and its cross-entropy."""

    def __init__(self, recogniser: PhonemeRecogniser) -> None:
        super().__init__()
        self.part = recogniser

    def forward(self, mel: Tensor, phonemes: Tensor) -> Tensor:
        return F.cross_entropy(self.part.recognise(mel)[1].float(), phonemes)

    def measure(self, mel: Tensor, phonemes: Tensor) -> dict[str, float]:
        logits = self.part.recognise(mel)[1].float()
        accuracy = (logits.argmax(1) == phonemes).float().mean()
        return {"held-out nats per frame": float(F.cross_entropy(logits, phonemes)), "frame accuracy": float(accuracy)}


class CodecObjective(nn.Module):
    """The codec and its reconstruction loss, to which a recogniser adds its perceptual loss. With `freeze_encoder` only
    the decoder is trained, so codes keep their meaning."""

    def __init__(self, codec: Codec, recogniser: PhonemeRecogniser | None = None, freeze_encoder: bool = False) -> None:
        super().__init__()
        self.part = codec
        # a list hides it from nn.Module
        self._recognisers = [recogniser.eval().requires_grad_(False)] if recogniser else []
        codec.encoder.requires_grad_(not freeze_encoder)

    def forward(self, mel: Tensor, phonemes: Tensor) -> Tensor:
        decoded = self.part.reconstruct(mel)
        loss = self.part.distance(mel, decoded)
        return loss + sum(each.to(mel.device).perceptual_loss(decoded, mel, phonemes) for each in self._recognisers)

    def measure(self, mel: Tensor, phonemes: Tensor) -> dict[str, float]:
        decoded = self.part.reconstruct(mel)
        distance = float((decoded - mel).abs().mean())
        measures = {"held-out loss": float(self(mel, phonemes)), "log-mel distance": distance}
        for recogniser in self._recognisers:
            recognised = recogniser.to(mel.device).recognise(decoded)[1].argmax(1)
            measures["frame accuracy"] = float((recognised == phonemes).float().mean())
        return measures


# ---- voices


class VoiceObjective(nn.Module):
    """A voice and its loss: cross-entropy of codes, and the error of log durations."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.part = voice

    def forward(
        self,
        phonemes: Tensor,
        present: Tensor,
        durations: Tensor,
        log_durations: Tensor,
        inputs: Tensor,
        labels: Tensor,
        mask: Tensor,
    ) -> Tensor:
        nll, error = self.measure(phonemes, present, durations, log_durations, inputs, labels)
        return nll[mask].mean() + _DURATION_WEIGHT * error

    def measure(
        self,
        phonemes: Tensor,
        present: Tensor,
        durations: Tensor,
        log_durations: Tensor,
        inputs: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood [B, T] of each label in nats, and the mean absolute error of log durations."""
        voice = self.part
        encoded, predicted = voice.reader(phonemes, present)
        states = voice.states(inputs, voice.reader.spread(encoded, durations, inputs.shape[1]))
        nll = F.cross_entropy(voice.logits(states).flatten(0, 1).float(), labels.flatten(), reduction="none")
        return nll.view_as(labels), (predicted.float() - log_durations)[present].abs().mean()


class VoiceTask:
    """Batches of utterances as phonemes and codes, with noise in the input codes."""

    def __init__(
        self, utterances: Sequence[Utterance], codes: int, batch: int, seed: int, device: torch.device
    ) -> None:
        self.seed, self.size, self.codes, self.device = seed, batch, codes, device
        self.training = [utterance for utterance in utterances if not utterance.held_out]
        held_out = [utterance for utterance in utterances if utterance.held_out]
        self.validation = held_out[: VALIDATION_SIZE[device.type != "cpu"]]
        if not self.training or not self.validation:
            raise InvalidOption(
                f"there are {len(self.training)} training and {len(held_out)} held-out utterances; give one of each"
            )
        self._epoch, self._batches = -1, self._epoch_batches(0)
        self._count = len(self._batches)  # epochs differ slightly in length; batch numbers count by the first one's

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        """The indices of training utterances in batches of at most `size` padded tokens. The utterances of a batch have
        similar lengths."""
        rng = np.random.default_rng([self.seed, epoch])
        lengths = np.array([len(utterance.codes) for utterance in self.training])
        order = np.argsort(lengths * rng.uniform(0.85, 1.15, len(lengths)))
        batches, batch = list[list[int]](), list[int]()
        for index in order.tolist():
            longest = max(lengths[member] for member in (index, *batch))
            if batch and (len(batch) + 1) * longest > self.size:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
        rng.shuffle(batches)
        return batches

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        epoch, position = divmod(number, self._count)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._epoch_batches(epoch)
        batch = self._batches[position % len(self._batches)]
        return self.pad([self.training[index] for index in batch], np.random.default_rng([self.seed, 1, number]))

    def pad(self, utterances: Sequence[Utterance], noise: np.random.Generator | None = None) -> tuple[Tensor, ...]:
        """The arguments of VoiceObjective, padded: phonemes, which of them are present, their durations in tokens, and
        log durations at speed 1, each [B, P]; input tokens, labels and the mask of labels, each [B, T]."""
        count = len(utterances)
        width = max(len(utterance.phonemes) for utterance in utterances)
        length = 1 + max(len(utterance.codes) for utterance in utterances)
        phonemes, durations = np.zeros((2, count, width), np.int64)
        present, log_durations = np.zeros((count, width), bool), np.zeros((count, width), np.float32)
        inputs, labels = np.full((2, count, length), self.codes)
        mask = np.zeros((count, length), bool)
        for row, utterance in enumerate(utterances):
            size, tokens, codes = len(utterance.phonemes), len(utterance.codes), utterance.codes
            phonemes[row, :size], durations[row, :size] = utterance.phonemes, utterance.durations
            present[row, :size] = True
            log_durations[row, :size] = np.log(np.clip(utterance.lengths / FRAMES * utterance.speed, 0.3, 40))
            noisy = codes
            if noise is not None:
                wrong = noise.random(tokens) < _NOISE * noise.random()
                noisy = np.where(wrong, noise.choice(codes, tokens), codes)
            inputs[row, 1 : tokens + 1], labels[row, :tokens], mask[row, : tokens + 1] = noisy, codes, True
        arrays = (phonemes, present, durations, log_durations, inputs, labels, mask)
        return tuple(torch.from_numpy(array).to(self.device) for array in arrays)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, VoiceObjective)
        nll_parts, end_parts, errors = [], [], []
        for start in range(0, len(self.validation), 16):
            tensors = self.pad(self.validation[start : start + 16])
            labels, mask = tensors[5:]
            nll, error = model.measure(*tensors[:6])
            nll_parts.append(nll[mask].float())
            end_parts.append(nll[(labels == self.codes) & mask].float())
            errors.append(float(error))
        return {
            "held-out nats per token": float(torch.cat(nll_parts).mean()),
            "nats of the end token": float(torch.cat(end_parts).mean()),
            "log duration error": float(np.mean(errors)),
        }
