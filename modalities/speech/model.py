"""The speech model's API: text in, sound out, with the trace of every round.

Combines phonemes, the voice and its decoder, codec, vocoder, options and the loop. Independent of how a target computes
and a drafter drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from outrider.core.device import AUTO, usable_device, usual_dtype
from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import Input
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Resolved
from outrider.core.protocol import PLAIN, Drafter, Rule
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import NoWeights
from outrider.core.validation import as_list, dtype_name, shows_options
from outrider.speech import recipes
from outrider.speech.audio import Sound, synthesise
from outrider.speech.codec import Codec
from outrider.speech.mel import RATE
from outrider.speech.options import Given, Options
from outrider.speech.resolve_drafter import (
    drafters,
    listed_drafters,
    listed_rules,
    resolve_drafter,
    resolve_rule,
)
from outrider.speech.spectral_vocoder import SpectralVocoder
from outrider.speech.stream import Result, Stream
from outrider.speech.vocoder import Vocoder
from outrider.speech.voice import Script, Voice, VoiceDecoder

_STEP, _FAR = 0.45, 1e3  # distance of neighbouring codes on an axis, and of the end token, for rules


class SpeechModel:
    """A voice with its codec and vocoder. `draft` loads a smaller voice and `taught` a trained head when a drafter
    first needs one. Several generations may run side by side."""

    sample_rate = RATE

    def __init__(
        self,
        voice: Voice,
        codec: Codec,
        vocoder: Vocoder | SpectralVocoder,
        *,
        name: str,
        draft: Callable[[], Voice] | None = None,
        taught: Callable[[str, VoiceDecoder], DraftHead] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        if voice.end != codec.codes:
            raise InvalidOption(f"the voice has {voice.end:,} codes and the codec {codec.codes:,}; they must match")
        self.name, self.dtype = name, str(dtype).removeprefix("torch.")
        self._precision, self._device = dtype, device
        self.voice = voice.to(device).eval().requires_grad_(False)
        self.codec = codec.to(device).eval().requires_grad_(False)
        self.vocoder = vocoder.to(device).eval()
        self.network = voice.network(dtype, device)
        self._draft, self._folder = draft, folder
        self._small: Voice | None = None
        self._taught = taught
        self._draft_heads: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<outrider.speech model {self.name}, {self.dtype}, {self.codec.codes:,} codes>"

    @property
    def drafters(self) -> Listing:
        """Names to give as `drafter`, with what each does, needs and lacks here."""
        return listed_drafters(draft=self._draft is not None, heads=self._taught is not None, folder=self._folder)

    @property
    def rules(self) -> Listing:
        """Names to give as `rule`, with what each does."""
        return listed_rules()

    @overload  # a string is a sequence of strings too: the first that fits counts
    def generate(self, text: str, **options: Unpack[Given]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, text: Sequence[str], **options: Unpack[Given]) -> list[Result]: ...
    @shows_options(Options)
    def generate(self, text: str | Sequence[str], **options: Unpack[Given]) -> Result | list[Result]:
        """Generate speech: a Result, or a list of them for several texts. The options are described in
        outrider.speech.options.Options."""
        stream = self.stream(text, **options)
        for _ in stream:
            pass
        return stream.results[0] if isinstance(text, str) else stream.results

    @shows_options(Options)
    def stream(self, text: str | Sequence[str], **options: Unpack[Given]) -> Stream:
        """Like `generate`, as an iterator of Pieces, which carry the samples as they become available."""
        wanted = Options.of(options)
        texts = as_list(text, "text")
        self.drafter_name(wanted)
        return Stream(self, wanted, texts)

    def resynthesised(self, sound: Sound) -> Sound:
        """A sound encoded and decoded by codec and vocoder: the upper bound of the voice's quality."""
        with torch.no_grad():
            codes = self.codec.encode(sound.mel()[None].to(self._device))[0].tolist()
        return Sound(synthesise(codes, self.codec, self.vocoder))

    # ---- the parts of a generation

    def target(self, script: Script) -> VoiceDecoder:
        """The decoder of these utterances, with a cache of its own."""
        return VoiceDecoder(self.network, script)

    def draft_model(self, phoneme_ids: Sequence[Sequence[int]], script: Script) -> VoiceDecoder:
        """The smaller voice, for the same utterances with the same durations."""
        if self._small is None:
            if self._draft is None:
                raise recipes.SHELF.missing(recipes.DRAFT)
            self._small = self._draft().to(self._device).eval().requires_grad_(False)
        small = self._small
        return VoiceDecoder(
            small.network(self._precision, self._device), small.script(phoneme_ids, durations=script.durations)
        )

    def drafter_name(self, options: Options) -> str:
        """The drafter's name, for the trace. Raises for an unknown name."""
        if options.drafter is None:
            return PLAIN
        if isinstance(options.drafter, str) and options.drafter not in drafters():
            raise unknown("drafter", options.drafter, drafters())
        return options.drafter if isinstance(options.drafter, str) else type(options.drafter).__name__

    def drafter(
        self, options: Options, phoneme_ids: Sequence[Sequence[int]], script: Script
    ) -> Resolved[Drafter | None]:
        """The drafter of these options, for these utterances."""
        return resolve_drafter(
            options,
            draft_model=lambda: self.draft_model(phoneme_ids, script),
            draft_head=lambda recipe, _: self._draft_head(recipe, script),
            lossless=self.rule(options).made.lossless,
        )

    def _draft_head(self, recipe: str, script: Script) -> Any:
        """The draft head that a recipe trained, loaded once."""
        if recipe not in self._draft_heads:
            if self._taught is None:
                raise NoWeights(f"there are no weights of {recipe} for this voice; train them with `outrider train`")
            target = self.target(script)
            self._draft_heads[recipe] = self._taught(recipe, target).drafts(target)
        return self._draft_heads[recipe]

    def rule(self, options: Options) -> Resolved[Rule]:
        """The rule of these options."""
        similarity: dict[Input, Callable[[], Tensor]] = {
            Input.NEIGHBOURS: lambda: self.neighbours,
            Input.CODES: lambda: self.places,
            Input.EMBEDDINGS: lambda: self.embeddings,
        }
        return resolve_rule(options, similarity, self.codec.codes)

    # ---- similarity of tokens; the end token is similar to none

    @cached_property
    def places(self) -> Tensor:
        """[V, D] each code's position in the codec's space. Neighbours on an axis are slightly closer than 0.5, the
        usual radius of rules; the end token is out of reach."""
        codes = torch.arange(self.codec.codes, device=self.codec.mean.device)
        steps = torch.tensor(self.codec.quantiser.levels, device=codes.device) - 1
        points = self.codec.quantiser.points(codes) * steps * _STEP / 2
        return torch.cat([points, points.new_full((1, points.shape[1]), _FAR)])

    @cached_property
    def neighbours(self) -> Tensor:
        """[V, 200 or fewer] the codes nearest to each code, nearest first."""
        codes = self.places[:-1].double()
        far = torch.cdist(codes, codes).fill_diagonal_(torch.inf)  # a code is not its own neighbour
        near = far.argsort(dim=1, stable=True)[:, : min(200, len(codes) - 1)]
        return torch.cat([near, near[:1]])  # a row for the end token, which rules always try strictly

    @cached_property
    def embeddings(self) -> Tensor:
        """[V, D] the voice's embedding of each token; zero for the end token."""
        rows = self.voice.embedding.detach().clone()
        rows[self.voice.end] = 0
        return rows


def load(
    name: str = recipes.MODEL,
    *,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    folder: Path | None = None,
    vocoder: str = recipes.HIFI_GAN,
) -> SpeechModel:
    """Load the voice "heart". `folder` holds weights of your own training, in place of those that ship. The vocoder
    "vocos" takes far less time than "hifi-gan", needs no download and sounds less clear.

    >>> sp = load()
    >>> sp.generate("Good morning.", seed=1).save("morning.wav")
    """
    if name != recipes.MODEL:
        raise unknown("voice", name, (recipes.MODEL,))
    device = usable_device(device)
    dtype = usual_dtype(device) if dtype == AUTO else dtype_name(dtype, _DTYPES)
    return SpeechModel(
        recipes.voice(folder=folder),
        recipes.codec(folder),
        recipes.vocoder(vocoder, device, folder),
        name=name,
        draft=lambda: recipes.voice(recipes.DRAFT, folder),
        taught=lambda drafter, target: recipes.draft_head(drafter, target, folder),
        dtype=_DTYPES[dtype],
        device=device,
        folder=folder,
    )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
