"""Published models of pictures: the real classes of transformers, tiny, of random weights, with their real processors.

Plain decoding through the loop is the class's own `generate`, token for token, with guidance; the distribution is the
class's. Every drafter on every class is in tests/test_published.py. Nothing is downloaded."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption
from outrider.core.testing.conformance import target_law, total_variation
from outrider.image.hub.model import PublishedModel, published

pytestmark = pytest.mark.slow
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py")))


# ---- what the class itself draws, of prompts that are equally long


def own_janus(model: Any, processor: Any, prompts: list[str]) -> list[list[int]]:
    from transformers import DynamicCache

    given = processor(text=prompts, generation_mode="image", return_tensors="pt")
    found = model.generate(
        **given,
        generation_mode="image",
        guidance_scale=5.0,
        do_sample=False,
        past_key_values=DynamicCache(config=model.config.text_config),  # 5.17 fails to make its own
    )
    return found.tolist()


def own_imagegpt(model: Any, processor: Any, prompts: list[str]) -> list[list[int]]:
    begin = torch.tensor([[model.config.vocab_size - 1]] * len(prompts))
    found = model.generate(begin, max_length=model.config.n_positions + 1, do_sample=False, pad_token_id=0)
    return found[:, 1:].tolist()


AREA = {"area": 64 * 64, "negative": "blue sky"}  # 8x8 codes


def own_emu3(model: Any, processor: Any, prompts: list[str]) -> list[list[int]]:
    words, codes = processor.tokenizer, model.vocabulary_mapping.image_tokens
    size = {"return_for_image_generation": True, "ratio": "1:1", "image_area": AREA["area"], "return_tensors": "pt"}
    asked, free = processor(text=prompts, **size), processor(text=[AREA["negative"]] * len(prompts), **size)
    rows, columns = asked.pop("image_sizes")[0]
    whole = rows * (columns + 1)
    last = {whole + 1: words.eof_token_id, whole + 2: words.eoi_token_id, whole + 3: words.eos_token_id}

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        place = len(ids) - int(torch.nonzero(ids == words.image_wrapper_token_id)[0, 0])
        if place in last:
            return [last[place]]
        return [words.eol_token_id] if place % (columns + 1) == 0 else codes

    found = model.generate(
        **asked,
        max_new_tokens=whole + 3,
        do_sample=False,
        guidance_scale=3.0,
        negative_prompt_ids=free.input_ids,
        negative_prompt_attention_mask=free.attention_mask,
        prefix_allowed_tokens_fn=allowed,
    )
    return found[:, asked.input_ids.shape[1] :].tolist()


Own = Callable[[Any, Any, list[str]], list[list[int]]]
MODELS: Mapping[str, tuple[Callable[..., tuple[Any, Any]], Own, dict[str, Any]]] = {
    "janus": (TINY.janus, own_janus, {}),
    "imagegpt": (TINY.imagegpt, own_imagegpt, {}),
    "emu3": (TINY.emu3, own_emu3, AREA),
}
PROMPTS = [
    f"{a} {b} {c}" for a in ("a red", "the blue") for b in ("heart", "cat", "house") for c in ("", "on the hill")
]
PROMPTS += [f"{one} sky on the {other}" for one in ("red", "blue") for other in ("heart", "cat", "hill", "house")]


@cache
def made(name: str) -> tuple[Any, Any, PublishedModel]:
    make, _, options = MODELS[name]
    model, processor = make()

    def small() -> Any:
        return published(*make(1, layers=1), **options)

    return model, processor, PublishedModel(published(model, processor, **options), name=name, small=small)


def same(name: str, prompts: Sequence[str]) -> None:
    model, processor, im = made(name)
    plain = im.generate(list(prompts), drafter=None, temperature=0.0)
    wanted: dict[str, list[int]] = {}
    for _, alike in groupby(sorted(prompts, key=length), length):  # the class's own batches, with nothing filled up
        asked = list(alike)
        wanted |= zip(asked, MODELS[name][1](model, processor, asked), strict=True)
    for one in plain:
        assert getattr(im.published, "sequence", list)(one.tokens) == wanted[one.prompt]
        assert len(one.tokens) >= 64 and len(set(one.tokens)) > 1
        assert one.trace.summary().tokens_per_call == 1
    assert len({token for one in plain for token in one.tokens}) > 5


def length(prompt: str) -> int:
    return len(prompt.split())


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own(name: str) -> None:
    same(name, PROMPTS[:1])


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own_on_20_prompts(name: str, measured: Any) -> None:
    assert len(PROMPTS) == 20 and all(prompt.strip() for prompt in PROMPTS)
    same(name, PROMPTS)
    measured("equality with generate: prompts without a mismatch", name=name, value=20)


def test_a_picture_s_law_is_the_class_s() -> None:
    """Three codes, three tokens, under guidance: against the class with no cache."""
    model, processor = TINY.janus(codes=3)
    one = published(model.double(), processor)
    asked = one.read("a red heart")

    class Many:
        """As many rows as are asked for."""

        def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
            self.inner = one.target([asked] * len(prompts), 5.0)
            return self.inner.begin(prompts, sampling, needs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    found = target_law(Many(), (0,), Sampling(), 3)  # type: ignore[arg-type]
    given = processor(text=["a red heart"], generation_mode="image", return_tensors="pt")
    assert total_variation(found, by_hand(model, given.input_ids, one.free(asked))) < 1e-12


@torch.no_grad()
def by_hand(model: Any, asked: torch.Tensor, free: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The class's distribution of three tokens, prefix by prefix, with no cache."""
    codes = model.model.vqmodel.config.num_embeddings
    words = torch.cat([asked, torch.tensor([free]) - codes])
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for prefix, weight in distribution.items():
            read = model.get_input_embeddings()(words)
            if prefix:
                drawn = model.prepare_embeddings_for_image_generation(torch.tensor([prefix, prefix]))
                read = torch.cat([read, drawn], 1)
            states = model.model.language_model(inputs_embeds=read, use_cache=False).last_hidden_state[:, -1]
            with_prompt, without = model.model.generation_head(states)
            chances = (without + 5.0 * (with_prompt - without)).softmax(-1).tolist()
            grown |= {(*prefix, code): weight * chance for code, chance in enumerate(chances)}
        distribution = grown
    return distribution


