"""Each architecture of our decoder computes what transformers' class computes on the same weights: plain, with draft
trees, and token for token under drafting, past attention windows and growth of the KV cache."""

from __future__ import annotations

import random
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.assets.store import Checkpoint, read_json
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.checkpoints import load, parse_config
from outrider.core.engine.offload import offload_layers
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, OutriderError
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.cache_audit import emitted, paths, random_draft, random_verdict
from outrider.core.testing.conformance import trial_drafter
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.tree import Tree

transformers = pytest.importorskip("transformers")

VOCABULARY, WINDOW = 61, 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 200,
    "partial_rotary_factor": 0.75,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window": ("Mistral", {}),
    "qwen2 with late windows": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3 with yarn": ("Qwen3", {"rope_parameters": YARN}),
    "llama with whole yarn": (
        "Llama",
        {"sliding_window": None, "rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3}},
    ),
    "gemma": ("Gemma", {"sliding_window": None}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 12, "sliding_window_pattern": 3}),
    "phi3 with a window": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi4 with longrope": ("Phi3", {"rope_parameters": LONG, "sliding_window": None}),
    "glm4": ("Glm4", {"sliding_window": None, "attention_bias": True}),
    "mixtral with a window": ("Mixtral", {"num_local_experts": 5}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3 moe with normed weights": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "use_sliding_window": True},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 0.7, "rope_parameters": YARN},
    ),
}


@cache
def theirs(name: str, seed: int = 0) -> Any:
    """A transformers model with random weights, large enough that biases and norms matter."""
    torch.manual_seed(seed)
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | options))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.25
    return model


def ours(name: str, noise: float = 0.0, **options: Any) -> Decoder:
    model = theirs(name)
    tensors = {key: value + noise * torch.randn(value.shape) for key, value in model.state_dict().items()}
    return load(model.config.to_dict(), tensors, **options)


