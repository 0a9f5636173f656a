"""A voice as people use it: text in, sound out, every step on the way to be heard and looked at.

Puts together what others do: phonemes, the voice and its decoder, codec, vocoder, options, the loop. Knows nothing of
how a target computes or a drafter guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import DRAFTERS, RULES, make_drafter, make_rule
from outrider.core.protocol import Drafter, Rule
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import NoWeights
from outrider.core.validation import as_list
from outrider.speech import recipes
from outrider.speech.audio import Sound, spoken
from outrider.speech.codec import Codec
from outrider.speech.mel import RATE
from outrider.speech.options import Given, Options
from outrider.speech.stream import Result, Stream
from outrider.speech.vocoder import Vocoder
from outrider.speech.voice import Script, Speaker, Voice

# Distributions of speech are wide, so that guesses do best where they are drawn, many side by side at first. The trees
# are the best of 16 nodes by the acceptance of 24 sentences at temperature 0.6
# (outrider.speech.evaluation.tree_search).
_WIDE = (-1, -1, -1, -1, -1, 0, 0, 0, 1, 1)

# how drafters begin on speech, where nobody says otherwise
USUAL: Mapping[str, Mapping[str, Any]] = {
    "jacobi": {"window": 16, "renew": "couple"},
    "medusa": {"draft_kind": "sampled", "tree": (*_WIDE, 2, 3, 4, 5, 6, 8)},
    "hydra": {"draft_kind": "sampled", "tree": (*_WIDE, 1, 2, 3, 5, 5, 6)},
    "eagle3": {"draft_kind": "sampled", "tree": (-1, -1, -1, -1, -1, -1, 0, 0, 0, 1, 2, 3, 6, 6, 7, 12)},
}
# under a relaxed rule, which is kinder to the likeliest tokens than to those that were drawn
BENT: Mapping[str, Mapping[str, Any]] = {
    "medusa": {"draft_kind": "tree", "nodes": 24},
    "hydra": {"draft_kind": "dynamic", "nodes": 24},
    "eagle3": {"draft_kind": "tree", "nodes": 24},
}
# and rules: so many draws change few words of what is heard (reports/speech)
RULED: Mapping[str, Mapping[str, Any]] = {"tolerance": {"tau": 30}}
_OTHERWISE = frozenset({"draft_kind", "nodes"})  # who says one of these means another tree

_STEP, _FAR = 0.45, 1e3  # from a code to its neighbour on an axis, for rules; and to the end


class SpeechModel:
    """A voice with its codec and vocoder; `draft` gives a smaller voice when a drafter wants one, `taught` what a
    trained drafter guesses with. Several generations may run side by side."""

    rate = RATE

    def __init__(
        self,
        voice: Voice,
        codec: Codec,
        vocoder: Vocoder,
        *,
        name: str,
        draft: Callable[[], Voice] | None = None,
        taught: Callable[[str, Speaker], DraftHead] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if voice.end != codec.codes:
            raise InvalidOption(
                f"the voice speaks of {voice.end:,} codes and the codec has {codec.codes:,}: they don't belong together"
            )
        self.name, self.dtype = name, str(dtype).removeprefix("torch.")
        self._precision, self._device = dtype, device
        self.voice = voice.to(device).eval().requires_grad_(False)
        self.codec = codec.to(device).eval().requires_grad_(False)
        self.vocoder = vocoder.to(device).eval()
        self.network = voice.network(dtype, device)
        self._draft = draft
        self._small: Voice | None = None
        self._taught = taught
        self._draft_heads: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<outrider.speech model {self.name}, {self.dtype}, {self.codec.codes:,} codes>"

    @property
    def drafters(self) -> list[str]:
        """Names to give as `drafter`."""
        return drafters()

    @property
    def rules(self) -> list[str]:
        """Names to give as `rule`."""
        return rules()

    @overload  # a string is a sequence of strings too: the first that fits counts
    def generate(self, text: str, **options: Unpack[Given]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, text: Sequence[str], **options: Unpack[Given]) -> list[Result]: ...
    def generate(self, text: str | Sequence[str], **options: Unpack[Given]) -> Result | list[Result]:
        """Speech: a Result, or for several texts a list of them. The options are those of
        outrider.speech.options.Options."""
        stream = self.stream(text, **options)
        for _ in stream:
            pass
        return stream.results[0] if isinstance(text, str) else stream.results

    def stream(self, text: str | Sequence[str], **options: Unpack[Given]) -> Stream:
        """The same step by step: an iterator of Pieces, some of which bring samples that can be played."""
        wanted = Options.of(options)
        texts = as_list(text, "text")
        self.drafter_name(wanted)
        return Stream(self, wanted, texts)

    def resynthesised(self, sound: Sound) -> Sound:
        """What codec and vocoder leave of a sound: the best that the voice could be."""
        with torch.no_grad():
            codes = self.codec.encode(sound.frames()[None].to(self._device))[0].tolist()
        return Sound(spoken(codes, self.codec, self.vocoder))

    # ---- what a generation is made of

    def target(self, script: Script) -> Speaker:
        """The decoder of some utterances, with a cache of its own."""
        return Speaker(self.network, script)

    def draft_model(self, said: Sequence[Sequence[int]], script: Script) -> Speaker:
        """The smaller voice, saying the same in the same time."""
        if self._small is None:
            if self._draft is None:
                raise recipes.SHELF.missing("speech-draft")
            self._small = self._draft().to(self._device).eval().requires_grad_(False)
        small = self._small
        return Speaker(small.network(self._precision, self._device), small.script(said, shares=script.shares))

    def drafter_name(self, options: Options) -> str:
        """What the drafter asked for is called; unknown names are refused."""
        wanted = options.drafter
        if wanted is None or not isinstance(wanted, str):
            return "plain" if wanted is None else type(wanted).__name__
        if wanted not in drafters():
            raise unknown("drafter", wanted, drafters())
        return wanted

    def drafter(self, options: Options, said: Sequence[Sequence[int]], script: Script) -> Drafter | None:
        """The drafter asked for, for some utterances."""
        wanted = options.drafter
        if wanted is None or not isinstance(wanted, str):
            return wanted
        usual = USUAL.get(wanted, {}) if self.rule(options)[0].lossless else {**USUAL, **BENT}.get(wanted, {})
        given: dict[str, Any] = {**usual, **options.drafter_options}
        if _OTHERWISE & set(options.drafter_options) and "tree" not in options.drafter_options:
            given.pop("tree", None)
        if "model" in DRAFTERS[wanted].needs:
            given.setdefault("model", self.draft_model(said, script))
        if "draft_head" in DRAFTERS[wanted].needs and "draft_head" not in given:
            taught = given.pop("taught", wanted)
            serving = [name for name, drafter in recipes.taught().items() if drafter == wanted]
            if taught not in serving:
                raise unknown(f"training of {wanted}", str(taught), serving)
            given["draft_head"] = self._draft_head(taught, script)
        return make_drafter(wanted, **given)

    def _draft_head(self, drafter: str, script: Script) -> Any:
        """What a trained drafter guesses with, read once. `taught` among a drafter's options says which, where several
        recipes serve it ("medusa-6")."""
        if drafter not in self._draft_heads:
            if self._taught is None:
                raise NoWeights(f"there are no weights of {drafter} for this voice; `outrider train` makes them")
            target = self.target(script)
            self._draft_heads[drafter] = self._taught(drafter, target).drafts(target)
        return self._draft_heads[drafter]

    def rule(self, options: Options) -> tuple[Rule, str]:
        """The rule asked for, and its name."""
        if not isinstance(options.rule, str):
            return options.rule, type(options.rule).__name__
        if options.rule not in rules():
            raise unknown("rule", options.rule, rules())
        given, known = {**RULED.get(options.rule, {}), **options.rule_options}, RULES[options.rule].options
        if "neighbours" in known:
            given.setdefault("neighbours", self.neighbours)
            given.setdefault("k", min(known["k"], self.codec.codes - 1))
        if "codes" in known:
            given.setdefault("codes", self.places)
        if "embeddings" in known:
            given.setdefault("embeddings", self.embeddings)
        return make_rule(options.rule, **given), options.rule

    # ---- which tokens are alike; the end is like none

    @cached_property
    def places(self) -> Tensor:
        """[V, D] where each code stands in the codec's space, neighbours on an axis a little nearer than 0.5, which is
        as far as rules usually look; the end, out of reach."""
        codes = torch.arange(self.codec.codes, device=self.codec.mean.device)
        steps = torch.tensor(self.codec.quantiser.levels, device=codes.device) - 1
        points = self.codec.quantiser.points(codes) * steps * _STEP / 2
        return torch.cat([points, points.new_full((1, points.shape[1]), _FAR)])

    @cached_property
    def neighbours(self) -> Tensor:
        """[V, 200 or fewer] the codes that stand nearest to each, nearest first."""
        codes = self.places[:-1].double()
        far = torch.cdist(codes, codes).fill_diagonal_(torch.inf)  # itself comes last
        near = far.argsort(dim=1, stable=True)[:, : min(200, len(codes) - 1)]
        return torch.cat([near, near[:1]])  # what stands near the end is never asked: it is tried strictly

    @cached_property
    def embeddings(self) -> Tensor:
        """[V, D] what the voice makes of each token; nothing of the end."""
        rows = self.voice.embedding.detach().clone()
        rows[self.voice.end] = 0
        return rows


def drafters() -> list[str]:
    """The drafters that work on speech."""
    taught = recipes.taught()
    return [
        name
        for name, one in DRAFTERS.items()
        if "speech" in one.modalities and ({"model"} >= set(one.needs) or name in taught)
    ]


def rules() -> list[str]:
    """The rules that work on speech."""
    return [name for name, one in RULES.items() if "speech" in one.modalities and not one.needs]


def load(
    name: str = recipes.MODEL,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    folder: Path | None = None,
) -> SpeechModel:
    """A voice: "heart". `folder` holds weights of one's own training, in place of those that ship.

    >>> sp = load()
    >>> sp.generate("Good morning.", seed=1).save("morning.wav")
    """
    if name != recipes.MODEL:
        raise unknown("voice", name, (recipes.MODEL,))
    if dtype not in _DTYPES:
        raise unknown("dtype", dtype, _DTYPES)
    return SpeechModel(
        recipes.voice(folder=folder),
        recipes.codec(folder),
        recipes.vocoder(device),
        name=name,
        draft=lambda: recipes.voice("speech-draft", folder),
        taught=lambda drafter, target: recipes.draft_head(drafter, target, folder),
        dtype=_DTYPES[dtype],
        device=device,
    )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
