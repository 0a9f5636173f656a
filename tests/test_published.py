"""Every drafter on every published model class (images, sound, multimodal text): greedy and gumbel-match output equals
plain decoding, and the output's distribution, by enumeration, equals the target's.

The classes are those of transformers, tiny and with random weights (tests/tiny_classes.py); each modality's tests check
that plain decoding equals the class's own `generate`. Enumeration runs in 64 bits (LlamaGen: 32) on three or four codes
and one token more than the draft's depth, so that drafts are accepted wholly, partly and not at all."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS
from outrider.core.protocol import Target
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import (
    KINDS,
    Case,
    SequenceDistribution,
    enumerate_output,
    target_distribution,
    total_variation,
    trial_drafter,
)
from outrider.image import load as open_picture
from outrider.image.hub.model import PublishedModel
from outrider.image.hub.model import published as picture
from outrider.image.resolve_drafter import drafters as of_pictures
from outrider.speech.hub.model import PublishedSpeech
from outrider.speech.hub.model import published as sound
from outrider.speech.resolve_drafter import drafters
from outrider.text.multimodal import MultimodalModel
from tests.rows_of_one_prompt import Rows
from tests.turns import takes_turn

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TINY = SimpleNamespace(**runpy.run_path(str(HERE / "tiny_classes.py")))
LLAMAGEN = SimpleNamespace(**runpy.run_path(str(HERE / "image" / "hub" / "test_llamagen.py")))
FEWER = {"specexec": {"nodes": 16, "batch": 4, "width": 4, "passes": 4}}


def drawn(*shape: int, ids: bool = False) -> torch.Tensor:
    made = torch.Generator().manual_seed(7)
    return torch.randint(5, TINY.TEXT, shape, generator=made) if ids else torch.randn(*shape, generator=made)


def words(count: int, room: int) -> dict[str, torch.Tensor]:
    """Return `count` random text ids padded to `room`, with their mask."""
    return {"input_ids": drawn(1, room, ids=True), "attention_mask": (torch.arange(room) < count).long()[None]}


# ---- identity, greedy and under gumbel-match

Run = Callable[..., Any]  # a drafter and options -> tokens


def of_picture(make: Callable[..., Any], **options: Any) -> Run:
    im = PublishedModel(picture(*make(), **options), name="tiny", small=lambda: picture(*make(1, layers=1), **options))
    return partial(drawn_by, im, ("a red heart", "blue sky on the hill"))


def of_llamagen(prompts: Sequence[str], **options: Any) -> Run:
    return partial(drawn_by, llamagen(**options), prompts)


@cache
def llamagen(captioned: bool = False, codes: int = 40) -> PublishedModel:
    """Published checkpoint files, converted and loaded."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        folder, text = Path(place), ""
        if captioned:
            LLAMAGEN.text_encoder(folder / "t5")
            text = str(folder / "t5")
        big, small = (
            LLAMAGEN.published(folder / str(layers), 2 - layers, layers, captioned, text, codes) for layers in (2, 1)
        )
        result = open_picture(big, draft_model=small, dtype="float32")
        assert isinstance(result, PublishedModel)
        asked = [result.read("a cat" if captioned else "1")]
        result.target(asked, result.guidance)  # everything is loaded from the files
        result.draft_model(asked, result.guidance)
        return result


def drawn_by(im: PublishedModel, prompts: Sequence[str], **how: Any) -> list[list[int]]:
    return [one.tokens for one in im.generate(list(prompts), **how)]


def of_speech(make: Callable[..., Any], prompt: Any, limit: int, **options: Any) -> Run:
    model = make()
    sp = PublishedSpeech(sound(model, getattr(model, "tokenizer", None), draft=make(1, 1), **options), name="tiny")
    return lambda **how: sp.generate(prompt, max_new_tokens=limit, **how).tokens


def of_answer(make: Callable[..., Any]) -> Run:
    (model, given), (small, _) = make(), make(1, 1)
    multimodal = MultimodalModel(model, TINY.read(60), draft=MultimodalModel(small, TINY.read(60)))

    def run(drafter: str | None, drafter_options: Mapping[str, Any] = {}, **how: Any) -> list[int]:
        options = dict(drafter_options)
        if drafter == "rest":
            options["store"] = [[number % 60 for number in range(200)]]
        return multimodal.answer(given, drafter=drafter, drafter_options=options, max_new_tokens=16, **how).tokens

    return run