@torch.no_grad()
def expected(name: str, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = theirs(name)(torch.tensor([text])).logits[0]
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    ids = torch.randint(0, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    decoder = ours(name)
    decoder.begin(ids[:, :40].tolist(), Sampling())
    logits = decoder.score(Draft.guess(ids[:, 40:], Tree.chain(30), torch.ones(2, 30, dtype=torch.bool))).logits()
    for row in range(2):
        wanted = expected(name, ids[row].tolist())[39:]
        assert wanted.std() > 0.3
        torch.testing.assert_close(logits[row], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_pass_equals_separate_branches(name: str) -> None:
    """Random trees and verdicts, split passes and rewinds, in rows of unequal lengths on both sides of the window."""
    rng = random.Random(name)
    decoder = ours(name)
    texts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (2, WINDOW - 1, 3 * WINDOW)]
    decoder.begin(texts, Sampling())
    for _ in range(5):
        draft, parents = random_draft(rng, len(texts), VOCABULARY, 9)
        half = draft.size // 2
        part = Draft.guess(draft.tokens[:, :half], Tree(draft.tree.parents[:, :half]), draft.live[:, :half])
        pieces = [decoder.score(part), decoder.score(draft, half)] if rng.random() < 0.4 else [decoder.score(draft)]
        logits = torch.cat([piece.logits() for piece in pieces], 1)
        for row, text in enumerate(texts):
            for path in rng.sample([[], *paths(parents[row])], min(3, draft.size + 1)):
                wanted = expected(name, [*text, *(int(draft.tokens[row, node]) for node in path)])[-1]
                torch.testing.assert_close(logits[row, path[-1] + 1 if path else 0], wanted, atol=1e-4, rtol=0)
        verdict, count = random_verdict(rng, draft, parents, VOCABULARY)
        decoder.keep(draft, verdict, count)
        texts = [[*text, *emitted(draft, verdict, row, int(count[row]))] for row, text in enumerate(texts)]
    decoder.end()


@pytest.mark.parametrize("name", MODELS)
def test_drafting_changes_no_token(name: str) -> None:
    """Greedy, over unequal prompts, past the window and the first growth of the cache (64 tokens)."""
    prompts = [[1, 2, 3, 4, 5], [6, 7] * 9]
    greedy = Sampling(temperature=0)

    def texts(drafter: Any) -> list[list[int]]:
        steps = list(decode(ours(name), drafter, make_rule(), prompts, sampling=greedy, max_new_tokens=75))
        return [[token for step in steps if step.row == row for token in step.emitted] for row in range(2)]

    plain = texts(None)
    for row, prompt in enumerate(prompts):
        logits = expected(name, [*prompt, *plain[row]])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == plain[row]
    for drafter in (PromptLookup(), TokenRecycling(), DraftModel(ours(name, noise=0.02))):
        assert texts(drafter) == plain


def greedy(target: Decoder, drafter: Any, count: int = 24) -> list[int]:
    """The tokens after a prompt, past the window."""
    prompt, sampling = [[6, 7] * 4], Sampling(temperature=0)
    steps = decode(target, drafter, make_rule(), prompt, sampling=sampling, max_new_tokens=count)
    return [token for step in steps for token in step.emitted]


def drafters(name: str, *methods: str) -> list[Any]:
    return [trial_drafter(DRAFTERS[method], {}, lambda: ours(name, noise=0.02)) for method in methods]


@pytest.mark.parametrize("name", MODELS)
def test_self_drafting_changes_no_token(name: str) -> None:
    """Skipped layers, quantized weights and a window of the cache; qspec drafts in 4 bits."""
    plain = greedy(ours(name), None)
    for drafter in drafters(name, "layer-skip", "qspec", "sparse-cache"):
        assert greedy(ours(name), drafter) == plain


@pytest.mark.parametrize("name", MODELS)
def test_quantized_and_offloaded_weights(name: str) -> None:
    network = ours(name).network
    ids, errors = torch.arange(2, 42), {}
    with torch.no_grad():
        wanted = theirs(name)(ids[None]).logits[0]
    for bits in (8, 4):
        target = Decoder(quantize(network, bits))
        assert greedy(target, PromptLookup()) == greedy(target, None)
        target.begin([[2]], Sampling())
        draft = Draft.guess(ids[None, 1:], Tree.chain(39), torch.ones(1, 39, dtype=torch.bool))
        errors[bits] = float((target.score(draft).logits()[0] - wanted).square().mean(1).median() / wanted.var())
    assert errors[8] < 0.03 and errors[8] < errors[4] < 0.7
    if len({layer.experts is None for layer in network.layers}) > 1:
        with pytest.raises(Incompatible, match="layers of different sizes"):
            offload_layers(network, 0.5)
        return
    offloaded, layers = offload_layers(network, 0.5)
    assert layers.offloaded == 4 and greedy(Decoder(offloaded), PromptLookup()) == greedy(ours(name), None)
    layers.close()


@pytest.mark.parametrize("name", MODELS)
def test_captured_passes_give_the_same_tokens(name: str) -> None:
    """On the shadow device, with graphs, plainly and with a tree; experts in 4 bits as well."""
    plain = greedy(ours(name), None, 14)
    with shadow_device() as gpu, warnings.catch_warnings():
        warnings.simplefilter("error")  # a pass that cannot be captured
        network = with_graphs(ours(name, device="cuda").network)
        for drafter in (None, TokenRecycling()):
            assert greedy(Decoder(network), drafter, 14) == plain
        assert gpu.counts.replays > 10
        if network.config.variant.mixture is not None:
            network = with_graphs(quantize(network, 4))
            assert greedy(Decoder(network), TokenRecycling(), 14) == greedy(Decoder(network), None, 14)


def test_mxfp4_is_read_as_transformers_does(tmp_path: Path) -> None:
    """gpt-oss as published: experts in MXFP4; and as transformers saves it, dequantised."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    MODELS["gpt-oss in MXFP4"] = ("GptOss", {"num_local_experts": 4, "hidden_size": 64, "intermediate_size": 32})
    model = theirs("gpt-oss in MXFP4")
    generator = torch.Generator().manual_seed(2)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 127, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.state_dict()[name].copy_(values)
    ids = [*range(20)]
    model.save_pretrained(tmp_path)
    for given in (tensors, Checkpoint(tmp_path)):
        decoder = load(model.config.to_dict(), given)
        decoder.begin([ids], Sampling())
        logits = decoder.score(Draft.empty(1)).logits()[0, 0]
        torch.testing.assert_close(logits, expected("gpt-oss in MXFP4", ids)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mixtral with a window", "qwen3 moe", "gpt-oss", "phi3 with a window", "gemma3"])
def test_saved_folders_are_read(name: str, tmp_path: Path) -> None:
    """With the names of tensors that published files have: experts one by one."""
    theirs(name).save_pretrained(tmp_path)
    tensors = Checkpoint(tmp_path)
    if "mixtral" in name:
        assert any("block_sparse_moe.experts.0.w1" in key for key in tensors)
    decoder = load(read_json(tmp_path / "config.json"), tensors)
    decoder.begin([[*range(20)]], Sampling())
    logits = decoder.score(Draft.empty(1)).logits()[0, 0]
    torch.testing.assert_close(logits, expected(name, [*range(20)])[-1], atol=1e-4, rtol=0)


def test_configs_of_early_versions_are_read_alike() -> None:
    """Windows and rotary bases as the hub's files of Gemma 2 and 3 write them."""
    now = parse_config(theirs("gemma3").config.to_dict())
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3, "tie_word_embeddings": None}
    shape = SHAPE | {"model_type": "gemma3_text", "query_pre_attn_scalar": 12}
    assert parse_config(shape | old) == now
    assert now.variant.windows == (WINDOW, WINDOW, None, WINDOW)
    assert parse_config(SHAPE | {"model_type": "gemma2"}).variant.windows == (WINDOW, None, WINDOW, None)
    assert parse_config(SHAPE | {"model_type": "mistral", "sliding_window": 256}).variant.windows == ()


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "activation is 'relu'.*load it through transformers"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 4}, "sliding window .* 'llama'"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "layers of type 'linear_attention'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "lists 1 layers and num_hidden_layers is 4"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "needs short_factor"),
        ({"model_type": "phi3", "rope_parameters": LONG | {"short_factor": [1.0]}}, "has 1 numbers; expected 3"),
        ({"model_type": "glm4", "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 8}, "4 experts, 8 of them per token"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic' is not supp"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(described: dict[str, Any], message: str) -> None:
    with pytest.raises(OutriderError, match=message) as caught:
        parse_config(SHAPE | described)
    assert "\n" not in str(caught.value)
