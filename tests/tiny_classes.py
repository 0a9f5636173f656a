"""Builds tiny transformers models with random weights, and their processors, for the tests of published models.

Nothing is downloaded. Each builder takes a seed, the number of layers (a smaller model drafts for a larger) and sizes,
down to three codes, at which every random branch can be enumerated.
"""

from __future__ import annotations

from typing import Any

import torch

WORDS = ("a", "red", "blue", "heart", "cat", "house", "on", "the", "hill", "sky")
STATES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {**STATES, "head_dim": 8}


def by_words(words: list[str], unknown: str) -> Any:
    """A tokenizer of words between spaces, with ids in their order."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def tokenizer(extra: dict[str, str], words: tuple[str, ...] = WORDS, bare: bool = False) -> Any:
    """A whitespace tokenizer with the special tokens <s>, <pad> and the given ones. `bare`: <s> is not added."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    made = by_words(["<s>", "<pad>", "</s>", "<unk>", *extra.values(), *words], "<unk>")
    if not bare:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, extra_special_tokens=extra, padding_side="left")


def sharpened(model: Any, by: float = 1.0) -> Any:
    """Scale random weights so that distributions are neither flat nor one-hot."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += by * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return model.eval()


# ---- pictures


def janus(seed: int = 0, layers: int = 2, codes: int = 64, side: int = 8) -> tuple[Any, Any]:
    from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    extra = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_placeholder>"}
    words = tokenizer(extra)
    torch.manual_seed(seed)
    config = JanusConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(words),
            "num_hidden_layers": layers,
            "max_position_embeddings": 256,
            "pad_token_id": 1,
            **STATES,
        },
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "image_size": 4 * side,
            "patch_size": 4,
            "num_image_tokens": side * side,
            "projection_dim": 32,
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
    model = sharpened(JanusForConditionalGeneration(config))
    model.generation_config.update(bos_token_id=0, pad_token_id=1, eos_token_id=2)
    model.generation_config.generation_kwargs = {"boi_token_id": words.convert_tokens_to_ids("<begin_of_image>")}
    pictures = JanusImageProcessorPil(size={"height": 4 * side, "width": 4 * side})
    return model, JanusProcessor(pictures, words, num_image_tokens=side * side)


def imagegpt(seed: int = 0, layers: int = 2, colours: int = 27, side: int = 8) -> tuple[Any, Any]:
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling
    from transformers.models.imagegpt.image_processing_pil_imagegpt import ImageGPTImageProcessorPil

    torch.manual_seed(seed)
    config = ImageGPTConfig(vocab_size=colours + 1, n_positions=side * side, n_embd=24, n_layer=layers, n_head=4)
    model = sharpened(ImageGPTForCausalImageModeling(config))
    levels = torch.tensor([-1.0, 0.0, 1.0])
    clusters = torch.cartesian_prod(levels, levels, levels)[:colours].tolist()
    return model, ImageGPTImageProcessorPil(clusters=clusters, size={"height": side, "width": side})


def emu3(seed: int = 0, layers: int = 2, codes: int = 32) -> tuple[Any, Any]:
    """A picture of 8x8 pixels has one code."""
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
    seen = tuple(f"<|visual token {number:06d}|>" for number in range(codes))
    sizes = tuple(f"{rows}*{columns}" for rows in range(1, 9) for columns in range(1, 9))
    words = tokenizer(extra, (*WORDS, *sizes, *seen), bare=True)
    torch.manual_seed(seed)
    config = Emu3Config(
        text_config={
            "vocab_size": len(words),
            "num_hidden_layers": layers,
            "max_position_embeddings": 256,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            **STATES,
        },
        vq_config={
            "codebook_size": codes,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "hidden_size": 32,
            "temporal_downsample_factor": 4,
            "attn_resolutions": [1],
        },
        vocabulary_map=words.get_vocab(),
    )
    model = sharpened(Emu3ForConditionalGeneration(config))
    return model, Emu3Processor(
        JanusImageProcessorPil(), words
    )  # the class's own image processor needs torchvision; it is not used


# ---- speech and sound

TEXT = 40  # number of text ids


def csm(seed: int = 0, layers: int = 2, books: int = 3, codes: int = 20) -> Any:
    from transformers import CsmConfig, CsmForConditionalGeneration

    torch.manual_seed(seed)
    config = CsmConfig(
        num_codebooks=books,
        vocab_size=codes,
        text_vocab_size=TEXT,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        pad_token_id=1,
        codebook_pad_token_id=codes - 1,
        codebook_eos_token_id=0,
        bos_token_id=2,
        audio_token_id=3,
        audio_eos_token_id=4,
        depth_decoder_config={
            "num_codebooks": books,
            "vocab_size": codes,
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
            "num_quantizers": books,
            "upsample_groups": 16,
        },
        **SMALL,
    )
    made = sharpened(CsmForConditionalGeneration(config), 0.6)
    with torch.no_grad():  # makes end frames rare
        made.depth_decoder.codebooks_head.weight[..., 0] -= 0.5
    return made


def musicgen(seed: int = 0, layers: int = 2, books: int = 4, codes: int = 32) -> Any:
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
            target_bandwidths=[30.0 * books],
        ).to_dict(),
        decoder=MusicgenDecoderConfig(
            vocab_size=codes,
            hidden_size=32,
            num_hidden_layers=layers,
            ffn_dim=48,
            num_attention_heads=4,
            num_codebooks=books,
            pad_token_id=codes,
            bos_token_id=codes,
            max_position_embeddings=128,
        ).to_dict(),
    )
    made = sharpened(MusicgenForConditionalGeneration(config))
    made.generation_config.update(pad_token_id=codes, decoder_start_token_id=codes, bos_token_id=codes)
    return made


def bark(seed: int = 0, layers: int = 2, meanings: int = 12, codes: int = 8) -> Any:
    """A number of semantic tokens and an end token, and two coarse codebooks."""
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
    vars(made.generation_config).update(_from_model_config=False, codebook_size=codes)  # else the rest is not loaded
    made.generation_config.semantic_config = {
        "eos_token_id": meanings,
        "semantic_pad_token": meanings,
        "pad_token_id": meanings,
        "semantic_vocab_size": meanings,
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


def whisper(seed: int = 0, layers: int = 2, words: int = 50) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=words,
        d_model=32,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=layers,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        max_source_positions=20,
        max_target_positions=96,
        decoder_start_token_id=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    made = sharpened(WhisperForConditionalGeneration(config), 2.0)
    never = {"suppress_tokens": [7, 9], "begin_suppress_tokens": [2, 11]}
    if words < 12:  # four possible ids, including the end, which cannot come first
        never = {"suppress_tokens": [0, 1], "begin_suppress_tokens": [2]}
    made.generation_config.update(**never, forced_decoder_ids=None)
    return made


def speaking(words: list[str], marks: list[str], seed: int, layers: int) -> Any:
    """A Llama of these words, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    unknown = "<unk>" if "<unk>" in words else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_words(words, "<unk>"), unk_token=unknown)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(words), num_hidden_layers=layers, max_position_embeddings=256, **SMALL)
    model = sharpened(LlamaForCausalLM(config))
    model.tokenizer = tokenizer
    return model


