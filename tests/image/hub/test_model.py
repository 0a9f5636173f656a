"""Published image models: the real classes of transformers, tiny, with random weights and their real processors.

Plain decoding equals the class's own `generate`, token for token, with guidance, and the distributions are equal.
tests/test_published.py tests every drafter on every class. Nothing is downloaded."""

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
from outrider.core.testing.conformance import target_distribution, total_variation
from outrider.image.hub.model import PublishedModel, published

pytestmark = pytest.mark.slow
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py")))


# ---- pictures by the class's own generate, for prompts of equal length


def own_janus(model: Any, processor: Any, prompts: list[str]) -> list[list[int]]:
    from transformers import DynamicCache

    inputs = processor(text=prompts, generation_mode="image", return_tensors="pt")
    codes = model.generate(
        **inputs,
        generation_mode="image",
        guidance_scale=5.0,
        do_sample=False,
        past_key_values=DynamicCache(config=model.config.text_config),  # transformers 5.17 fails to make its own
    )
    return codes.tolist()


def own_imagegpt(model: Any, processor: Any, prompts: list[str]) -> list[list[int]]:
    begin = torch.tensor([[model.config.vocab_size - 1]] * len(prompts))
    codes = model.generate(begin, max_length=model.config.n_positions + 1, do_sample=False, pad_token_id=0)
    return codes[:, 1:].tolist()


AREA = {"area": 64 * 64, "negative": "blue sky"}  # 8x8 codes


def own_emu3(model: Any, processor: Any, prompts: list[str]) -> list[list[int]]:
    words, codes = processor.tokenizer, model.vocabulary_mapping.image_tokens
    size = {"return_for_image_generation": True, "ratio": "1:1", "image_area": AREA["area"], "return_tensors": "pt"}
    inputs, negative = processor(text=prompts, **size), processor(text=[AREA["negative"]] * len(prompts), **size)
    rows, columns = inputs.pop("image_sizes")[0]
    total = rows * (columns + 1)
    last = {total + 1: words.eof_token_id, total + 2: words.eoi_token_id, total + 3: words.eos_token_id}

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        position = len(ids) - int(torch.nonzero(ids == words.image_wrapper_token_id)[0, 0])
        if position in last:
            return [last[position]]
        return [words.eol_token_id] if position % (columns + 1) == 0 else codes

    tokens = model.generate(
        **inputs,
        max_new_tokens=total + 3,
        do_sample=False,
        guidance_scale=3.0,
        negative_prompt_ids=negative.input_ids,
        negative_prompt_attention_mask=negative.attention_mask,
        prefix_allowed_tokens_fn=allowed,
    )
    return tokens[:, inputs.input_ids.shape[1] :].tolist()


Own = Callable[[Any, Any, list[str]], list[list[int]]]
MODELS: Mapping[str, tuple[Callable[..., tuple[Any, Any]], Own, dict[str, Any]]] = {
    "janus": (TINY.janus, own_janus, {}),
    "imagegpt": (TINY.imagegpt, own_imagegpt, {}),
    "emu3": (TINY.emu3, own_emu3, AREA),
}
PROMPTS = [
    f"{a} {b} {c}" for a in ("a red", "the blue") for b in ("heart", "cat", "house") for c in ("", "on the hill")
]
PROMPTS += [f"{colour} sky on the {place}" for colour in ("red", "blue") for place in ("heart", "cat", "hill", "house")]


@cache
def load(name: str) -> tuple[Any, Any, PublishedModel]:
    make, _, options = MODELS[name]
    model, processor = make()

    def small() -> Any:
        return published(*make(1, layers=1), **options)

    return model, processor, PublishedModel(published(model, processor, **options), name=name, small=small)


def check_plain_decoding(name: str, prompts: Sequence[str]) -> None:
    model, processor, im = load(name)
    plain = im.generate(list(prompts), drafter=None, temperature=0.0)
    expected: dict[str, list[int]] = {}
    for _, group in groupby(sorted(prompts, key=length), length):  # batches without padding
        batch = list(group)
        expected |= zip(batch, MODELS[name][1](model, processor, batch), strict=True)
    for result in plain:
        assert getattr(im.published, "sequence", list)(result.tokens) == expected[result.prompt]
        assert len(result.tokens) >= 64 and len(set(result.tokens)) > 1
        assert result.trace.summary().tokens_per_pass == 1
    assert len({token for result in plain for token in result.tokens}) > 5


def length(prompt: str) -> int:
    return len(prompt.split())


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_equals_generate(name: str) -> None:
    check_plain_decoding(name, PROMPTS[:1])


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_equals_generate_on_20_prompts(name: str, measured: Any) -> None:
    assert len(PROMPTS) == 20 and all(prompt.strip() for prompt in PROMPTS)
    check_plain_decoding(name, PROMPTS)
    measured("equality with generate: prompts without a mismatch", name=name, value=20)


