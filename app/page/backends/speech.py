"""The page's backend for speech, with our voice or a published model."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from outrider.app.page.backends.interface import Choice, Knob, LazyModel, ModelSpec, RunSettings
from outrider.app.page.recordings import Modality, Recording
from outrider.app.viz import image_grid, waveform
from outrider.core.errors import InvalidOption
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.trace import Step
from outrider.speech import PublishedSpeech, Sound, SpeechModel, load
from outrider.speech.hub import model
from outrider.speech.resolve_drafter import drafters, listed_drafters, rules

_POINTS = 320  # of the envelope
_COLUMNS = 440  # width of the mel spectrogram in pixels


class SpeechBackend:
    """Speech by our voice, by a published model (`spec`), or by the model that `load_` returns."""

    name: Modality = "speech"
    title = "Speech"
    prompt_label = "text"
    lessons: Mapping[str, str] = {}
    examples: tuple[str, ...] = (
        "Good morning.",
        "The quick brown fox jumps over the lazy dog.",
        "Please call Stella, and ask her to bring these things from the store.",
    )
    default_temperature: float = 0.6
    default_drafter = JACOBI.name
    defaults: Modality | None = name
    is_server = False
    extra_options: tuple[Knob | Choice, ...] = (Knob("speed", 0.5, 2, 0.1, 1),)

    def __init__(
        self,
        load_: Callable[[], SpeechModel] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        folder: Path | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        """`folder` contains weights of your own training for our voice."""
        self.device = device
        self._spec, self._folder, self._given = spec, folder, load_ is not None
        self._lazy: LazyModel[SpeechModel | PublishedSpeech]
        if spec is not None:
            self._lazy = LazyModel(lambda: _audible(spec.load(model.load, device, dtype)), spec.model)
            self.defaults = None  # the defaults of speech were measured on our own voice
            self.examples, self.extra_options = (
                _PUBLISHED,
                (Knob("max_new_tokens", 1, 1500, 1, 250),),
            )  # frames or tokens
        else:
            load_own = load_ or (lambda: load(device=device, dtype=dtype, folder=folder))
            self._lazy = LazyModel(load_own, "our voice (43 tokens per second)")

    @property
    def description(self) -> str:
        return self._lazy.description

    @property
    def loaded(self) -> bool:
        return self._lazy.loaded

    def load(self) -> SpeechModel | PublishedSpeech:
        return self._lazy.get()

    def drafters(self) -> list[str]:
        if self._spec is not None:
            small = self._spec.draft_model is not None
            return listed_drafters(drafters(views=False), draft=small, published=self._spec.model).ready
        return listed_drafters(draft=not self._given, heads=not self._given, folder=self._folder).ready

    def rules(self) -> list[str]:
        return rules()

    def begin(self, settings: RunSettings) -> SpeechGeneration | PublishedSpeechGeneration:
        sp = self.load()
        return (
            PublishedSpeechGeneration(sp, settings)
            if isinstance(sp, PublishedSpeech)
            else SpeechGeneration(sp, settings)
        )


def _audible(sp: PublishedSpeech) -> PublishedSpeech:
    """The model, if it generates sound from text; speech recognisers are refused."""
    if not sp.makes_sound:
        raise InvalidOption(
            f"{sp.name} transcribes speech, which the page does not support; use the terminal: "
            f"outrider speech FILE.wav --model {sp.name}"
        )
    return sp


_PUBLISHED = ("Good morning.", "a slow waltz for two guitars", "rain on a tin roof, thunder far away")


class SpeechGeneration:
    """Speech in progress."""

    def __init__(self, sp: SpeechModel, settings: RunSettings) -> None:
        self._sp, self._settings = sp, settings
        self._steps: list[Step] = []
        self._heard: list[np.ndarray] = []
        self._stream = sp.stream(settings.prompt, **settings.options(), **settings.extra)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        piece = next(self._stream)
        self._steps.append(piece.step)
        if len(piece.samples):
            self._heard.append(piece.samples)
        return piece.step

    def close(self) -> None:
        self._stream.close()

    def preview(self) -> str:
        result = self._stream.results[0]
        seconds = _seconds(result.sound, result.starts)
        return waveform.strip(self._steps, result.starts, seconds, wave=envelope(result.sound))

    def recording(self) -> Recording:
        result = self._stream.results[0]
        return Recording(
            "speech",
            result.trace,
            self._settings.prompt,
            sound=packed(result.sound) if len(result.sound.samples) else "",
            starts=tuple(result.starts),
            words=tuple(_words(self._settings.prompt, result.sound.seconds)),
        )


class PublishedSpeechGeneration:
    """Sound of a published model in progress. Its codec decodes the whole sound at the end."""

    def __init__(self, sp: PublishedSpeech, settings: RunSettings) -> None:
        self._sp, self._settings = sp, settings
        given = {name: value for name, value in settings.options().items() if name != "logprobs"}
        self._stream = sp.stream(settings.prompt, max_new_tokens=int(settings.extra["max_new_tokens"]), **given)
        self._steps: list[Step] = []

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self._steps.append(next(self._stream))
        return self._steps[-1]

    def close(self) -> None:
        self._stream.close()

    def preview(self) -> str:
        starts = _even_starts(self._steps, 0.0)
        return waveform.strip(self._steps, starts, len(starts) * _NOMINAL)

    def recording(self) -> Recording:
        result = self._stream.result
        sound = None if result.outcome is None else self._sp.to_sound(result)
        starts = _even_starts(self._steps, 0.0 if sound is None else sound.seconds)
        wav = packed(sound) if sound is not None and len(sound.samples) else ""
        return Recording("speech", result.trace, self._settings.prompt, sound=wav, starts=tuple(starts))


_NOMINAL = 0.02  # assumed seconds per token while there is no sound


def _even_starts(steps: list[Step], seconds: float) -> list[float]:
    """The start of each token in seconds, if all are equally long."""
    count = sum(len(step.emitted) for step in steps)
    duration = seconds / count if count and seconds else _NOMINAL
    return [round(index * duration, 5) for index in range(count)]


def _seconds(sound: Sound, starts: list[float]) -> float:
    step = starts[-1] / (len(starts) - 1) if len(starts) > 1 else 0.05
    return max(sound.seconds, starts[-1] + step if starts else 0.0)


def _words(text: str, seconds: float) -> list[tuple[float, str]]:
    """The words of the text with approximate start times, estimated from their lengths."""
    words = text.split()
    total = sum(map(len, words)) + len(words) or 1
    timed, position = [], 0.0
    for word in words:
        timed.append((seconds * position / total, word[:40]))
        position += len(word) + 1
    return timed


def packed(sound: Sound) -> str:
    """The sound as a WAV file in base64."""
    return b64encode(sound.wav()).decode()


def unpacked(data: str) -> Sound:
    """The sound of a WAV file in base64."""
    return Sound.load(BytesIO(b64decode(data)))


def envelope(sound: Sound, points: int = _POINTS) -> list[float]:
    """The peak amplitude over time, scaled to 0 to 1; empty if the sound is too short."""
    if len(sound.samples) < points:
        return []
    parts = np.array_split(np.abs(sound.samples), points)
    heights = np.array([part.max() for part in parts])
    return [round(float(height), 3) for height in heights / max(float(heights.max()), 1e-6)]


def mel_picture(sound: Sound) -> str:
    """The mel spectrogram as a data URL of an image; empty if the sound is too short."""
    from PIL import Image

    from outrider.app.page.backends.image import data_url
    from outrider.speech.mel import WINDOW, mel_frames

    if len(sound.samples) < 2 * WINDOW:
        return ""
    mel = mel_frames(torch.from_numpy(sound.samples.copy()))
    low, high = mel.quantile(0.02), mel.max()
    shares = ((mel - low) / (high - low).clamp(min=1e-6)).clamp(0, 1).flip(0)
    table = torch.tensor([[int(image_grid.ramp(i / 255)[k : k + 2], 16) for k in (1, 3, 5)] for i in range(256)])
    pixels = table[(shares * 255).round().long()].byte().numpy()
    return data_url(Image.fromarray(pixels).resize((_COLUMNS, 76)))
