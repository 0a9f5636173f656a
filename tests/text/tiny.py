"""Builds a tiny language model: a byte-level tokenizer with 300 tokens and random weights, as a folder on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = (
    "the cat sat on the mat and the dog sat on the log while the rain fell on the plain; "
    "a quick brown fox jumps over lazy hens, and seven wizards play their violins under moonlight "
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    assert made.get_vocab_size() == CONFIG["vocab_size"]
    return made


def tensors(seed: int = 0, config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Return random weights under transformers' names, large enough for varied text."""
    generator = torch.Generator().manual_seed(seed)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    shared = width // config["num_attention_heads"] * config["num_key_value_heads"]

    def draw(rows: int, columns: int, scale: float = 1.5) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    embedding = draw(config["vocab_size"], width, 4.0)
    made = tokenizer()
    for one in range(config["vocab_size"]):  # favours letters over the end token
        if not made.decode([one]).isprintable() or not made.decode([one]).isascii() or one < len(SPECIAL):
            embedding[one] *= 0.01
    result = {"model.embed_tokens.weight": embedding}
    signs = torch.randint(0, 2, (width,), generator=generator) * 2 - 1
    result["model.norm.weight"] = signs.float()
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        result |= {
            f"{at}.input_layernorm.weight": torch.ones(width),
            f"{at}.post_attention_layernorm.weight": torch.ones(width),
            f"{at}.self_attn.q_proj.weight": draw(width, width),
            f"{at}.self_attn.k_proj.weight": draw(shared, width),
            f"{at}.self_attn.v_proj.weight": draw(shared, width),
            f"{at}.self_attn.o_proj.weight": draw(width, width),
            f"{at}.mlp.gate_proj.weight": draw(hidden, width),
            f"{at}.mlp.up_proj.weight": draw(hidden, width),
            f"{at}.mlp.down_proj.weight": draw(width, hidden),
        }
    return result


def write(folder: Path, *, seed: int = 0, template: str | None = TEMPLATE, **changed: Any) -> Path:
    """Write a model's folder; keywords change its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(seed), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "bos_token": "<|im_start|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