def test_the_distribution_of_pictures_equals_the_class_s() -> None:
    """Three tokens from three codes, under guidance, compared with the class without a cache."""
    model, processor = TINY.janus(codes=3)
    janus = published(model.double(), processor)
    prompt = janus.read("a red heart")

    class AnyBatch:
        """A target whose number of rows is that of the prompts."""

        def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
            self.inner = janus.target([prompt] * len(prompts), 5.0)
            return self.inner.begin(prompts, sampling, needs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    distribution = target_distribution(AnyBatch(), (0,), Sampling(), 3)  # type: ignore[arg-type]
    inputs = processor(text=["a red heart"], generation_mode="image", return_tensors="pt")
    expected = distribution_without_cache(model, inputs.input_ids, janus.unconditional(prompt))
    assert total_variation(distribution, expected) < 1e-12


@torch.no_grad()
def distribution_without_cache(
    model: Any, prompt: torch.Tensor, unconditional: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """The class's distribution of three tokens, prefix by prefix."""
    codes = model.model.vqmodel.config.num_embeddings
    words = torch.cat([prompt, torch.tensor([unconditional]) - codes])
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for prefix, probability in distribution.items():
            embeddings = model.get_input_embeddings()(words)
            if prefix:
                of_codes = model.prepare_embeddings_for_image_generation(torch.tensor([prefix, prefix]))
                embeddings = torch.cat([embeddings, of_codes], 1)
            states = model.model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[:, -1]
            with_prompt, without = model.model.generation_head(states)
            probs = (without + 5.0 * (with_prompt - without)).softmax(-1).tolist()
            longer |= {(*prefix, code): probability * p for code, p in enumerate(probs)}
        distribution = longer
    return distribution


@pytest.mark.parametrize(
    ("name", "rule"),
    [("janus", "lantern"), ("janus", "grouped"), ("emu3", "lantern-plus-plus"), ("imagegpt", "lantern")],
)
def test_neighbours_come_from_the_model_s_own_codebook(name: str, rule: str) -> None:
    im = load(name)[2]
    distances = torch.cdist(im.code_vectors.double(), im.code_vectors.double())
    assert (distances.gather(1, im.neighbours).diff(dim=1) >= -1e-9).all()
    result = im.generate("a red heart", rule=rule, rule_options={} if rule == "grouped" else {"k": 10}, seed=2)
    assert not result.trace.lossless and result.trace.summary().tokens == len(im.raster)
    if name == "emu3":
        row_ends = [token for token in result.tokens if token == im.published.vocabulary - 1]
        assert len(row_ends) == im.raster.rows and result.grid.max() < im.published.vocabulary - 1


@pytest.mark.parametrize("name", MODELS)
def test_partial_and_complete_pictures_have_the_same_size(name: str) -> None:
    im = load(name)[2]
    stream = im.stream("a red heart", seed=1)
    first = next(stream)
    size = first.image().size
    stream.close()
    assert stream.results[0].finish_reason is None and len(stream.results[0].tokens) == first.count
    whole = im.generate("a red heart", seed=1, guidance_scale=1.0)
    assert whole.image.size == size and whole.grid.shape == (8, 8) and whole.trace.options["model"] == name


@pytest.mark.parametrize("name", ["janus", "emu3"])
def test_a_negative_prompt_steers_drafted_and_plain_decoding_alike(name: str) -> None:
    im = load(name)[2]
    options: dict[str, Any] = {"seed": 1, "rule": "gumbel-match", "negative_prompt": "a blue dog"}
    plain = im.generate("a red heart", drafter=None, **options)
    assert im.generate("a red heart", drafter="jacobi", **options).tokens == plain.tokens
    assert plain.tokens != im.generate("a red heart", drafter=None, **{**options, "negative_prompt": None}).tokens


def test_a_janus_picture_equals_the_class_s_decoder() -> None:
    model, _, im = load("janus")
    result = im.generate("a red heart", seed=1)
    pixels = model.decode_image_tokens(torch.tensor([result.tokens])).detach()[0]
    image = torch.frombuffer(bytearray(result.image.tobytes()), dtype=torch.uint8).view(pixels.shape)
    assert (image / 127.5 - 1 - pixels.clamp(-1, 1)).abs().max() <= 0.51 / 127.5


@pytest.mark.parametrize(
    ("name", "prompt", "options", "message"),
    [
        ("janus", " ", {}, "the prompt is empty"),
        ("janus", "cat", {"style": "noto"}, "janus has no styles"),
        ("imagegpt", "cat", {"guidance_scale": 3.0}, "imagegpt has no guidance"),
        ("imagegpt", "cat", {"negative_prompt": "dog"}, "imagegpt has no guidance"),
        ("janus", "cat", {"drafter": "medusa"}, "no weights of medusa for janus; train them with"),
        ("janus", [], {}, "no prompts"),
    ],
)
def test_invalid_options_are_rejected(name: str, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        load(name)[2].generate(prompt, **options)


def test_a_smaller_model_must_share_the_codes() -> None:
    model, processor, _ = load("janus")
    mismatched = PublishedModel(published(model, processor), name="janus", small=lambda: published(*TINY.imagegpt()))
    with pytest.raises(InvalidOption, match="they don't share a tokenizer"):
        mismatched.generate("cat", drafter="draft-model")
    alone = PublishedModel(published(model, processor), name="janus")
    with pytest.raises(InvalidOption, match="when loading"):
        alone.generate("cat", drafter="draft-model")


def test_classes_without_image_generation_are_rejected() -> None:
    from transformers import ChameleonConfig

    class Chameleon:
        config = ChameleonConfig()

    with pytest.raises(InvalidOption, match="sets the logits of image codes to -inf"):
        published(Chameleon(), None)
