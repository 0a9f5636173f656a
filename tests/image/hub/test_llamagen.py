"""LlamaGen on our own transformer: small checkpoints with random weights in the published layout, converted, loaded and
compared with an independent forward pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider import image
from outrider.core.errors import Incompatible, InvalidOption
from outrider.image.hub.llamagen import convert
from outrider.image.hub.model import PublishedModel

WIDTH, HEADS, HIDDEN, CODES, SIDE = 32, 2, 48, 40, 4
CLASSES, FEATURES, LONGEST = 25, 12, 9
WORDS = ("a", "red", "blue", "heart", "cat", "house", "on", "the", "hill")


# ---- checkpoints in the published layout


def transformer(seed: int, layers: int, captioned: bool, codes: int = CODES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.6) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

    weights = {
        "tok_embeddings.weight": draw(codes, WIDTH, scale=4.0),
        "norm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
        "output.weight": draw(codes, WIDTH, scale=3.0),
    }
    if captioned:
        weights["cls_embedding.cap_proj.fc1.weight"] = draw(WIDTH, FEATURES)
        weights["cls_embedding.cap_proj.fc2.weight"] = draw(WIDTH, WIDTH)
        weights["cls_embedding.uncond_embedding"] = draw(LONGEST, FEATURES, scale=3.0)
    else:
        weights["cls_embedding.embedding_table.weight"] = draw(CLASSES + 1, WIDTH, scale=4.0)
    for index in range(layers):
        prefix = f"layers.{index}"
        weights[f"{prefix}.attention.wqkv.weight"] = draw(3 * WIDTH, WIDTH)
        weights[f"{prefix}.attention.wo.weight"] = draw(WIDTH, WIDTH)
        weights[f"{prefix}.feed_forward.w1.weight"] = draw(HIDDEN, WIDTH)
        weights[f"{prefix}.feed_forward.w3.weight"] = draw(HIDDEN, WIDTH)
        weights[f"{prefix}.feed_forward.w2.weight"] = draw(WIDTH, HIDDEN)
        for norm in ("attention_norm", "ffn_norm"):
            weights[f"{prefix}.{norm}.weight"] = 1 + 0.1 * torch.randn(WIDTH, generator=generator)
    return weights


class Residual(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inside, 1e-6), nn.GroupNorm(32, out, 1e-6)
        self.conv1, self.conv2 = nn.Conv2d(inside, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        if inside != out:
            self.nin_shortcut = nn.Conv2d(inside, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        y = self.conv2(nn.functional.silu(self.norm2(y)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + y


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, 1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).flatten(2) for part in (self.q, self.k, self.v))  # [B, C, N]
        attention = (torch.einsum("bci,bcj->bij", q, k) * q.shape[1] ** -0.5).softmax(-1)
        return x + self.proj_out(torch.einsum("bij,bcj->bci", attention, v).view(x.shape))


class Codec(nn.Module):
    """A VQGAN with two blocks, of 32 and 64 channels."""

    def __init__(self, codes: int = CODES) -> None:
        super().__init__()

        def stage(inside: int, out: int, count: int, deep: bool) -> nn.Module:
            block = nn.Module()
            block.res = nn.ModuleList(Residual(inside if not number else out, out) for number in range(count))
            block.attn = nn.ModuleList(Attention(out) for _ in range(count * deep))
            return block

        def half(first: nn.Conv2d, blocks: list[nn.Module], middle: int, last: int, out: int) -> nn.Module:
            module = nn.Module()
            module.conv_in, module.conv_blocks = first, nn.ModuleList(blocks)
            module.mid = nn.ModuleList([Residual(middle, middle), Attention(middle), Residual(middle, middle)])
            module.norm_out, module.conv_out = nn.GroupNorm(32, last, 1e-6), nn.Conv2d(last, out, 3, padding=1)
            return module

        down = [stage(32, 32, 2, False), stage(32, 64, 2, True)]
        down[0].downsample = nn.Module()
        down[0].downsample.conv = nn.Conv2d(32, 32, 3, stride=2)
        up = [stage(64, 64, 3, True), stage(64, 32, 3, False)]
        up[0].upsample = nn.Module()
        up[0].upsample.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.encoder = half(nn.Conv2d(3, 32, 3, padding=1), down, 64, 64, 16)
        self.decoder = half(nn.Conv2d(16, 64, 3, padding=1), up, 64, 32, 3)
        self.quant_conv, self.post_quant_conv = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.quantize = nn.Module()
        self.quantize.embedding = nn.Embedding(codes, 4)
        self.quantize.register_buffer("codebook_used", torch.zeros(64))

    def decode(self, grid: Tensor) -> Tensor:
        x = F.normalize(self.quantize.embedding.weight, dim=-1)[grid].permute(0, 3, 1, 2)
        x = self.decoder.conv_in(self.post_quant_conv(x))
        for part in self.decoder.mid:
            x = part(x)
        for block in self.decoder.conv_blocks:
            for number, part in enumerate(block.res):
                x = part(x)
                x = block.attn[number](x) if len(block.attn) else x
            if hasattr(block, "upsample"):
                x = block.upsample.conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return self.decoder.conv_out(nn.functional.silu(self.decoder.norm_out(x)))


@cache
def codec(codes: int = CODES) -> Codec:
    torch.manual_seed(4)
    return Codec(codes).eval()


def published(
    folder: Path, seed: int, layers: int, captioned: bool = False, text: str = "", codes: int = CODES
) -> Path:
    """Write published files and convert them to a folder. All seeds but 0 write a training checkpoint, which holds more
    than the weights."""
    from argparse import Namespace

    folder.mkdir()
    weights = transformer(seed, layers, captioned, codes)
    checkpoint = weights if seed == 0 else {"model": weights, "steps": 3, "args": Namespace(lr=1.0)}
    torch.save(checkpoint, folder / "gpt.pt")
    torch.save({"model": codec(codes).state_dict()}, folder / "vq.pt")
    names = [] if captioned else [f"kind {number}" for number in range(CLASSES)]
    return convert(
        folder / "gpt.pt",
        folder / "vq.pt",
        folder / "converted",
        pixels=SIDE * 2,
        heads=HEADS,
        classes=names,
        **({"text": text} if text else {}),
    )


# ---- an independent forward pass: no cache, complex rotations, rotary pairs next to each other


def logits(weights: dict[str, Tensor], x: Tensor, prompt_length: int) -> Tensor:
    """Embeddings [L, D] of the condition and of codes -> logits [L, V]."""
    dim = WIDTH // HEADS
    rates = 10000.0 ** -(torch.arange(0, dim // 2, 2).float() / (dim // 2))
    rotations = torch.zeros(len(x), dim // 2, dtype=torch.complex64)
    for position in range(prompt_length, len(x)):
        row, column = divmod(position - prompt_length, SIDE)
        angles = torch.cat([row * rates, column * rates])
        rotations[position] = torch.polar(torch.ones_like(angles), angles)

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return states * (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def rotate(part: Tensor) -> Tensor:  # [L, H, d]
        pairs = torch.view_as_complex(part.reshape(len(x), HEADS, dim // 2, 2))
        return torch.view_as_real(pairs * rotations[:, None]).flatten(2)

    layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    for index in range(layers):
        own = {name.removeprefix(f"layers.{index}."): tensor for name, tensor in weights.items()}
        q, k, v = (
            (norm(x, own["attention_norm.weight"]) @ own["attention.wqkv.weight"].T)
            .view(len(x), 3, HEADS, dim)
            .unbind(1)
        )
        scores = torch.einsum("ihd,jhd->hij", rotate(q), rotate(k)) / dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ own["attention.wo.weight"].T
        y = norm(x, own["ffn_norm.weight"])
        gate = F.silu(y @ own["feed_forward.w1.weight"].T)
        x = x + (gate * (y @ own["feed_forward.w3.weight"].T)) @ own["feed_forward.w2.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


def greedy(weights: dict[str, Tensor], condition: Tensor, unconditional: Tensor, guidance: float) -> list[int]:
    """The codes of greedy decoding under guidance, for condition embeddings [L, D]."""
    codes: list[int] = []
    for _ in range(SIDE * SIDE):
        embedded = weights["tok_embeddings.weight"][codes]
        with_prompt, without = (
            logits(weights, torch.cat([prompt, embedded]), len(prompt))[-1] for prompt in (condition, unconditional)
        )
        codes.append(int((without + guidance * (with_prompt - without)).argmax()))
    return codes


@pytest.fixture(scope="module")
def class_model(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    folder = tmp_path_factory.mktemp("class")
    large, small = published(folder / "large", 0, 3), published(folder / "small", 1, 1)
    model = image.load(large, draft_model=small, dtype="float32")
    assert isinstance(model, PublishedModel)
    return model


@pytest.mark.slow
def test_pictures_of_20_classes_equal_the_independent_forward_pass(class_model: PublishedModel, measured: Any) -> None:
    weights = transformer(0, 3, False)
    table = weights["cls_embedding.embedding_table.weight"]
    prompts = [str(number) if number % 2 else f"kind {number}" for number in range(20)]
    results = class_model.generate(prompts, drafter=None, temperature=0.0)
    for number, result in enumerate(results):
        assert result.tokens == greedy(weights, table[number][None], table[-1][None], 4.0)
        expected = codec().decode(result.grid[None])[0].detach().clamp(-1, 1).permute(1, 2, 0)
        pixels = torch.from_numpy(np.array(result.image)) / 127.5 - 1
        assert (expected - pixels).abs().max() < 0.01
    assert len({tuple(result.tokens) for result in results}) > 15
    measured("prompts whose tokens equal those of an independent forward pass", name="llamagen", value=20)


@pytest.mark.parametrize("drafter", ["jacobi", "draft-model", "top-k-tree", "suffix"])
def test_no_drafter_changes_the_picture(class_model: PublishedModel, drafter: str) -> None:
    plain = class_model.generate(["1", "7"], drafter=None, rule="gumbel-match", seed=3)
    drafted = class_model.generate(["1", "7"], drafter=drafter, rule="gumbel-match", seed=3)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]


def test_neighbours_and_white_come_from_the_codec(class_model: PublishedModel) -> None:
    nearest = torch.cdist(class_model.code_vectors, class_model.code_vectors).fill_diagonal_(torch.inf).argmin(-1)
    assert (class_model.neighbours[:, 0] == nearest).all()
    assert 0 <= class_model.white < CODES
    relaxed = class_model.generate("3", rule="lantern", rule_options={"k": 5}, seed=1)
    assert not relaxed.trace.lossless


def test_unknown_classes_and_files_are_rejected(class_model: PublishedModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="unknown class 'kind 99'"):
        class_model.generate("kind 99")
    with pytest.raises(InvalidOption, match="the prompt is empty"):
        class_model.generate(" ")
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(Incompatible, match=r"no tensor 'tok_embeddings\.weight'"):
        convert(tmp_path / "other.pt", tmp_path / "other.pt", tmp_path / "converted", pixels=8)


def text_encoder(folder: Path) -> Any:
    """A tiny T5 with its tokenizer, whose vocabulary is WORDS; saved in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    ids = {name: number for number, name in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    torch.manual_seed(2)
    config = T5Config(vocab_size=len(ids), d_model=FEATURES, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = T5EncoderModel(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.slow
def test_pictures_of_captions_equal_the_independent_forward_pass(tmp_path: Path, measured: Any) -> None:
    model, tokenizer = text_encoder(tmp_path / "t5")
    folder = published(tmp_path / "large", 5, 2, captioned=True, text=str(tmp_path / "t5"))
    im = image.load(folder, dtype="float32")
    assert isinstance(im, PublishedModel)
    weights = transformer(5, 2, True)

    def project(features: Tensor) -> Tensor:
        inner = F.gelu(features @ weights["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
        return inner @ weights["cls_embedding.cap_proj.fc2.weight"].T

    captions = [f"{a} {b}{c}" for a in WORDS[:4] for b in WORDS[3:6] for c in ("", " on the hill")][:20]
    for caption in captions:
        inputs = tokenizer(caption, padding="max_length", max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            features = model(**inputs).last_hidden_state[0][inputs.attention_mask[0].bool()]
        nothing = weights["cls_embedding.uncond_embedding"][-len(features) :]
        expected = greedy(weights, project(features), project(nothing), 7.5)
        assert im.generate(caption.upper(), drafter="jacobi", temperature=0.0).tokens == expected
    batch = im.generate(["a red heart", "the blue cat"], drafter=None, temperature=0.0)
    assert [result.tokens for result in batch] == [
        im.generate(caption, drafter=None, temperature=0.0).tokens for caption in ("a red heart", "the blue cat")
    ]
    with pytest.raises(InvalidOption, match="one after another"):
        im.generate(["a cat", "the red cat on the hill"])
    measured("prompts whose tokens equal those of an independent forward pass", name="llamagen captions", value=20)