CLASSES: Mapping[str, Callable[[], Run]] = {
    "janus": partial(of_picture, partial(TINY.janus, side=4)),
    "emu3": partial(of_picture, TINY.emu3, area=32 * 32),
    "imagegpt": partial(of_picture, partial(TINY.imagegpt, side=4)),
    "llamagen": partial(of_llamagen, ("1", "7")),
    "llamagen-captions": partial(of_llamagen, ("a red heart", "the blue cat"), captioned=True),
    "csm": partial(of_speech, TINY.csm, words(4, 4), 7),
    "musicgen": partial(of_speech, TINY.musicgen, words(4, 4), 4),
    "bark": partial(of_speech, TINY.bark, words(5, 16), 8),
    "whisper": partial(of_speech, TINY.whisper, {"input_features": drawn(1, 8, 40)}, 16, prefix=[3, 5, 6]),
    "llasa": partial(of_speech, TINY.llasa, "good morning", 16),
    "orpheus": partial(of_speech, TINY.orpheus, "tara: good morning", 21),
    "llava": partial(of_answer, TINY.llava),
    "qwen2-vl": partial(of_answer, TINY.qwen2_vl),
}
SEEING = ("llava", "qwen2-vl")
OF_WORDS = (
    "auto",
    "rest",
    "n-grammys",
)  # classes with text prompts
GREEDY = {"temperature": 0.0, "rule": "exact"}
SEEDED = {"temperature": 1.0, "rule": "gumbel-match", "seed": 3}


def drafting(name: str) -> list[str]:
    """Return the drafters that apply to a class."""
    if name in SEEING:
        return [*drafters(views=False, heads=False), *OF_WORDS]
    if CLASSES[name].func in (of_picture, of_llamagen):
        return [drafter for drafter in of_pictures() if DRAFTERS[drafter].draft_head is None]
    return drafters(views=False, heads=False)


