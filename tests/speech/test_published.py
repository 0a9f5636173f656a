"""Published models of speech and sound: the real classes of transformers, tiny, of random weights.

Plain decoding through the loop is the class's own `generate`, token for token; whoever drafts, the tokens are the same.
Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.draft import Draft, Tree, told
from outrider.core.errors import InvalidOption
from outrider.core.laws import Sampling
from outrider.speech.csm import target
from outrider.speech.published import PublishedSpeech, drafters, published


def sharpened(model: Any, by: float = 1.0) -> Any:
    """Weights far enough from 0 for laws that are neither flat nor certain."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += by * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return model.eval()


TEXT = 40  # ids of words
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def csm(seed: int = 0, layers: int = 2) -> Any:
    """Three books of 20 codes."""
    from transformers import CsmConfig, CsmForConditionalGeneration

    torch.manual_seed(seed)
    config = CsmConfig(
        num_codebooks=3,
        vocab_size=20,
        text_vocab_size=TEXT,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        pad_token_id=1,
        codebook_pad_token_id=19,
        codebook_eos_token_id=0,
        bos_token_id=2,
        audio_token_id=3,
        audio_eos_token_id=4,
        depth_decoder_config={
            "num_codebooks": 3,
            "vocab_size": 20,
            "backbone_hidden_size": 32,
            "num_hidden_layers": 1,
            "max_position_embeddings": 8,
            **SMALL,
        },
        codec_config={
            "model_type": "mimi",
            "num_filters": 4,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "codebook_dim": 8,
            "vector_quantization_hidden_dimension": 8,
            "codebook_size": 32,
            "num_quantizers": 3,
            "upsample_groups": 16,
        },
        **SMALL,
    )
    made = sharpened(CsmForConditionalGeneration(config), 0.6)
    with torch.no_grad():  # a frame that ends speech should be rare
        made.depth_decoder.codebooks_head.weight[..., 0] -= 0.5
    return made


def musicgen(seed: int = 0, layers: int = 2) -> Any:
    """Four books of 32 codes."""
    from transformers import (
        EncodecConfig,
        MusicgenConfig,
        MusicgenDecoderConfig,
        MusicgenForConditionalGeneration,
        T5Config,
    )

    torch.manual_seed(seed)
    config = MusicgenConfig(
        text_encoder=T5Config(vocab_size=TEXT, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2).to_dict(),
        audio_encoder=EncodecConfig(
            num_filters=4,
            hidden_size=8,
            codebook_size=32,
            codebook_dim=8,
            num_lstm_layers=1,
            upsampling_ratios=[2, 2],
            target_bandwidths=[120.0],  # 4 books
        ).to_dict(),
        decoder=MusicgenDecoderConfig(
            vocab_size=32,
            hidden_size=32,
            num_hidden_layers=layers,
            ffn_dim=48,
            num_attention_heads=4,
            num_codebooks=4,
            pad_token_id=32,
            bos_token_id=32,
            max_position_embeddings=128,
        ).to_dict(),
    )
    made = sharpened(MusicgenForConditionalGeneration(config))
    made.generation_config.update(pad_token_id=32, decoder_start_token_id=32, bos_token_id=32)
    return made


def bark(seed: int = 0, layers: int = 2) -> Any:
    """12 semantic tokens, two coarse books of 8 codes."""
    from transformers import BarkConfig, BarkModel

    torch.manual_seed(seed)
    stage = {"hidden_size": 24, "num_heads": 4, "num_layers": layers, "dropout": 0.0}
    config = BarkConfig(
        semantic_config={**stage, "block_size": 40, "input_vocab_size": 60, "output_vocab_size": 20},
        coarse_acoustics_config={**stage, "block_size": 64, "input_vocab_size": 40, "output_vocab_size": 28},
        fine_acoustics_config={**stage, "block_size": 64, "input_vocab_size": 10, "output_vocab_size": 10},
        codec_config={"model_type": "encodec", "num_filters": 2, "hidden_size": 8, "upsampling_ratios": [2, 2]},
    )
    made = sharpened(BarkModel(config))
    made.generation_config.codebook_size = 8
    made.generation_config.semantic_config = {
        "eos_token_id": 12,
        "semantic_pad_token": 12,
        "pad_token_id": 12,
        "semantic_vocab_size": 12,
        "text_encoding_offset": 13,
        "text_pad_token": 57,
        "semantic_infer_token": 58,
        "max_input_semantic_length": 16,
        "semantic_rate_hz": 50,
        "max_new_tokens": 24,
    }
    made.generation_config.coarse_acoustics_config = {
        "coarse_semantic_pad_token": 30,
        "coarse_infer_token": 31,
        "coarse_rate_hz": 75,
        "n_coarse_codebooks": 2,
        "max_coarse_input_length": 16,
        "max_coarse_history": 24,
        "sliding_window_len": 10,
        "pad_token_id": 30,
        "eos_token_id": None,
    }
    return made


