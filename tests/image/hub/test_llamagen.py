"""LlamaGen on our own transformer: small checkpoints of random weights in exactly the layout that is published,
converted and opened by name, against a forward pass written down here on its own."""

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


# ---- files as they are published


def transformer(seed: int, layers: int, captioned: bool, codes: int = CODES) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.6) -> Tensor:
        return torch.randn(*shape, generator=made) * scale / shape[-1] ** 0.5

    found = {
        "tok_embeddings.weight": draw(codes, WIDTH, scale=4.0),
        "norm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=made),
        "output.weight": draw(codes, WIDTH, scale=3.0),
    }
    if captioned:
        found["cls_embedding.cap_proj.fc1.weight"] = draw(WIDTH, FEATURES)
        found["cls_embedding.cap_proj.fc2.weight"] = draw(WIDTH, WIDTH)
        found["cls_embedding.uncond_embedding"] = draw(LONGEST, FEATURES, scale=3.0)
    else:
        found["cls_embedding.embedding_table.weight"] = draw(CLASSES + 1, WIDTH, scale=4.0)
    for index in range(layers):
        at = f"layers.{index}"
        found[f"{at}.attention.wqkv.weight"] = draw(3 * WIDTH, WIDTH)
        found[f"{at}.attention.wo.weight"] = draw(WIDTH, WIDTH)
        found[f"{at}.feed_forward.w1.weight"] = draw(HIDDEN, WIDTH)
        found[f"{at}.feed_forward.w3.weight"] = draw(HIDDEN, WIDTH)
        found[f"{at}.feed_forward.w2.weight"] = draw(WIDTH, HIDDEN)
        for norm in ("attention_norm", "ffn_norm"):
            found[f"{at}.{norm}.weight"] = 1 + 0.1 * torch.randn(WIDTH, generator=made)
    return found


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
        shares = (torch.einsum("bci,bcj->bij", q, k) * q.shape[1] ** -0.5).softmax(-1)
        return x + self.proj_out(torch.einsum("bij,bcj->bci", shares, v).view(x.shape))


class Codec(nn.Module):
    """Two blocks of 32 and 64 channels."""

    def __init__(self, codes: int = CODES) -> None:
        super().__init__()

        def stage(inside: int, out: int, count: int, deep: bool) -> nn.Module:
            block = nn.Module()
            block.res = nn.ModuleList(Residual(inside if not number else out, out) for number in range(count))
            block.attn = nn.ModuleList(Attention(out) for _ in range(count * deep))
            return block

        def half(first: nn.Conv2d, blocks: list[nn.Module], middle: int, last: int, out: int) -> nn.Module:
            made = nn.Module()
            made.conv_in, made.conv_blocks = first, nn.ModuleList(blocks)
            made.mid = nn.ModuleList([Residual(middle, middle), Attention(middle), Residual(middle, middle)])
            made.norm_out, made.conv_out = nn.GroupNorm(32, last, 1e-6), nn.Conv2d(last, out, 3, padding=1)
            return made

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
    """The files, and the folder made of them. The one of a training that leaves more beside."""
    from argparse import Namespace

    folder.mkdir()
    weights = transformer(seed, layers, captioned, codes)
    whole = weights if seed == 0 else {"model": weights, "steps": 3, "args": Namespace(lr=1.0)}
    torch.save(whole, folder / "gpt.pt")
    torch.save({"model": codec(codes).state_dict()}, folder / "vq.pt")
    names = [] if captioned else [f"kind {number}" for number in range(CLASSES)]
    return convert(
        folder / "gpt.pt",
        folder / "vq.pt",
        folder / "made",
        pixels=SIDE * 2,
        heads=HEADS,
        classes=names,
        **({"text": text} if text else {}),
    )


# ---- the same by hand: no cache, complex numbers, pairs side by side


