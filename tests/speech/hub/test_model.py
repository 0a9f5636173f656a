"""Published models of speech and sound: the real classes of transformers, tiny, of random weights.

Plain decoding through the loop is the class's own `generate`, token for token. Every drafter on every class is in
tests/test_published.py. Nothing is downloaded.
"""

from __future__ import annotations

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
from outrider.core.errors import InvalidOption
from outrider.core.tree import Tree
from outrider.speech.hub.csm import target
from outrider.speech.hub.model import PublishedSpeech, published

pytestmark = pytest.mark.slow
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py")))

# ---- what the class itself says


def own_csm(model: Any, prompt: Any, limit: int) -> list[list[int]]:
    found = model.generate(prompt["input_ids"], max_new_tokens=limit, do_sample=False, depth_decoder_do_sample=False)
    return found[0].tolist()


class Heard(Exception):
    """Codes on their way to the codec."""


def own_musicgen(model: Any, prompt: Any, limit: int) -> list[list[int]]:
    held: list[torch.Tensor] = []

    def hear(codes: torch.Tensor, **named: Any) -> Any:
        held.append(codes)
        raise Heard

    decode, model.audio_encoder.decode = model.audio_encoder.decode, hear
    try:
        with pytest.raises(Heard):
            model.generate(**prompt, max_new_tokens=limit + 3, do_sample=False, guidance_scale=3.0)
    finally:
        model.audio_encoder.decode = decode
    return held[0][0, 0].T.tolist()


def own_bark(model: Any, prompt: Any, limit: int) -> dict[str, Any]:
    made = published(model)
    semantic = model.semantic.generate(**prompt, semantic_generation_config=made.words, do_sample=False)  # type: ignore
    coarse = model.coarse_acoustics.generate(
        semantic.clone(),
        semantic_generation_config=made.words,  # type: ignore[attr-defined]
        coarse_generation_config=made.coarse,  # type: ignore[attr-defined]
        codebook_size=8,
        do_sample=False,
    )
    return {"semantic": semantic[0].tolist(), "coarse": ((coarse[0] - 12) % 8).view(-1, 2).tolist()}


def own_whisper(model: Any, prompt: Any, limit: int) -> list[int]:
    from transformers import GenerationMixin

    begin = torch.tensor([[3, 5, 6]])
    found = GenerationMixin.generate(
        model, prompt["input_features"], decoder_input_ids=begin, max_new_tokens=limit, do_sample=False
    )
    return found[0, 3:].tolist()


def own_llasa(model: Any, prompt: list[int], limit: int) -> list[int]:
    end = model.tokenizer.convert_tokens_to_ids("<|SPEECH_GENERATION_END|>")
    own = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=limit, do_sample=False,
        eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    first = model.tokenizer.convert_tokens_to_ids("<|s_0|>")
    return [token - first for token in own[0, len(prompt) :].tolist() if token >= first]


Own = Callable[[Any, Any, int], Any]
MODELS: Mapping[str, tuple[Callable[..., Any], Own, int, dict[str, Any]]] = {
    "csm": (TINY.csm, own_csm, 22, {}),  # frames of 3
    "musicgen": (TINY.musicgen, own_musicgen, 16, {}),  # columns of 4
    "bark": (TINY.bark, own_bark, 24, {}),
    "whisper": (TINY.whisper, own_whisper, 64, {"before": [3, 5, 6]}),
    "llasa": (TINY.llasa, own_llasa, 64, {}),
}


