"""Speech for the page: the voice or a published model, what it is asked, and its sound with the rounds behind it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from outrider.app.page.backends.interface import Asked, Choice, Held, Knob, Named
from outrider.app.page.recordings import Modality, Recording
from outrider.app.viz import image_grid, waveform
from outrider.core.errors import InvalidOption
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.trace import Step
from outrider.speech import PublishedSpeech, Sound, SpeechModel, load
from outrider.speech.hub import model
from outrider.speech.resolve_drafter import listed_drafters, rules

_POINTS = 320  # of the envelope
_COLUMNS = 440  # of the mel picture


class Speech:
    """The subject."""

    name: Modality = "speech"
    title = "Speech"
    what = "text"
    examples: tuple[str, ...] = (
        "Good morning.",
        "The quick brown fox jumps over the lazy dog.",
        "Please call Stella, and ask her to bring these things from the store.",
    )
    heat: float = 0.6
    usual = JACOBI.name
    defaults: Modality | None = name
    fixed = False
    extras: tuple[Knob | Choice, ...] = (Knob("speed", 0.5, 2, 0.1, 1),)

    def __init__(
        self,
        load_: Callable[[], SpeechModel] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        folder: Path | None = None,
        named: Named | None = None,
    ) -> None:
        """Our own voice, or the published model that is named."""
        self._named, self._folder, self._given = named, folder, load_ is not None
        self._held: Held[SpeechModel | PublishedSpeech]
        if named is not None:
            self._held = Held(lambda: _audible(named.opened(model.load, device, dtype)))
            self.defaults = None  # they were measured on our own voice
            self.examples, self.extras = _PUBLISHED, (Knob("max_new_tokens", 1, 1500, 1, 250),)  # frames or tokens
        else:
            self._held = Held(load_ or (lambda: load(device=device, dtype=dtype, folder=folder)))

    @property
    def about(self) -> str:
        if self.loaded:
            return repr(self._held.get()).strip("<>")
        return self._named.model if self._named is not None else "a voice of 43 tokens a second"

    @property
    def loaded(self) -> bool:
        return self._held.there

    def load(self) -> SpeechModel | PublishedSpeech:
        return self._held.get()

    def drafters(self) -> list[str]:
        if self._named is not None:
            return listed_drafters(ours=False, draft=self._named.draft_model is not None).ready
        return listed_drafters(draft=not self._given, heads=not self._given, folder=self._folder).ready

    def rules(self) -> list[str]:
        return rules()

    def begin(self, asked: Asked) -> LiveSpeech | LivePublished:
        sp = self.load()
        return LivePublished(sp, asked) if isinstance(sp, PublishedSpeech) else LiveSpeech(sp, asked)


def _audible(sp: PublishedSpeech) -> PublishedSpeech:
    """One that can be heard: the panel asks with a text and plays what comes."""
    if not sp.makes_sound:
        raise InvalidOption(
            f"{sp.name} hears rather than speaks, and the page gives it nothing to hear; ask it in the terminal: "
            f"outrider speech FILE.wav --model {sp.name}"
        )
    return sp


_PUBLISHED = ("Good morning.", "a slow waltz for two guitars", "rain on a tin roof, thunder far away")


class LiveSpeech:
    """Speech under way."""

    def __init__(self, sp: SpeechModel, asked: Asked) -> None:
        self._sp, self._asked = sp, asked
        self._steps: list[Step] = []
        self._heard: list[np.ndarray] = []
        self._stream = sp.stream(asked.prompt, **asked.options(), **asked.extra)

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

    def seen(self) -> str:
        found = self._stream.results[0]
        return waveform.strip(
            self._steps, found.starts, _seconds(found.sound, found.starts), wave=envelope(found.sound)
        )

    def recording(self) -> Recording:
        found = self._stream.results[0]
        return Recording(
            "speech",
            found.trace,
            self._asked.prompt,
            sound=packed(found.sound) if len(found.sound.samples) else "",
            starts=tuple(found.starts),
            words=tuple(_words(self._asked.prompt, found.sound.seconds)),
        )


class LivePublished:
    """A published model's sound under way; it can be heard when it is whole, for its codec makes it all at once."""

    def __init__(self, sp: PublishedSpeech, asked: Asked) -> None:
        self._sp, self._asked = sp, asked
        given = {name: value for name, value in asked.options().items() if name != "logprobs"}
        self._stream = sp.stream(asked.prompt, max_new_tokens=int(asked.extra["max_new_tokens"]), **given)
        self._steps: list[Step] = []

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self._steps.append(next(self._stream))
        return self._steps[-1]

    def close(self) -> None:
        self._stream.close()

    def seen(self) -> str:
        starts = _evenly(self._steps, 0.0)
        return waveform.strip(self._steps, starts, len(starts) * _NOMINAL)

    def recording(self) -> Recording:
        said = self._stream.result
        sound = None if said.outcome is None else self._sp.to_sound(said)
        starts = _evenly(self._steps, 0.0 if sound is None else sound.seconds)
        heard = packed(sound) if sound is not None and len(sound.samples) else ""
        return Recording("speech", said.trace, self._asked.prompt, sound=heard, starts=tuple(starts))


_NOMINAL = 0.02  # seconds that a token may take, as long as there is no sound to measure it by


def _evenly(steps: list[Step], seconds: float) -> list[float]:
    """When each token begins to be heard, were all of them equally long."""
    count = sum(len(step.emitted) for step in steps)
    each = seconds / count if count and seconds else _NOMINAL
    return [round(place * each, 5) for place in range(count)]


def _seconds(sound: Sound, starts: list[float]) -> float:
    step = starts[-1] / (len(starts) - 1) if len(starts) > 1 else 0.05
    return max(sound.seconds, starts[-1] + step if starts else 0.0)


def _words(text: str, seconds: float) -> list[tuple[float, str]]:
    """The words that were to be said, spread by how long they are: about when each is heard."""
    words = text.split()
    total = sum(map(len, words)) + len(words) or 1
    found, at = [], 0.0
    for one in words:
        found.append((seconds * at / total, one[:40]))
        at += len(one) + 1
    return found


def packed(sound: Sound) -> str:
    """WAV in base64."""
    return b64encode(sound.wav()).decode()


def unpacked(data: str) -> Sound:
    return Sound.load(BytesIO(b64decode(data)))


def envelope(sound: Sound, points: int = _POINTS) -> list[float]:
    """How loud it is along the time, 0 to 1."""
    if len(sound.samples) < points:
        return []
    parts = np.array_split(np.abs(sound.samples), points)
    heights = np.array([part.max() for part in parts])
    return [round(float(one), 3) for one in heights / max(float(heights.max()), 1e-6)]


def mel_picture(sound: Sound) -> str:
    """Its mel frames as a picture's address; nothing where it is too short."""
    from PIL import Image

    from outrider.app.page.backends.image import address
    from outrider.speech.mel import WINDOW, mel_frames

    if len(sound.samples) < 2 * WINDOW:
        return ""
    mel = mel_frames(torch.from_numpy(sound.samples.copy()))
    low, high = mel.quantile(0.02), mel.max()
    shares = ((mel - low) / (high - low).clamp(min=1e-6)).clamp(0, 1).flip(0)
    table = torch.tensor([[int(image_grid.ramp(i / 255)[k : k + 2], 16) for k in (1, 3, 5)] for i in range(256)])
    pixels = table[(shares * 255).round().long()].byte().numpy()
    return address(Image.fromarray(pixels).resize((_COLUMNS, 76)))