def logits(weights: dict[str, Tensor], x: Tensor, before: int) -> Tensor:
    """States [L, D] of the condition and of codes -> logits [L, V]."""
    dim = WIDTH // HEADS
    rates = 10000.0 ** -(torch.arange(0, dim // 2, 2).float() / (dim // 2))
    turns = torch.zeros(len(x), dim // 2, dtype=torch.complex64)
    for place in range(before, len(x)):
        row, column = divmod(place - before, SIDE)
        angles = torch.cat([row * rates, column * rates])
        turns[place] = torch.polar(torch.ones_like(angles), angles)

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return states * (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def turned(part: Tensor) -> Tensor:  # [L, H, d]
        pairs = torch.view_as_complex(part.reshape(len(x), HEADS, dim // 2, 2))
        return torch.view_as_real(pairs * turns[:, None]).flatten(2)

    layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    for index in range(layers):
        own = {name.removeprefix(f"layers.{index}."): one for name, one in weights.items()}
        q, k, v = (
            (norm(x, own["attention_norm.weight"]) @ own["attention.wqkv.weight"].T)
            .view(len(x), 3, HEADS, dim)
            .unbind(1)
        )
        scores = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) / dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        seen = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + seen @ own["attention.wo.weight"].T
        y = norm(x, own["ffn_norm.weight"])
        gate = F.silu(y @ own["feed_forward.w1.weight"].T)
        x = x + (gate * (y @ own["feed_forward.w3.weight"].T)) @ own["feed_forward.w2.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


def drawn(weights: dict[str, Tensor], asked: Tensor, free: Tensor, guidance: float) -> list[int]:
    """The likeliest codes under guidance, of conditions [L, D]."""
    codes: list[int] = []
    for _ in range(SIDE * SIDE):
        read = weights["tok_embeddings.weight"][codes]
        with_it, without = (logits(weights, torch.cat([one, read]), len(one))[-1] for one in (asked, free))
        codes.append(int((without + guidance * (with_it - without)).argmax()))
    return codes


@pytest.fixture(scope="module")
def classed(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    place = tmp_path_factory.mktemp("class")
    big, small = published(place / "big", 0, 3), published(place / "small", 1, 1)
    found = image.load(big, draft=small)
    assert isinstance(found, PublishedModel)
    return found


@pytest.mark.slow
def test_pictures_of_20_classes_are_those_by_hand(classed: PublishedModel, measured: Any) -> None:
    weights = transformer(0, 3, False)
    table = weights["cls_embedding.embedding_table.weight"]
    asked = [str(number) if number % 2 else f"kind {number}" for number in range(20)]
    found = classed.generate(asked, drafter=None, temperature=0.0)
    for number, one in enumerate(found):
        wanted = drawn(weights, table[number][None], table[-1][None], 4.0)
        assert one.tokens == wanted
        pixels = codec().decode(one.grid[None])[0].detach().clamp(-1, 1).permute(1, 2, 0)
        seen = torch.from_numpy(np.array(one.image)) / 127.5 - 1
        assert (pixels - seen).abs().max() < 0.01
    assert len({tuple(one.tokens) for one in found}) > 15
    measured("equality with a forward pass by hand: prompts without a mismatch", name="llamagen", value=20)


@pytest.mark.parametrize("drafter", ["jacobi", "draft-model", "top-k-tree", "suffix"])
def test_whoever_drafts_the_picture_is_the_same(classed: PublishedModel, drafter: str) -> None:
    plain = classed.generate(["1", "7"], drafter=None, rule="gumbel-match", seed=3)
    found = classed.generate(["1", "7"], drafter=drafter, rule="gumbel-match", seed=3)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


def test_neighbours_and_white_are_the_codec_s(classed: PublishedModel) -> None:
    near = torch.cdist(classed.looks, classed.looks).fill_diagonal_(torch.inf).argmin(-1)
    assert (classed.neighbours[:, 0] == near).all()
    assert 0 <= classed.white < CODES
    relaxed = classed.generate("3", rule="lantern", rule_options={"k": 5}, seed=1)
    assert not relaxed.trace.lossless


def test_what_is_no_class_is_said(classed: PublishedModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="unknown class 'kind 99'"):
        classed.generate("kind 99")
    with pytest.raises(InvalidOption, match="the prompt is empty"):
        classed.generate(" ")
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(Incompatible, match=r"no tensor 'tok_embeddings\.weight'"):
        convert(tmp_path / "other.pt", tmp_path / "other.pt", tmp_path / "made", pixels=8)


def reader(folder: Path) -> Any:
    """A T5 of these words."""
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
def test_pictures_of_captions_are_those_by_hand(tmp_path: Path, measured: Any) -> None:
    model, tokenizer = reader(tmp_path / "t5")
    im = image.load(published(tmp_path / "big", 5, 2, captioned=True, text=str(tmp_path / "t5")))
    assert isinstance(im, PublishedModel)
    weights = transformer(5, 2, True)

    def projected(features: Tensor) -> Tensor:
        inner = F.gelu(features @ weights["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
        return inner @ weights["cls_embedding.cap_proj.fc2.weight"].T

    captions = [f"{a} {b}{c}" for a in WORDS[:4] for b in WORDS[3:6] for c in ("", " on the hill")][:20]
    for caption in captions:
        given = tokenizer(caption, padding="max_length", max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            heard = model(**given).last_hidden_state[0][given.attention_mask[0].bool()]
        nothing = weights["cls_embedding.uncond_embedding"][-len(heard) :]
        wanted = drawn(weights, projected(heard), projected(nothing), 7.5)
        assert im.generate(caption.upper(), drafter="jacobi", temperature=0.0).tokens == wanted
    two = im.generate(["a red heart", "the blue cat"], drafter=None, temperature=0.0)
    assert [one.tokens for one in two] == [
        im.generate(one, drafter=None, temperature=0.0).tokens for one in ("a red heart", "the blue cat")
    ]
    with pytest.raises(InvalidOption, match="draw them one after another"):
        im.generate(["a cat", "the red cat on the hill"])
    measured("equality with a forward pass by hand: prompts without a mismatch", name="llamagen captions", value=20)