def prompts(name: str, count: int) -> list[Any]:
    drawn_by = torch.Generator().manual_seed(7)
    if name == "llasa":
        words = ("good", "morning", "the", "text", "speech:")
        said = [" ".join([words[number % 5]] * (1 + number // 5)) for number in range(count)]
        return [made("llasa")[1].published.read(one) for one in said]  # type: ignore[attr-defined]
    if name == "whisper":
        return [{"input_features": torch.randn(1, 8, 40, generator=drawn_by)} for _ in range(count)]
    if name == "bark":  # padded to what the stage reads
        rows = [torch.randint(0, TINY.TEXT, (1, 16), generator=drawn_by) for _ in range(count)]
        return [
            {"input_ids": row, "attention_mask": (torch.arange(16) < 5 + number % 9).long()[None]}
            for number, row in enumerate(rows)
        ]
    rows = [torch.randint(5, TINY.TEXT, (1, 4 + number % 5), generator=drawn_by) for number in range(count)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


@cache
def made(name: str) -> tuple[Any, PublishedSpeech]:
    make, _, _, options = MODELS[name]
    model = make()
    words = getattr(model, "tokenizer", None)
    return model, PublishedSpeech(published(model, words, draft=make(1, 1), **options), name=name)


def same(name: str, count: int) -> None:
    model, sp = made(name)
    different = set()
    for prompt in prompts(name, count):
        limit = MODELS[name][2]
        found = sp.generate(prompt, limit=limit)
        wanted = MODELS[name][1](model, prompt, limit)
        if name == "csm" and len(found.outcome) < limit:
            assert set(wanted.pop()[:-1]) == {0}  # the frame that ends
        assert found.outcome == wanted
        different.add(str(found.outcome))
    assert len(different) > count // 2


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own(name: str) -> None:
    same(name, 2)


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own_on_20_prompts(name: str, measured: Any) -> None:
    same(name, 20)
    measured("equality with generate: prompts without a mismatch", name=name, value=20)


def test_frames_become_sound() -> None:
    sp = made("csm")[1]
    found = sp.generate(prompts("csm", 1)[0], limit=6)
    samples = sp.published.sound(found.outcome)  # type: ignore[attr-defined]
    assert samples.dim() == 1 and len(samples) > len(found.outcome)
    assert found.trace.options["model"] == "csm" and found.trace.summary().tokens == len(found.tokens[0])


def test_llasa_reads_a_text_as_its_family_does() -> None:
    model, sp = made("llasa")
    ids = sp.published.read("good morning")  # type: ignore[attr-defined]
    assert model.tokenizer.decode(ids).endswith("<|SPEECH_GENERATION_START|>")
    found = sp.generate("good morning", limit=64)
    assert found.outcome == own_llasa(model, ids, 64)
    with pytest.raises(InvalidOption, match="give codec="):
        sp.published.sound(found.outcome)  # type: ignore[attr-defined]


def test_llasa_is_heard_through_its_codec(tmp_path: Path) -> None:
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
    model, _ = made("llasa")
    sp = PublishedSpeech(published(model, model.tokenizer, codec=str(tmp_path)), name="llasa")
    said = sp.generate("good morning", limit=20)
    sound = sp.heard(said)
    with torch.no_grad():
        wanted = codec.decode(torch.tensor([[said.outcome]])).audio_values[0, 0]
    assert sound.rate == 16000 and len(sound.samples) == 320 * len(said.outcome) > 0
    assert torch.allclose(torch.from_numpy(sound.samples), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "medusa"}, "unknown drafter 'medusa'"),
        ({"rule": "nobody"}, "unknown rule"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        made("whisper")[1].generate(prompts("whisper", 1)[0], **options)


def test_classes_that_say_no_tokens_are_refused() -> None:
    from transformers import VitsConfig

    class Says:
        config = VitsConfig()

    with pytest.raises(InvalidOption, match="there is nothing to draft"):
        published(Says())
    alone = PublishedSpeech(published(made("whisper")[0], None, before=[3]), name="whisper")
    with pytest.raises(InvalidOption, match="wants a smaller model"):
        alone.generate(prompts("whisper", 1)[0], drafter="draft-model")


def test_frames_read_out_of_order_are_what_a_fresh_pass_reads() -> None:
    """Tokens kept that were never scored, drafts taken back, kept in part or scored twice: the distribution behind is
    the class's behind the same tokens."""
    model = made("csm")[0]
    (prompt,) = prompts("csm", 1)
    made_up = torch.Generator().manual_seed(11)
    work = target(model, prompt)
    work.begin([[0]], Sampling())
    said: list[int] = []
    for turn in range(24):
        ahead = [(len(said) + place) % 3 * 20 + int(torch.randint(1, 19, (), generator=made_up)) for place in range(8)]
        place, kind = work.mark(), turn % 4
        if kind == 0:  # a draft, of which some is kept
            tree = Tree.chain(7)
            draft = Draft.guess(torch.tensor([ahead[:7]]), tree, torch.ones(1, 7).bool())
            work.score(draft)
            many = 1 + turn % 7
            chain, verdict, count = forced([ahead[:many]], work.device)
            path = torch.nn.functional.pad(verdict.path, (0, 7 - chain.size), value=-1)
            work.keep(draft, replace(verdict, path=path), count)
            said += ahead[:many]
        elif kind == 1:  # told, with nothing scored
            work.keep(*forced([ahead[:5]], work.device))
            said += ahead[:5]
        elif kind == 2:  # a tree that is scored and taken back, then another draft
            tree = Tree.of((-1, -1, 0, 1, 2, 3))
            tokens = [ahead[0], ahead[0], ahead[1], ahead[1], ahead[2], ahead[2]]
            work.score(Draft.guess(torch.tensor([tokens]), tree, torch.ones(1, 6).bool()))
            work.keep(*forced([ahead[:4]], work.device)) if turn % 8 == 2 else None
            work.rewind(place)
            work.keep(*forced([ahead[:2]], work.device))
            said += ahead[:2]
        else:  # a long draft is followed by a short one, and by what neither held
            for size in (6, 1):
                work.score(Draft.guess(torch.tensor([ahead[:size]]), Tree.chain(size), torch.ones(1, size).bool()))
            work.rewind(place)
            work.keep(*forced([[*ahead[:3]]], work.device))
            said += ahead[:3]
        fresh = target(model, prompt)
        fresh.begin([[0]], Sampling())
        fresh.keep(*forced([said], fresh.device))
        one, other = (each.score(Draft.empty(1)).logits()[0, 0] for each in (work, fresh))
        assert torch.allclose(one, other, atol=1e-4), turn
