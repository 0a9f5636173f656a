"""Trains the vocoder: against the spectra of the teacher's sound, HiFi-GAN's, at four resolutions, and then against
discriminators that learn to tell both apart (HiFi-GAN's of periods, arXiv 2010.05646, and those of spectra as in Vocos,
arXiv 2306.00814). Phases are compared too: the teacher's follow from the frames. Independent of recipes and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from outrider.core.assets import npz
from outrider.core.errors import InvalidOption
from outrider.core.training.model_training import Save
from outrider.core.training.trainer import Autocast, Progress, Share, Validation
from outrider.speech.codec import Codec
from outrider.speech.mel import HOP, SILENCE
from outrider.speech.spectral_vocoder import SpectralVocoder
from outrider.speech.training.data import Utterance
from outrider.speech.vocoder import CONTEXT, Vocoder, VocoderStream

_FRAMES = 64  # of a training example, and CONTEXT on either side
_RESOLUTIONS = ((2048, 512), (1024, 256), (512, 128), (256, 64))  # window, hop
_ALONE = 0.5  # share of a run in which the discriminators don't take part
_PHASES = (0.7, 0.1)  # weight of the complex difference: alone, and beside the discriminators
_SPECTRA, _FEATURES = 3.0, 2.0  # weights beside the discriminators
_PERIODS = (2, 3, 5, 7, 11)
_CHANNELS = (12, 32, 64, 96)  # of the discriminators of periods
_WIDTH = 8  # of those of spectra
_VALIDATED = 12  # held-out sounds
_SPEECH = (1200.0, 14_400.0)  # seconds of sound to train on: on a CPU, elsewhere
_HELD_OUT = "held-out-"
_LOUDEST = 32767  # sounds are kept in 16 bits


# ---- data


def teach(utterances: Sequence[Utterance], codec: Codec, teacher: Callable[[], Vocoder], folder: Path) -> None:
    """Let the teacher make the sound of some held-out utterances and of others, until the folder has enough."""
    from tqdm import tqdm

    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(utterances)).tolist()
    held_out = [index for index in order if utterances[index].held_out][:_VALIDATED]
    training = [index for index in order if not utterances[index].held_out]
    seconds = np.cumsum([utterances[index].seconds for index in training])
    enough = training[: int(np.searchsorted(seconds, _SPEECH[codec.mean.device.type != "cpu"])) + 1]
    names = {f"{_HELD_OUT if utterances[index].held_out else ''}{index:06}.npz": index for index in held_out + enough}
    missing = {folder / name: index for name, index in names.items() if not (folder / name).is_file()}
    made = teacher() if missing else None
    for path, index in tqdm(missing.items(), "Making sound", disable=None, leave=False):
        assert made is not None
        codes = torch.from_numpy(utterances[index].codes.astype(np.int64))[None].to(codec.mean.device)
        with torch.no_grad():
            mel = codec.decode(codes)[0].float()
            sound = VocoderStream(made).finish(mel).float()
        samples = (sound.clamp(-1, 1) * _LOUDEST).round().to(torch.int16)
        npz.save(path, [], mel=mel.half().cpu().numpy(), sound=samples.cpu().numpy())


class SoundTask:
    """Crops of mel frames with the teacher's sound."""

    def __init__(self, folder: Path, batch: int, seed: int, device: torch.device) -> None:
        sounds = {path.name: npz.load(path, ("mel", "sound"))[1] for path in sorted(folder.glob("*.npz"))}
        pairs: dict[str, tuple[Tensor, Tensor]] = {
            name: (torch.from_numpy(each["mel"]).float(), torch.from_numpy(each["sound"]).float() / _LOUDEST)
            for name, each in sounds.items()
        }
        self.held_out = [pair for name, pair in pairs.items() if name.startswith(_HELD_OUT)][:_VALIDATED]
        self.training = [pair for name, pair in pairs.items() if not name.startswith(_HELD_OUT)]
        if not self.training or not self.held_out:
            raise InvalidOption(
                "there is no speech to train on, or none held out to validate with; give more sentences"
            )
        self.size, self.seed, self.device = batch, seed, device
        frames = torch.cat([mel for mel, _ in self.training], 1)
        self.mean, self.scale = frames.mean(1, keepdim=True), frames.std(1, keepdim=True).clamp(min=0.1)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Frames [B, 80, CONTEXT + 64 + CONTEXT], and the sound [B, 256 x 64] of those in the middle."""
        rng = np.random.default_rng([self.seed, number])
        crops = [
            self._crop(*self.training[int(index)], rng) for index in rng.integers(0, len(self.training), self.size)
        ]
        mels, sounds = zip(*crops, strict=True)
        return torch.stack(mels).to(self.device), torch.stack(sounds).to(self.device)

    def _crop(self, mel: Tensor, sound: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """With some silence around an utterance that begins or ends in the crop."""
        start = int(rng.integers(-CONTEXT, max(mel.shape[1] + CONTEXT - _FRAMES, 1)))
        around = F.pad(mel, (2 * CONTEXT, _FRAMES + 2 * CONTEXT), value=SILENCE)
        after = F.pad(sound, (CONTEXT * HOP, (_FRAMES + 2 * CONTEXT) * HOP))
        first = (start + CONTEXT) * HOP
        return (
            around[:, start + CONTEXT : start + _FRAMES + 3 * CONTEXT],
            after[first : first + _FRAMES * HOP],
        )


# ---- losses


@cache
def _window(size: int, device: torch.device) -> Tensor:
    return torch.hann_window(size, device=device)


def _spectrum(sound: Tensor, size: int, hop: int) -> Tensor:
    """[B, F, T]"""
    return torch.stft(sound, size, hop, window=_window(size, sound.device), center=False, return_complex=True)


def _magnitude(spectrum: Tensor) -> Tensor:
    return (spectrum.real.square() + spectrum.imag.square() + 1e-7).sqrt()


def spectral_distance(made: Tensor, sound: Tensor, phases: float) -> Tensor:
    """The distance of magnitudes, of their logarithms and, with this weight, of complex spectra, in the sound's mean
    magnitude; averaged over resolutions."""
    total = torch.zeros((), device=sound.device)
    for size, hop in _RESOLUTIONS:
        ours, theirs = _spectrum(made, size, hop), _spectrum(sound, size, hop)
        mean = theirs.abs().mean((1, 2), keepdim=True) + 1e-4 * size**0.5
        one, other, least = _magnitude(ours), _magnitude(theirs), 1e-3 * size**0.5
        total = total + 0.5 * ((one - other).abs() / mean).mean()
        total = total + ((one + least).log() - (other + least).log()).abs().mean()
        total = total + phases * (_magnitude(ours - theirs) / mean).mean()
    return total / len(_RESOLUTIONS)


class _OfPeriod(nn.Module):
    """Judges samples that are `period` apart."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period, widths = period, (1, *_CHANNELS)
        self.layers = nn.ModuleList([nn.Conv2d(ins, outs, (5, 1), (3, 1), (2, 0)) for ins, outs in pairwise(widths)])
        self.layers += [nn.Conv2d(widths[-1], widths[-1], (5, 1), padding=(2, 0))]
        self.last = nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0))

    def forward(self, sound: Tensor) -> list[Tensor]:
        whole = sound.shape[1] // self.period * self.period
        return _judged(self.layers, self.last, sound[:, :whole].view(len(sound), 1, -1, self.period))


