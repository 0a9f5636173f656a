"""Published models of pictures: the real classes of transformers, tiny, of random weights, with their real processors.

Plain decoding through the loop is the class's own `generate`, token for token, with guidance; whoever drafts, the
tokens are the same; the laws are the class's. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch

from outrider.core.conformance import Case, enumerate_output, equip, target_law, total_variation
from outrider.core.errors import InvalidOption
from outrider.core.laws import Sampling
from outrider.core.methods import DRAFTERS
from outrider.core.rules.exact import Exact
from outrider.image.choosing import drafters
from outrider.image.published import PublishedModel, published

WORDS = ("a", "red", "blue", "heart", "cat", "house", "on", "the", "hill", "sky")


def tokenizer(extra: dict[str, str], words: tuple[str, ...] = WORDS, bare: bool = False) -> Any:
    """Words apart by spaces, after the special ones: <s>, <pad> and those that are named. `bare`: <s> is not added."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<pad>", "</s>", "<unk>", *extra.values()]
    ids = {name: number for number, name in enumerate([*names, *words])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not bare:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=extra,
        padding_side="left",
    )


def sharpened(model: Any, by: float = 0.4) -> Any:
    """Weights far enough from 0 for laws that are neither flat nor certain."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += by * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return model.eval()


def janus(seed: int = 0, layers: int = 2, codes: int = 64) -> tuple[Any, Any]:
    """Pictures of 8x8 codes."""
    from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    extra = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_placeholder>"}
    words = tokenizer(extra)
    torch.manual_seed(seed)
    config = JanusConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 1,
        },
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "num_image_tokens": 64,
            "projection_dim": 32,
            "mlp_ratio": 2.0,
        },
        vq_config={
            "embed_dim": 4,
            "num_embeddings": codes,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        image_token_id=words.convert_tokens_to_ids("<image_placeholder>"),
    )
    model = sharpened(JanusForConditionalGeneration(config), 1.0)
    model.generation_config.update(bos_token_id=0, pad_token_id=1, eos_token_id=2)
    model.generation_config.generation_kwargs = {"boi_token_id": words.convert_tokens_to_ids("<begin_of_image>")}
    pictures = JanusImageProcessorPil(size={"height": 32, "width": 32})
    return model, JanusProcessor(pictures, words, num_image_tokens=64)


def imagegpt(seed: int = 0, layers: int = 2) -> tuple[Any, Any]:
    """27 colours, pictures of 8x8."""
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling
    from transformers.models.imagegpt.image_processing_pil_imagegpt import ImageGPTImageProcessorPil

    torch.manual_seed(seed)
    config = ImageGPTConfig(vocab_size=28, n_positions=64, n_embd=24, n_layer=layers, n_head=4)
    model = sharpened(ImageGPTForCausalImageModeling(config), 1.0)
    levels = torch.tensor([-1.0, 0.0, 1.0])
    colours = torch.cartesian_prod(levels, levels, levels)
    return model, ImageGPTImageProcessorPil(clusters=colours.tolist(), size={"height": 8, "width": 8})


def emu3(seed: int = 0, layers: int = 2) -> tuple[Any, Any]:
    """32 codes; a picture of 16 pixels a side has 4 of them."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3Processor
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    extra = {
        "image_token": "<image>",
        "boi_token": "<|image start|>",
        "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>",
        "eof_token": "<|extra_201|>",
        "eol_token": "<|extra_200|>",
    }
    codes = tuple(f"<|visual token {number:06d}|>" for number in range(32))
    sizes = tuple(f"{rows}*{columns}" for rows in range(1, 9) for columns in range(1, 9))
    words = tokenizer(extra, (*WORDS, *sizes, *codes), bare=True)
    torch.manual_seed(seed)
    config = Emu3Config(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        vq_config={
            "codebook_size": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "hidden_size": 32,
            "temporal_downsample_factor": 4,
            "attn_resolutions": [1],
        },
        vocabulary_map=words.get_vocab(),
    )
    model = sharpened(Emu3ForConditionalGeneration(config), 1.0)
    return model, Emu3Processor(JanusImageProcessorPil(), words)  # the class's own wants torchvision; it is not asked


# ---- what the class itself draws, one prompt at a time


def own_janus(model: Any, processor: Any, prompt: str) -> list[int]:
    from transformers import DynamicCache

    given = processor(text=[prompt], generation_mode="image", return_tensors="pt")
    found = model.generate(
        **given,
        generation_mode="image",
        guidance_scale=5.0,
        do_sample=False,
        past_key_values=DynamicCache(config=model.config.text_config),  # 5.17 fails to make its own
    )
    return found[0].tolist()


def own_imagegpt(model: Any, processor: Any, prompt: str) -> list[int]:
    begin = torch.tensor([[model.config.vocab_size - 1]])
    found = model.generate(begin, max_length=model.config.n_positions + 1, do_sample=False, pad_token_id=0)
    return found[0, 1:].tolist()


AREA = {"area": 64 * 64, "negative": "blue sky"}  # 8x8 codes


