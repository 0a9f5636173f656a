"""Our decoder agrees with transformers' classes on the same weights; incomplete or invalid checkpoints are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.checkpoints import CheckpointError, load, parse_config
from outrider.core.errors import OutriderError
from outrider.core.tree import Tree

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama stretched": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "every query its own keys": ("Llama", {"num_key_value_heads": 4}),
}


def theirs(name: str, options: dict[str, Any]) -> Any:
    """A transformers model with random weights, large enough that biases and norms matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | options))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.25
    return model


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers(name: str) -> None:
    model = theirs(*MODELS[name])
    ours = load(model.config.to_dict(), model.state_dict())
    ids = torch.randint(0, 61, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 39:]
    ours.begin(ids[:, :40].tolist(), Sampling())
    draft = Draft.guess(ids[:, 40:], Tree.chain(30), torch.ones(2, 30, dtype=torch.bool))
    assert expected.std() > 0.5
    torch.testing.assert_close(ours.score(draft).logits(), expected, atol=1e-4, rtol=0)


def test_weight_bytes_count_what_a_pass_reads() -> None:
    model = theirs("Qwen2", {})
    read = sum(value.numel() for name, value in model.named_parameters() if "norm" not in name and "embed" not in name)
    assert load(model.config.to_dict(), model.state_dict()).weight_bytes == 4 * read


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported .* \(llama, mistral, qwen2, qwen3, .*\)"),
        ({"hidden_act": "gelu"}, r"activation is 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"type 'dynamic' is not supported"),
        ({"sliding_window": 16}, r"sliding window"),
        ({"num_key_value_heads": 3}, r"kv_heads is 3; it must divide heads"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OutriderError, match=complaint) as caught:
        parse_config(SHAPE | {"model_type": "llama"} | change)
    assert "\n" not in str(caught.value)


def test_an_empty_value_is_the_default() -> None:
    empty = {"rms_norm_eps": None, "max_position_embeddings": None, "head_dim": None, "sliding_window": None}
    config = parse_config({"model_type": "llama", **SHAPE, **empty})
    assert (config.norm_eps, config.context) == (1e-6, 2048)


def test_incomplete_checkpoints_are_refused() -> None:
    model = theirs("Llama", {})
    described, whole = model.config.to_dict(), model.state_dict()
    with pytest.raises(CheckpointError, match=r"no tensor .model\.layers\.1\.mlp\.up_proj\.weight"):
        load(described, {name: value for name, value in whole.items() if "1.mlp.up" not in name})
    with pytest.raises(CheckpointError, match=r"has the shape \(3,\); the config implies \(32,\)"):
        load(described, whole | {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"does not account for, such as 'model\.extra'"):
        load(described, whole | {"model.extra": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="the config lacks vocab_size"):
        load({"model_type": "llama"} | {k: v for k, v in SHAPE.items() if k != "vocab_size"}, whole)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 1 << 40}, "vocab_size is 1,099,511,627,776"),
        ({"num_attention_heads": None}, "the config lacks num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a whole number above 0"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"hidden_size": 2}, "hidden_size is 2; expected at least its number of heads, 4"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number above 0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": [8]}, "rope_scaling is .8.; expected a dictionary"),
        ({"rope_parameters": {"rope_theta": "far"}}, "rope_theta is 'far'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary scaling of type 'llama3' needs factor"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; expected a list of names"),
    ],
)
def test_invalid_configs_are_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message) as caught:
        parse_config({"model_type": "llama", **SHAPE, **changed})
    assert "\n" not in str(caught.value)