@pytest.mark.parametrize(
    ("name", "rule"),
    [("janus", "lantern"), ("janus", "grouped"), ("emu3", "lantern-plus-plus"), ("imagegpt", "lantern")],
)
def test_neighbours_come_from_the_model_s_own_codebook(name: str, rule: str) -> None:
    im = made(name)[2]
    far = torch.cdist(im.looks.double(), im.looks.double())
    near = im.neighbours
    assert (far.gather(1, near).diff(dim=1) >= -1e-9).all()
    found = im.generate("a red heart", rule=rule, rule_options={} if rule == "grouped" else {"k": 10}, seed=2)
    assert not found.trace.lossless and found.trace.summary().tokens == len(im.raster)
    if name == "emu3":
        marks = [token for token in found.tokens if token == im.published.vocabulary - 1]
        assert len(marks) == im.raster.rows and found.grid.max() < im.published.vocabulary - 1


@pytest.mark.parametrize("name", MODELS)
def test_pictures_come_whole_and_in_part(name: str) -> None:
    im = made(name)[2]
    stream = im.stream("a red heart", seed=1)
    first = next(stream)
    size = first.image().size
    stream.close()
    assert stream.results[0].finish is None and len(stream.results[0].tokens) == first.count
    whole = im.generate("a red heart", seed=1, guidance=1.0)
    assert whole.image.size == size and whole.grid.shape == (8, 8) and whole.trace.options["model"] == name


def test_a_janus_picture_is_the_class_s_own() -> None:
    model, _, im = made("janus")
    found = im.generate("a red heart", seed=1)
    pixels = model.decode_image_tokens(torch.tensor([found.tokens])).detach()[0]
    shown = torch.frombuffer(bytearray(found.image.tobytes()), dtype=torch.uint8).view(pixels.shape)
    assert (shown / 127.5 - 1 - pixels.clamp(-1, 1)).abs().max() <= 0.51 / 127.5


@pytest.mark.parametrize(
    ("name", "prompt", "options", "said"),
    [
        ("janus", " ", {}, "the prompt is empty"),
        ("janus", "cat", {"style": "noto"}, "janus has no styles"),
        ("imagegpt", "cat", {"guidance": 3.0}, "imagegpt knows no guidance"),
        ("janus", "cat", {"drafter": "medusa"}, "unknown drafter 'medusa'"),
        ("janus", [], {}, "no prompts"),
    ],
)
def test_what_is_wrong_is_said(name: str, prompt: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        made(name)[2].generate(prompt, **options)


def test_a_smaller_model_must_share_the_codes() -> None:
    model, processor, _ = made("janus")
    other = PublishedModel(published(model, processor), name="janus", small=lambda: published(*TINY.imagegpt()))
    with pytest.raises(InvalidOption, match="they don't share a tokenizer"):
        other.generate("cat", drafter="draft-model")
    alone = PublishedModel(published(model, processor), name="janus")
    with pytest.raises(InvalidOption, match="as load"):
        alone.generate("cat", drafter="draft-model")


def test_classes_that_draw_nothing_are_refused() -> None:
    from transformers import ChameleonConfig

    class Reads:
        config = ChameleonConfig()

    with pytest.raises(InvalidOption, match="sets the logits of picture codes to -inf"):
        published(Reads(), None)