class _OfSpectrum(nn.Module):
    """Judges a complex spectrum, whose magnitudes are compressed."""

    def __init__(self, size: int, hop: int) -> None:
        super().__init__()
        self.size, self.hop, width = size, hop, _WIDTH
        shapes = (
            (2, width, (1, 1)),
            (width, width, (2, 1)),
            (width, 2 * width, (2, 2)),
            (2 * width, 2 * width, (2, 2)),
        )
        self.layers = nn.ModuleList(nn.Conv2d(ins, outs, (9, 3), stride, (4, 1)) for ins, outs, stride in shapes)
        self.layers += [nn.Conv2d(2 * width, 2 * width, 3, padding=1)]
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, sound: Tensor) -> list[Tensor]:
        spectrum = torch.view_as_real(_spectrum(sound, self.size, self.hop)).movedim(-1, 1) / self.size**0.5
        magnitude = (spectrum.square().sum(1, keepdim=True) + 1e-8).sqrt()
        return _judged(self.layers, self.last, spectrum / magnitude * ((magnitude + 1e-3).log() + 7) / 3)


def _judged(layers: nn.ModuleList, last: nn.Module, x: Tensor) -> list[Tensor]:
    """The features of each layer, and last the judgement."""
    found = []
    for layer in layers:
        x = F.leaky_relu(layer(x), 0.1)
        found.append(x)
    return [*found, last(x)]