def llasa(seed: int = 0, layers: int = 2, codes: int = 24, bare: bool = False) -> Any:
    """A Llama with codes as tokens, and its tokenizer. `bare`: the only other token is the end token."""
    marks = [f"<|{part}_{end}|>" for part in ("TEXT_UNDERSTANDING", "SPEECH_GENERATION") for end in ("START", "END")]
    names = ["<unk>", "good", "morning", "Convert", "the", "text", "to", "speech:", *marks]
    if bare:
        names, marks = ["<unk>", marks[-1]], marks[-1:]
    return speaking([*names, *(f"<|s_{code}|>" for code in range(codes))], marks, seed, layers)


def orpheus(seed: int = 0, layers: int = 2, codes: int = 3, bare: bool = False) -> Any:
    """A Llama with SNAC's codes as tokens, `codes` at each of seven places, and its tokenizer. `bare`: the only other
    tokens are two ends."""
    names = ["<|eot_id|>", "<custom_token_2>"]
    if not bare:
        names += ["<unk>", "good", "morning", "tara:", *(f"<custom_token_{number}>" for number in (1, 3, 4, 5))]
    return speaking([*names, *(f"<custom_token_{10 + code}>" for code in range(7 * codes))], names[:2], seed, layers)


# ---- pictures in, text out

PIECE = 3  # the placeholder id of an image patch


def language(words: int, layers: int) -> dict[str, Any]:
    ids = {"vocab_size": words, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return {**ids, "num_hidden_layers": layers, "max_position_embeddings": 256, **STATES}


def read(words: int) -> Any:
    """The tokenizer of both models."""
    from transformers import PreTrainedTokenizerFast

    made = by_words([f"w{number}" for number in range(words)], "w3")
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="w0", eos_token="w1", pad_token="w2")


def llava(seed: int = 0, layers: int = 2, words: int = 60) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and a question about a picture of four patches."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**language(words, layers)), image_token_id=PIECE)
    model = sharpened(LlavaForConditionalGeneration(config))
    model.generation_config.eos_token_id = 1
    first, *last = (7, 9, 12, 30) if words > 30 else (1, 2, 1, 2)
    ids = torch.tensor([[0, first, *[PIECE] * 4, *last]])
    return model, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}


def qwen2_vl(seed: int = 0, layers: int = 2, words: int = 60) -> tuple[Any, dict[str, torch.Tensor]]:
    """The same with three-dimensional positions."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(seed)
    begins = 4 if words > 30 else 2
    turns = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config={**language(words, layers), "rope_parameters": turns},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=PIECE,
        vision_start_token_id=begins,
        vision_end_token_id=5,
        video_token_id=6,
    )
    model = sharpened(Qwen2VLForConditionalGeneration(config))
    model.generation_config.eos_token_id = 1
    first, *last = (7, 5, 12, 30) if words > 30 else (1, 2, 1, 2)
    ids = torch.tensor([[0, first, begins, *[PIECE] * 4, *last]])
    kinds = (ids == PIECE).long()
    grid = torch.tensor([[1, 4, 4]])
    pixels = torch.randn(16, 3 * 2 * 4 * 4)
    return model, {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