def own_emu3(model: Any, processor: Any, prompt: str) -> list[int]:
    words, codes = processor.tokenizer, model.vocabulary_mapping.image_tokens
    size = {"return_for_image_generation": True, "ratio": "1:1", "image_area": AREA["area"], "return_tensors": "pt"}
    asked, free = processor(text=[prompt], **size), processor(text=[AREA["negative"]], **size)
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
    return found[0, asked.input_ids.shape[1] :].tolist()


Own = Callable[[Any, Any, str], list[int]]
MODELS: Mapping[str, tuple[Callable[..., tuple[Any, Any]], Own, dict[str, Any]]] = {
    "janus": (janus, own_janus, {}),
    "imagegpt": (imagegpt, own_imagegpt, {}),
    "emu3": (emu3, own_emu3, AREA),
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
    for one in plain:
        wanted = MODELS[name][1](model, processor, one.prompt)
        sequence = getattr(im.published, "sequence", list)(one.tokens)
        assert sequence == wanted
        assert len(one.tokens) >= 64 and len(set(wanted)) > 1
        assert one.trace.summary().tokens_per_call == 1
    assert len({token for one in plain for token in one.tokens}) > 5


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own(name: str) -> None:
    same(name, PROMPTS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own_on_20_prompts(name: str, measured: Any) -> None:
    assert len(PROMPTS) == 20 and all(prompt.strip() for prompt in PROMPTS)
    same(name, PROMPTS)
    measured("equality with generate: prompts without a mismatch", name=name, value=20)


def others(quick: Sequence[str]) -> list[Any]:
    return [
        pytest.param(name, drafter, marks=[] if drafter in quick else pytest.mark.slow)
        for name in MODELS
        for drafter in drafters(taught=False)
    ]


@pytest.mark.parametrize(("name", "drafter"), others(("jacobi", "sampled-tree")))
def test_whoever_drafts_the_picture_is_the_same(name: str, drafter: str) -> None:
    im = made(name)[2]
    prompts = ["a red heart", "blue sky on the hill"]
    found = im.generate(prompts, drafter=drafter, rule="gumbel-match", seed=3)
    assert [one.tokens for one in found] == plain(name)


@cache
def plain(name: str) -> list[list[int]]:
    found = made(name)[2].generate(["a red heart", "blue sky on the hill"], drafter=None, rule="gumbel-match", seed=3)
    return [one.tokens for one in found]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drafter", ["jacobi"])
def test_greedy_pictures_are_the_same_too(name: str, drafter: str) -> None:
    im = made(name)[2]
    wanted = im.generate("a red heart", drafter=None, temperature=0.0)
    assert im.generate("a red heart", drafter=drafter, temperature=0.0).tokens == wanted.tokens


@pytest.mark.parametrize("drafter", ["draft-model", "jacobi", "top-k-tree", "sampled-tree"])
def test_laws_are_those_of_the_class(drafter: str) -> None:
    """Three codes, two tokens: every branch of chance."""
    model, processor = janus(codes=3)
    target, small = published(model.double(), processor), published(janus(1, 1, codes=3)[0].double(), processor)
    asked = target.read("a red heart")

    def of(one: Any, rows: int) -> Any:
        return one.target([asked] * rows, 5.0)

    class Many:
        """As many rows as asked for."""

        def __init__(self, one: Any) -> None:
            self.one, inner = one, of(one, 1)
            self.vocabulary, self.device, self.rollback = inner.vocabulary, inner.device, True
            self.weight_bytes = inner.weight_bytes

        def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
            self.inner = of(self.one, len(prompts))
            return self.inner.begin(prompts, sampling, needs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    method = DRAFTERS[drafter]
    case = Case(
        target=partial(Many, target),
        drafter=partial(equip, method, method.trials[0], partial(Many, small)),
        rule=Exact(),
        prompts=[(0,)],
    )
    (law,) = enumerate_output(case)
    wanted = target_law(Many(target), (0,), Sampling(), 3)
    assert total_variation(law, wanted) < 1e-12
    given = processor(text=["a red heart"], generation_mode="image", return_tensors="pt")
    assert total_variation(wanted, by_hand(model, given.input_ids, target.free(asked))) < 1e-12


@torch.no_grad()
def by_hand(model: Any, asked: torch.Tensor, free: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The class's law of three tokens, prefix by prefix, with no cache."""
    codes = model.model.vqmodel.config.num_embeddings
    words = torch.cat([asked, torch.tensor([free]) - codes])
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for prefix, weight in law.items():
            read = model.get_input_embeddings()(words)
            if prefix:
                drawn = model.prepare_embeddings_for_image_generation(torch.tensor([prefix, prefix]))
                read = torch.cat([read, drawn], 1)
            states = model.model.language_model(inputs_embeds=read, use_cache=False).last_hidden_state[:, -1]
            with_prompt, without = model.model.generation_head(states)
            chances = (without + 5.0 * (with_prompt - without)).softmax(-1).tolist()
            grown |= {(*prefix, code): weight * chance for code, chance in enumerate(chances)}
        law = grown
    return law


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
    other = PublishedModel(published(model, processor), name="janus", small=lambda: published(*imagegpt()))
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
