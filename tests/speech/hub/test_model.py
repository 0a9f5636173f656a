"""Published speech models: the classes of transformers, tiny and with random weights.

Plain decoding equals the class's own `generate`, token for token. tests/test_published.py tests every drafter on every
class. Nothing is downloaded.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, forced
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.tree import Tree
from outrider.speech.hub.csm import target
from outrider.speech.hub.model import PublishedSpeech, published

pytestmark = pytest.mark.slow
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py")))

# ---- the classes' own generation


def own_csm(model: Any, prompt: Any, limit: int) -> list[list[int]]:
    codes = model.generate(prompt["input_ids"], max_new_tokens=limit, do_sample=False, depth_decoder_do_sample=False)
    return codes[0].tolist()


class Captured(Exception):
    """Raised in place of the codec, to stop generation with the codes."""


def own_musicgen(model: Any, prompt: Any, limit: int) -> list[list[int]]:
    captured: list[torch.Tensor] = []

    def capture(codes: torch.Tensor, **kwargs: Any) -> Any:
        captured.append(codes)
        raise Captured

    decode, model.audio_encoder.decode = model.audio_encoder.decode, capture
    try:
        with pytest.raises(Captured):
            model.generate(**prompt, max_new_tokens=limit + 3, do_sample=False, guidance_scale=3.0)
    finally:
        model.audio_encoder.decode = decode
    return captured[0][0, 0].T.tolist()


def own_bark(model: Any, prompt: Any, limit: int) -> dict[str, Any]:
    bark = published(model)
    semantic = model.semantic.generate(**prompt, semantic_generation_config=bark.semantic, do_sample=False)  # type: ignore
    coarse = model.coarse_acoustics.generate(
        semantic.clone(),
        semantic_generation_config=bark.semantic,  # type: ignore[attr-defined]
        coarse_generation_config=bark.coarse,  # type: ignore[attr-defined]
        codebook_size=8,
        do_sample=False,
    )
    return {"semantic": semantic[0].tolist(), "coarse": ((coarse[0] - 12) % 8).view(-1, 2).tolist()}


def own_whisper(model: Any, prompt: Any, limit: int) -> list[int]:
    from transformers import GenerationMixin

    prefix = torch.tensor([[3, 5, 6]])
    ids = GenerationMixin.generate(
        model, prompt["input_features"], decoder_input_ids=prefix, max_new_tokens=limit, do_sample=False
    )
    return ids[0, 3:].tolist()


def own_llasa(model: Any, prompt: list[int], limit: int) -> list[int]:
    end = model.tokenizer.convert_tokens_to_ids("<|SPEECH_GENERATION_END|>")
    own = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=limit, do_sample=False,
        eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    first = model.tokenizer.convert_tokens_to_ids("<|s_0|>")
    return [token - first for token in own[0, len(prompt) :].tolist() if token >= first]


def own_orpheus(model: Any, prompt: list[int], limit: int) -> list[int]:
    """All tokens: models with random weights seldom generate whole frames."""
    ends = [model.tokenizer.convert_tokens_to_ids(word) for word in ("<custom_token_2>", "<|eot_id|>")]
    own = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=limit, do_sample=False,
        eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    return list(own[0, len(prompt) :].tolist())


Own = Callable[[Any, Any, int], Any]
MODELS: Mapping[str, tuple[Callable[..., Any], Own, int, dict[str, Any]]] = {
    "csm": (TINY.csm, own_csm, 22, {}),  # frames of 3
    "musicgen": (TINY.musicgen, own_musicgen, 16, {}),  # columns of 4
    "bark": (TINY.bark, own_bark, 24, {}),
    "whisper": (TINY.whisper, own_whisper, 64, {"prefix": [3, 5, 6]}),
    "llasa": (TINY.llasa, own_llasa, 64, {}),
    "orpheus": (TINY.orpheus, own_orpheus, 64, {}),
}


def prompts(name: str, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    if name == "llasa":
        words = ("good", "morning", "the", "text", "speech:")
        texts = [" ".join([words[number % 5]] * (1 + number // 5)) for number in range(count)]
        return [tiny("llasa")[1].published.read(text) for text in texts]  # type: ignore[attr-defined]
    if name == "orpheus":
        texts = [" ".join(["tara:", "good", *["morning"] * number]) for number in range(count)]
        return [tiny("orpheus")[1].published.read(text) for text in texts]  # type: ignore[attr-defined]
    if name == "whisper":
        return [{"input_features": torch.randn(1, 8, 40, generator=generator)} for _ in range(count)]
    if name == "bark":  # padded to the length of the stage's input
        rows = [torch.randint(0, TINY.TEXT, (1, 16), generator=generator) for _ in range(count)]
        return [
            {"input_ids": row, "attention_mask": (torch.arange(16) < 5 + number % 9).long()[None]}
            for number, row in enumerate(rows)
        ]
    rows = [torch.randint(5, TINY.TEXT, (1, 4 + number % 5), generator=generator) for number in range(count)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


@cache
def tiny(name: str) -> tuple[Any, PublishedSpeech]:
    make, _, _, options = MODELS[name]
    model = make()
    tokenizer = getattr(model, "tokenizer", None)
    return model, PublishedSpeech(published(model, tokenizer, draft=make(1, 1), **options), name=name)


def compare_with_generate(name: str, count: int) -> None:
    model, sp = tiny(name)
    different = set()
    for prompt in prompts(name, count):
        limit = MODELS[name][2]
        result = sp.generate(prompt, max_new_tokens=limit)
        expected = MODELS[name][1](model, prompt, limit)
        if name == "csm" and len(result.outcome) < limit:
            assert set(expected.pop()[:-1]) == {0}  # the end frame
        found = result.tokens[0] if name == "orpheus" else result.outcome
        assert found == expected
        different.add(str(found))
    assert len(different) > count // 2


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_equals_generate(name: str) -> None:
    compare_with_generate(name, 2)


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_equals_generate_on_20_prompts(name: str, measured: Any) -> None:
    compare_with_generate(name, 20)
    measured("equality with generate: prompts without a mismatch", name=name, value=20)


def test_frames_become_sound() -> None:
    sp = tiny("csm")[1]
    result = sp.generate(prompts("csm", 1)[0], max_new_tokens=6)
    samples = sp.published.sound(result.outcome)  # type: ignore[attr-defined]
    assert samples.dim() == 1 and len(samples) > len(result.outcome)
    assert result.trace.options["model"] == "csm" and result.trace.summary().tokens == len(result.tokens[0])


def test_llasa_prompts_have_the_published_format() -> None:
    model, sp = tiny("llasa")
    ids = sp.published.read("good morning")  # type: ignore[attr-defined]
    assert model.tokenizer.decode(ids).endswith("<|SPEECH_GENERATION_START|>")
    result = sp.generate("good morning", max_new_tokens=64)
    assert result.outcome == own_llasa(model, ids, 64)
    with pytest.raises(InvalidOption, match="with codec="):
        sp.published.sound(result.outcome)  # type: ignore[attr-defined]


def test_llasa_codes_become_sound(tmp_path: Path) -> None:
    from transformers import Xcodec2Config, Xcodec2Model

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = Xcodec2Config(
        num_hidden_layers=1,
        num_key_value_heads=2,
        head_dim=16,
        encoder_hidden_size=4,
        quantization_dim=64,
        quantization_levels=(4, 4, 4),
        semantic_model_config={
            "model_type": "wav2vec2-bert",
            "num_hidden_layers": 1,
            "feature_projection_input_dim": 16,
            **small,
        },
        **small,
    )
    codec = Xcodec2Model(config).eval()
    codec.save_pretrained(tmp_path)
    model, _ = tiny("llasa")
    sp = PublishedSpeech(published(model, model.tokenizer, codec=str(tmp_path)), name="llasa")
    result = sp.generate("good morning", max_new_tokens=20)
    sound = sp.to_sound(result)
    with torch.no_grad():
        expected = codec.decode(torch.tensor([[result.outcome]])).audio_values[0, 0]
    assert sound.sample_rate == 16000 and len(sound.samples) == 320 * len(result.outcome) > 0
    assert torch.allclose(torch.from_numpy(sound.samples), expected, atol=1e-6)


def test_orpheus_codes_become_sound(tmp_path: Path) -> None:
    snac = pytest.importorskip("snac")
    config = {
        "sampling_rate": 24000, "encoder_dim": 4, "encoder_rates": [2, 4], "decoder_dim": 16, "decoder_rates": [4, 2],
        "attn_window_size": None, "codebook_size": 3, "codebook_dim": 4, "vq_strides": [4, 2, 1],
    }  # fmt: skip
    torch.manual_seed(0)
    codec = snac.SNAC(**config).eval()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(codec.state_dict(), tmp_path / "pytorch_model.bin")
    model, _ = tiny("orpheus")
    sp = PublishedSpeech(published(model, model.tokenizer, codec=str(tmp_path)), name="orpheus")
    frames = [[0, 1, 2, 0, 1, 2, 0], [2, 1, 1, 0, 0, 2, 1]]
    numbers = [3 * place + code for frame in frames for place, code in enumerate(frame)]
    odd = [numbers[0], numbers[0], *numbers[1:], numbers[0]]  # a code twice, and the beginning of a frame
    assert sp.published.outcome(odd) == frames  # type: ignore[attr-defined]
    samples = sp.published.sound(frames)  # type: ignore[attr-defined]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        books = [[0, 2], [1, 1, 1, 0], [2, 0, 2, 0, 1, 0, 2, 1]]
        expected = codec.decode([torch.tensor([book]) for book in books])[0, 0]
    assert len(samples) == 2 * 4 * 8 and torch.equal(samples, expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_dim": 1 << 20}))
    with pytest.raises(OutriderError, match="is no SNAC"):
        published(model, model.tokenizer, codec=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "medusa"}, "unknown drafter 'medusa'"),
        ({"rule": "nobody"}, "unknown rule"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        tiny("whisper")[1].generate(prompts("whisper", 1)[0], **options)


def test_classes_without_tokens_are_refused() -> None:
    from transformers import VitsConfig

    class Model:
        config = VitsConfig()

    with pytest.raises(InvalidOption, match="there is nothing to draft"):
        published(Model())
    alone = PublishedSpeech(published(tiny("whisper")[0], None, prefix=[3]), name="whisper")
    with pytest.raises(InvalidOption, match="needs a smaller model"):
        alone.generate(prompts("whisper", 1)[0], drafter="draft-model")


def test_frames_survive_any_order_of_scoring_and_keeping() -> None:
    """Tokens kept without being scored, drafts rewound, partly kept or scored twice: the next distribution equals that
    of a new target after the same tokens."""
    model = tiny("csm")[0]
    (prompt,) = prompts("csm", 1)
    generator = torch.Generator().manual_seed(11)
    work = target(model, prompt)
    work.begin([[0]], Sampling())
    kept: list[int] = []
    for turn in range(24):
        codes = torch.randint(1, 19, (8,), generator=generator).tolist()
        later = [(len(kept) + offset) % 3 * 20 + code for offset, code in enumerate(codes)]
        mark, kind = work.mark(), turn % 4
        if kind == 0:  # a draft that is partly kept
            tree = Tree.chain(7)
            draft = Draft.guess(torch.tensor([later[:7]]), tree, torch.ones(1, 7).bool())
            work.score(draft)
            length = 1 + turn % 7
            chain, verdict, count = forced([later[:length]], work.device)
            path = torch.nn.functional.pad(verdict.path, (0, 7 - chain.size), value=-1)
            work.keep(draft, replace(verdict, path=path), count)
            kept += later[:length]
        elif kind == 1:  # kept without being scored
            work.keep(*forced([later[:5]], work.device))
            kept += later[:5]
        elif kind == 2:  # a tree that is scored and rewound, then another draft
            tree = Tree.of((-1, -1, 0, 1, 2, 3))
            tokens = [later[0], later[0], later[1], later[1], later[2], later[2]]
            work.score(Draft.guess(torch.tensor([tokens]), tree, torch.ones(1, 6).bool()))
            work.keep(*forced([later[:4]], work.device)) if turn % 8 == 2 else None
            work.rewind(mark)
            work.keep(*forced([later[:2]], work.device))
            kept += later[:2]
        else:  # a long draft, a short one, then tokens of neither
            for size in (6, 1):
                work.score(Draft.guess(torch.tensor([later[:size]]), Tree.chain(size), torch.ones(1, size).bool()))
            work.rewind(mark)
            work.keep(*forced([[*later[:3]]], work.device))
            kept += later[:3]
        fresh = target(model, prompt)
        fresh.begin([[0]], Sampling())
        fresh.keep(*forced([kept], fresh.device))
        logits, expected = (each.score(Draft.empty(1)).logits()[0, 0] for each in (work, fresh))
        assert torch.allclose(logits, expected, atol=1e-4), turn