def whisper(seed: int = 0, layers: int = 2) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=50,
        d_model=32,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    made = sharpened(WhisperForConditionalGeneration(config), 2.0)
    made.generation_config.update(suppress_tokens=[7, 9], begin_suppress_tokens=[2, 11], forced_decoder_ids=None)
    return made


def llasa(seed: int = 0, layers: int = 2) -> Any:
    """24 codes as words of a Llama."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    marks = [f"<|{part}_{end}|>" for part in ("TEXT_UNDERSTANDING", "SPEECH_GENERATION") for end in ("START", "END")]
    names = ["<unk>", "good", "morning", "Convert", "the", "text", "to", "speech:", *marks]
    ids = {word: number for number, word in enumerate([*names, *(f"<|s_{code}|>" for code in range(24))])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(ids), num_hidden_layers=layers, max_position_embeddings=256, **SMALL)
    made = sharpened(LlamaForCausalLM(config))
    made.tokenizer = tokenizer
    return made


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
    "csm": (csm, own_csm, 22, {}),  # frames of 3
    "musicgen": (musicgen, own_musicgen, 16, {}),  # columns of 4
    "bark": (bark, own_bark, 24, {}),
    "whisper": (whisper, own_whisper, 64, {"before": [3, 5, 6]}),
    "llasa": (llasa, own_llasa, 64, {}),
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
        rows = [torch.randint(0, TEXT, (1, 16), generator=drawn_by) for _ in range(count)]
        return [
            {"input_ids": row, "attention_mask": (torch.arange(16) < 5 + number % 9).long()[None]}
            for number, row in enumerate(rows)
        ]
    rows = [torch.randint(5, TEXT, (1, 4 + number % 5), generator=drawn_by) for number in range(count)]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding_is_the_class_s_own_on_20_prompts(name: str, measured: Any) -> None:
    same(name, 20)
    measured("equality with generate: prompts without a mismatch", name=name, value=20)


QUICK = ("jacobi", "suffix")


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        pytest.param(name, drafter, marks=[] if drafter in QUICK else pytest.mark.slow)
        for name in MODELS
        for drafter in drafters()
    ],
)
def test_whoever_drafts_the_tokens_are_the_same(name: str, drafter: str) -> None:
    sp = made(name)[1]
    (prompt,) = prompts(name, 1)
    fewer = {"nodes": 16, "batch": 4, "width": 4, "passes": 4} if drafter == "specexec" else {}
    found = sp.generate(
        prompt, limit=12, drafter=drafter, drafter_options=fewer, rule="gumbel-match", temperature=1.0, seed=3
    )
    assert found.tokens == drawn(name)
    if drafter == "suffix":
        greedy = sp.generate(prompt, limit=12)
        assert sp.generate(prompt, limit=12, drafter=drafter).tokens == greedy.tokens != drawn(name)


@cache
def drawn(name: str) -> list[list[int]]:
    (prompt,) = prompts(name, 1)
    return made(name)[1].generate(prompt, limit=12, rule="gumbel-match", temperature=1.0, seed=3).tokens


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
    """Tokens kept that were never scored, drafts taken back, kept in part or scored twice: the law behind is the
    class's behind the same tokens."""
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
            chain, verdict, count = told([ahead[:many]], work.device)
            path = torch.nn.functional.pad(verdict.path, (0, 7 - chain.size), value=-1)
            work.keep(draft, replace(verdict, path=path), count)
            said += ahead[:many]
        elif kind == 1:  # told, with nothing scored
            work.keep(*told([ahead[:5]], work.device))
            said += ahead[:5]
        elif kind == 2:  # a tree that is scored and taken back, then another draft
            tree = Tree.of((-1, -1, 0, 1, 2, 3))
            tokens = [ahead[0], ahead[0], ahead[1], ahead[1], ahead[2], ahead[2]]
            work.score(Draft.guess(torch.tensor([tokens]), tree, torch.ones(1, 6).bool()))
            work.keep(*told([ahead[:4]], work.device)) if turn % 8 == 2 else None
            work.rewind(place)
            work.keep(*told([ahead[:2]], work.device))
            said += ahead[:2]
        else:  # a long draft is followed by a short one, and by what neither held
            for size in (6, 1):
                work.score(Draft.guess(torch.tensor([ahead[:size]]), Tree.chain(size), torch.ones(1, size).bool()))
            work.rewind(place)
            work.keep(*told([[*ahead[:3]]], work.device))
            said += ahead[:3]
        fresh = target(model, prompt)
        fresh.begin([[0]], Sampling())
        fresh.keep(*told([said], fresh.device))
        one, other = (each.score(Draft.empty(1)).logits()[0, 0] for each in (work, fresh))
        assert torch.allclose(one, other, atol=1e-4), turn