def table(names: Iterable[str], applies: Callable[[str], Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs of class and drafter: every kind of draft, and other drafters in turns."""
    return [
        (name, drafter) for name in names for drafter in applies(name) if drafter in KINDS or takes_turn(name, drafter)
    ]


@pytest.fixture(autouse=True, scope="module")
def kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate cache for bigrams and measured costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


runs_of = cache(lambda name: CLASSES[name]())


@cache
def plain(name: str, greedy: bool) -> Any:
    return runs_of(name)(drafter=None, **(GREEDY if greedy else SEEDED))


@pytest.mark.parametrize(("name", "drafter"), table(CLASSES, drafting))
def test_output_equals_plain_decoding(name: str, drafter: str) -> None:
    run = partial(runs_of(name), drafter=drafter, drafter_options=FEWER.get(drafter, {}))
    assert run(**GREEDY) == plain(name, True)
    assert run(**SEEDED) == plain(name, False) != plain(name, True)


@pytest.mark.parametrize("drafter", ["sparse-cache", "triforce", "qspec", "swift", "draft-on-the-fly", "layer-skip"])
def test_self_speculative_drafters_raise(drafter: str) -> None:
    with pytest.raises(OutriderError):
        runs_of("llava")(drafter=drafter, **GREEDY)


# ---- distributions

TRIALS = {  # replace settings of the method table that have thousands of branches
    "sampled-tree": {"tree": (-1, -1, 0)},
    "specinfer": {"samples": 2, "depth": 1},
    "predrafted": {"length": 1, "outcomes": 1},
    "pearl": {"length": 1},
    "sequoia": {"acceptance": (0.5, 0.3), "nodes": 3, "depth": 2},
}


Parts = tuple[Callable[[int], Target], Callable[[int], Target], Sequence[int], Sequence[int]]  # big, small, root, end


def few_picture(make: Callable[..., Any], **options: Any) -> Parts:
    def of(seed: int) -> Callable[[int], Target]:
        model, processor = make(seed, layers=1)
        one = picture(model.double(), processor, **options)
        asked = one.read("a red heart")
        return lambda rows: one.target([asked] * rows, one.guidance)

    return of(0), of(1), (0,), ()


def few_llamagen(prompt: str, captioned: bool = False) -> Parts:
    im = llamagen(captioned, 3)
    asked = im.read(prompt)
    return (
        lambda rows: im.target([asked] * rows, im.guidance),
        lambda rows: im.draft_model([asked] * rows, im.guidance),
        (0,),
        (),
    )


def few_sound(make: Callable[..., Any], prompt: Any, first: Sequence[int] = (), **options: Any) -> Parts:
    """`first`: the tokens of the previous stage; the distribution is that of the next one."""

    def of(seed: int) -> tuple[Callable[[int], Target], Any]:
        model = make(seed, layers=1).double()
        stages = sound(model, getattr(model, "tokenizer", None), **options).stages(prompt, 2)
        part = next(stages)
        if first:
            part = stages.send(list(first))

        def rows(count: int) -> Any:
            target = part.target()
            if isinstance(target, Guided):  # one condition per row
                target.conditions = [*target.conditions] * count
                target.unconditional = (target.unconditional or []) * count
            return target

        return rows, part

    (big, part), (small, _) = of(0), of(1)
    return big, small, part.root, part.end


def few_answers(make: Callable[..., Any], count: int) -> Parts:
    asked = make(words=count)[1]
    asked["pixel_values"] = asked["pixel_values"].double()

    def of(seed: int) -> Callable[[int], Target]:
        model = make(seed, layers=1, words=count)[0].double()
        interface = MultimodalModel(model, TINY.read(count))._interface(asked)
        return lambda rows: TransformersTarget(model, trees="mask", interface=interface)

    return of(0), of(1), asked["input_ids"][0].tolist(), (1,)


FEW: Mapping[str, tuple[Callable[[], Parts], int]] = {  # parts and number of tokens
    "janus": (partial(few_picture, partial(TINY.janus, codes=3, side=2)), 3),
    "emu3": (partial(few_picture, partial(TINY.emu3, codes=3), area=16 * 16), 4),  # the third code ends a row
    "imagegpt": (partial(few_picture, partial(TINY.imagegpt, colours=3, side=2)), 3),
    "llamagen": (partial(few_llamagen, "1"), 3),
    "llamagen-captions": (partial(few_llamagen, "a red heart", True), 3),
    "csm": (partial(few_sound, partial(TINY.csm, books=2, codes=3), words(3, 3)), 3),
    "musicgen": (partial(few_sound, partial(TINY.musicgen, books=2, codes=3), words(3, 3), guidance=1.2), 4),
    "bark": (partial(few_sound, partial(TINY.bark, meanings=2, codes=3), words(3, 16)), 3),
    "bark-coarse": (partial(few_sound, partial(TINY.bark, meanings=2, codes=3), words(3, 16), (0, 1, 0)), 3),
    "whisper": (partial(few_sound, partial(TINY.whisper, words=6), {"input_features": drawn(1, 8, 40)}, prefix=[3]), 3),
    "llasa": (partial(few_sound, partial(TINY.llasa, codes=2, bare=True), [0, 2, 3]), 3),
    "orpheus": (partial(few_sound, partial(TINY.orpheus, codes=1, bare=True), [0, 2, 3]), 2),
    "llava": (partial(few_answers, TINY.llava, 4), 3),
    "qwen2-vl": (partial(few_answers, TINY.qwen2_vl, 4), 3),
}


@cache
def few(name: str) -> tuple[Case, Callable[[], Target], SequenceDistribution]:
    """Build everything except the drafter: target, draft model and expected distribution."""
    make, limit = FEW[name]
    big, small, root, end = make()
    sampling = Sampling(end=tuple(end))
    distribution = target_distribution(Rows(big), root, sampling, limit)
    assert len(distribution) > 8 and max(distribution.values()) < 0.7
    case = Case(
        target=partial(Rows, big),
        drafter=lambda: None,
        rule=Exact(),
        prompts=[list(root)],
        sampling=sampling,
        limits=[limit],
    )
    return case, partial(Rows, small), distribution


@pytest.mark.parametrize(("name", "drafter"), table(FEW, lambda name: drafters(views=False, heads=False)))
def test_the_distribution_is_the_targets(name: str, drafter: str, measured: Any) -> None:
    case, small, distribution = few(name)
    method = DRAFTERS[drafter]
    options = TRIALS.get(drafter, method.test_options[0])
    (result,) = enumerate_output(replace(case, drafter=partial(trial_drafter, method, options, small)))
    off = total_variation(result, distribution)
    measured(
        "published classes: total variation of what is drafted from the target's distribution", name=name, value=off
    )
    assert off < (1e-5 if name.startswith("llamagen") else 1e-12)