class Discriminators(nn.Module):
    """Sound [B, N] -> the features and the judgement of each, near 1 for the teacher's."""

    def __init__(self) -> None:
        super().__init__()
        spectra = (_OfSpectrum(size, hop) for size, hop in _RESOLUTIONS[1:])
        self.parts = nn.ModuleList([*(_OfPeriod(period) for period in _PERIODS), *spectra])
        for module in list(self.modules()):
            if isinstance(module, nn.Conv2d):
                weight_norm(module)

    def forward(self, sound: Tensor) -> list[list[Tensor]]:
        return [part(sound) for part in self.parts]


class VocoderTraining:
    """The vocoder and its discriminators; see outrider.core.training.trainer.Training."""

    maximize = False

    def __init__(self, name: str, vocoder: SpectralVocoder, task: SoundTask, save: Save, *, judged: bool) -> None:
        """`judged`: the discriminators take part from the beginning."""
        self.name, self.task, self._save, self._alone = name, task, save, 0.0 if judged else _ALONE
        self._judges = Discriminators().to(task.device)
        self.models: dict[str, nn.Module] = {name: vocoder, "discriminators": self._judges}
        self._made: Tensor | None = None
        self._judging = judged

    def batches(self, progress: Progress, share: Share, rank: int, world: int) -> Iterator[tuple[Any, ...]]:
        while True:
            yield (*self.task.batch(progress.steps * world + rank), share() >= self._alone)

    def loss(self, name: str, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        frames, sound, judged = batch
        self._judging = judged
        if name == self.name:
            made: Tensor = model(frames)[:, CONTEXT * HOP : -CONTEXT * HOP]
            self._made = made.detach()
            distance = spectral_distance(made, sound, _PHASES[judged])
            return _SPECTRA * distance + self._deceit(made, sound) if judged else distance
        assert self._made is not None
        if not judged:
            return torch.zeros((), device=sound.device, requires_grad=True)
        each = zip(model(sound), model(self._made), strict=True)
        return sum(
            ((1 - real[-1]).square().mean() + false[-1].square().mean() for real, false in each), torch.zeros(())
        )

    def _deceit(self, made: Tensor, sound: Tensor) -> Tensor:
        """How far the discriminators are from taking it for the teacher's, and their features from those of it."""
        judges = self._judges.requires_grad_(False)
        with torch.no_grad():
            wanted = judges(sound)
        each = list(zip(judges(made), wanted, strict=True))
        self._judges.requires_grad_(True)
        judged = torch.stack([(1 - ours[-1]).square().mean() for ours, _ in each]).mean()
        features = [
            torch.stack([(a - b).abs().mean() / (b.abs().mean() + 1e-3) for a, b in pairs]).mean()
            for ours, theirs in each
            for pairs in [list(zip(ours[:-1], theirs[:-1], strict=True))]
        ]
        return judged + _FEATURES * torch.stack(features).mean()

    def validate(self, models: Mapping[str, nn.Module], autocast: Autocast) -> Mapping[str, Validation]:
        vocoder, distances = models[self.name], []
        for mel, sound in self.task.held_out:
            frames = F.pad(mel, (0, CONTEXT), value=SILENCE)[None].to(self.task.device)
            made = vocoder(frames)[:, : sound.shape[0]]
            theirs = sound[None, : made.shape[1]].to(self.task.device)
            distances.append([float(spectral_distance(made, theirs, weight)) for weight in (0.0, 1.0)])
        magnitudes, whole = np.mean(distances, 0).tolist()
        measures = {"held-out spectral distance": magnitudes, "of complex spectra": whole - magnitudes}
        # discriminators make it sound better further from the spectra: of their weights the last are kept
        return {self.name: Validation(0.0 if self._judging else magnitudes, measures)}

    def save(self, name: str, model: nn.Module, provenance: Mapping[str, Any]) -> None:
        self._save(model, provenance)
