"""Heads for targets of transformers classes, by name: the MTP layer within a target's own checkpoint, against a plain
computation of its formulas and against plain decoding; an EAGLE-3 head for a class that our decoder does not run.

Over 400 lines: a plain reference computation for each class.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from outrider import text
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.trained.head_runner import HeadRunner
from outrider.core.drafters.trained.import_checkpoints import read_foreign
from outrider.core.errors import Incompatible
from outrider.core.tree import Tree

transformers = pytest.importorskip("transformers")

PROMPT = "the cat sat on the mat"
TEXT = [7, 1, 130, 12, 5, 9, 222]
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "DeepseekV3": LATENT,
    "Glm4Moe": {"num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "Glm4MoeLite": LATENT,
    "Qwen3Next": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
DEEPSEEK = ("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace")
DEEPSEEK += ("num_nextn_predict_layers", "routed_scaling_factor")  # what Qwen3-Next's config has not
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm", "eh_proj": "fc"}


def written(folder: Path, kind: str, tiny: SimpleNamespace, copies: bool = False) -> Path:
    """A random checkpoint with an MTP layer. `copies`: one whose next token depends on the last token alone, and whose
    MTP layer passes the embedding of that token on, so it predicts as the target does."""
    tiny.write(folder)
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    torch.manual_seed(3)
    qwen = kind == "Qwen3Next"
    shape = {name: value for name, value in SHAPE.items() if not (qwen and name in DEEPSEEK)}
    config = getattr(transformers, f"{kind}Config")(**shape, **KINDS[kind])
    models = [getattr(transformers, f"{kind}ForCausalLM")(config).float() for _ in range(2)]
    tensors: list[dict[str, Tensor]] = []
    for model in models:
        with torch.no_grad():
            for name, weight in [*model.named_parameters(), *model.named_buffers()]:
                if weight.dim() > 1:
                    weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
                elif "inv_freq" not in name:
                    weight.add_(0.1 * torch.randn_like(weight))
        model.save_pretrained(folder)
        tensors.append(load_file(folder / "model.safetensors"))
    own, at = tensors[0], "model.layers.2"
    for name, tensor in tensors[1].items():
        if name.startswith("model.layers.1."):
            own[name.replace("layers.1.", "layers.2.")] = tensor
    own |= {f"{at}.{name}.weight": 1 + 0.1 * torch.randn(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    own[f"{at}.eh_proj.weight"] = torch.randn(32, 64) / 6
    own[f"{at}.embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
    own[f"{at}.shared_head.head.weight"] = own["lm_head.weight"].clone()
    if qwen:  # whose norms multiply by 1 + weight
        own |= {
            f"{at}.{name}.weight": own[f"{at}.{name}.weight"] - 1 for name in ("enorm", "hnorm", "shared_head.norm")
        }
    if copies:
        for name in own:
            if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "out_proj.weight")):
                own[name] = torch.zeros_like(own[name])
        own[f"{at}.enorm.weight"] = torch.full((32,), 0.0 if qwen else 1.0)
        own[f"{at}.shared_head.norm.weight"] = own["model.norm.weight"].clone()
        own[f"{at}.eh_proj.weight"] = torch.eye(32, 64)  # the embedding comes first
    if qwen:
        own = {
            published(name): one
            for name, one in own.items()
            if name not in (f"{at}.embed_tokens.weight", f"{at}.shared_head.head.weight")
        }
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | ({} if qwen else {"num_nextn_predict_layers": 1})))
    return folder


def published(name: str) -> str:
    """Qwen3-Next's name of a tensor."""
    part = name.removeprefix("model.layers.2.").removesuffix(".weight")
    if not name.startswith("model.layers.2."):
        return name
    return f"mtp.{QWEN[part]}.weight" if part in QWEN else name.replace("model.layers.2.", "mtp.layers.0.")


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float, pairs: bool) -> Tensor:
    """Positions from 0 along the first dimension; neighbours are rotated together (`pairs`), or halves."""
    count, size = x.shape[0], x.shape[-1]
    angles = torch.arange(count)[:, None] / theta ** (torch.arange(0, size, 2) / size)
    angles = angles.view(count, *[1] * (x.dim() - 2), size // 2)
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    parts = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [T, heads, ...]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    mask = torch.full(scores.shape[1:], -torch.inf).triu(1)
    return torch.einsum("hqk,khd->qhd", (scores + mask).softmax(-1), v).flatten(1)


def latent_attention(w: dict[str, Tensor], x: Tensor, config: dict[str, Any]) -> Tensor:
    """Multi-head latent attention (arXiv 2405.04434)."""
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    theta = config["rope_parameters"]["rope_theta"]
    q = rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q = q.view(len(x), 4, nope + rope)
    latent, key = (x @ w["kv_a_proj_with_mqa.weight"].T).split([rank, rope], 1)
    both = (rms(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).view(len(x), 4, -1)
    key = rotated(key[:, None], theta, True).expand(-1, 4, -1)
    q = torch.cat([q[..., :nope], rotated(q[..., nope:], theta, True)], -1)
    return attended(q, torch.cat([both[..., :nope], key], -1), both[..., nope:]) @ w["o_proj.weight"].T


def grouped_attention(w: dict[str, Tensor], x: Tensor, config: dict[str, Any]) -> Tensor:
    """Grouped-query attention; norms of queries and keys; half of each head is rotated."""
    theta = config["rope_parameters"]["rope_theta"]
    q, k, v = ((x @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"]).view(len(x), -1, 8) for n in "qkv")
    q, k = rms(q, w["q_norm.weight"]), rms(k, w["k_norm.weight"])
    q, k = (torch.cat([rotated(one[..., :4], theta, False), one[..., 4:]], -1) for one in (q, k))
    return attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)) @ w["o_proj.weight"].T


def gated_attention(w: dict[str, Tensor], x: Tensor, config: dict[str, Any]) -> Tensor:
    """Qwen3-Next's: half of the query projection gates the output; a quarter of each head is rotated."""
    theta = config["rope_parameters"]["rope_theta"]
    q, gate = (x @ w["q_proj.weight"].T).view(len(x), 4, 16).chunk(2, -1)
    k, v = ((x @ w[f"{n}_proj.weight"].T).view(len(x), 2, 8) for n in "kv")
    q, k = rms(q, 1 + w["q_norm.weight"]), rms(k, 1 + w["k_norm.weight"])
    q, k = (torch.cat([rotated(one[..., :2], theta, False), one[..., 2:]], -1) for one in (q, k))
    out = attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    return (out * gate.flatten(1).sigmoid()) @ w["o_proj.weight"].T


def gated_mixture(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Qwen3-Next's experts: the three likeliest, and a shared one with a gate."""

    def mlp(at: str, y: Tensor) -> Tensor:
        inner = F.silu(y @ w[f"{at}.gate_proj.weight"].T) * (y @ w[f"{at}.up_proj.weight"].T)
        return inner @ w[f"{at}.down_proj.weight"].T

    out = mlp("shared_expert", x) * (x @ w["shared_expert_gate.weight"].T).sigmoid()
    for token, scores in enumerate((x @ w["gate.weight"].T).softmax(-1)):
        chosen = scores.topk(3).indices
        for expert in chosen.tolist():
            out[token] += scores[expert] / scores[chosen].sum() * mlp(f"experts.{expert}", x[token])
    return out


def mixture(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """DeepSeek-V3's experts: the best two of four groups by their two best affinities; the bias only chooses."""

    def mlp(at: str, y: Tensor) -> Tensor:
        inner = F.silu(y @ w[f"{at}.gate_proj.weight"].T) * (y @ w[f"{at}.up_proj.weight"].T)
        return inner @ w[f"{at}.down_proj.weight"].T

    out = mlp("shared_experts", x)
    affinity = (x @ w["gate.weight"].T).sigmoid()
    for token, scores in enumerate(affinity):
        biased = (scores + w["gate.e_score_correction_bias"]).view(4, 2)
        groups = biased.sum(1).topk(2).indices
        allowed = torch.full((4, 2), -torch.inf)
        allowed[groups] = biased[groups]
        chosen = allowed.flatten().topk(3).indices
        for expert in chosen.tolist():
            out[token] += 1.5 * scores[expert] / scores[chosen].sum() * mlp(f"experts.{expert}", x[token])
    return out


def expected(folder: Path, hidden: Tensor, tokens: Tensor, chain: int) -> Tensor:
    """[1 + chain, V] the formulas, one token at a time: states before the root, then the layer's own normed ones."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    at = "model.layers.2."
    w = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
    attention, experts = latent_attention if "kv_lora_rank" in config else grouped_attention, mixture
    if config["model_type"] == "qwen3_next":
        attention, experts = gated_attention, gated_mixture
        at = "mtp.layers.0."
        w = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        w |= {f"{ours}.weight": tensors[f"mtp.{theirs}.weight"] for ours, theirs in QWEN.items()}
        w = {name: 1 + one if name.endswith("norm.weight") and "attn" not in name else one for name, one in w.items()}
        w |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        w |= {"shared_head.head.weight": tensors["lm_head.weight"]}
    parts = [{n.removeprefix(f"{p}."): t for n, t in w.items() if n.startswith(p)} for p in ("self_attn", "mlp")]
    logits, x = [], hidden[: len(tokens) - chain]
    for _ in range(chain + 1):
        embedded = rms(w["embed_tokens.weight"][tokens[: len(x)]], w["enorm.weight"], config["rms_norm_eps"])
        both = torch.cat([embedded, rms(x, w["hnorm.weight"], config["rms_norm_eps"])], 1)
        y = both @ w["eh_proj.weight"].T
        y = y + attention(parts[0], rms(y, w["input_layernorm.weight"], config["rms_norm_eps"]), config)
        y = y + experts(parts[1], rms(y, w["post_attention_layernorm.weight"], config["rms_norm_eps"]))
        out = rms(y[-1:], w["shared_head.norm.weight"], config["rms_norm_eps"])
        logits.append(out @ w["shared_head.head.weight"].T)
        x = torch.cat([x, out])
    return torch.cat(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_computes_its_formulas(kind: str, tmp_path: Path, tiny: SimpleNamespace) -> None:
    folder, chain = written(tmp_path / kind, kind, tiny), 3
    target: Any = text.load(folder, dtype="float32").target()
    hidden = target.begin([[*TEXT, 0]], Sampling(), frozenset({"last"})).hidden["last"][0]
    wanted = expected(folder, hidden, torch.tensor(TEXT[1:]), chain)
    prompt, rest = TEXT[:-chain], TEXT[-chain:]
    runner = HeadRunner(read_foreign(folder, target).drafts(target))
    runner.set_hidden(target.begin([prompt], Sampling(), frozenset({"last"})).hidden)
    runner.begin([prompt], Sampling())
    found = [runner.score(Draft.empty(1)).logits()[0]]
    for node in range(chain):
        ids = torch.tensor([rest[: node + 1]])
        found.append(runner.score(Draft.guess(ids, Tree.chain(node + 1), ids >= 0), node).logits()[0])
    torch.testing.assert_close(torch.cat(found), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_names_its_own_head(kind: str, tmp_path: Path, tiny: SimpleNamespace) -> None:
    """Greedy tokens and seeded draws under gumbel-match are those of plain decoding, in batches of unequal rows too; a
    tree is drafted as well as a chain."""
    folder = written(tmp_path / kind, kind, tiny)
    lm = text.load(folder, dtype="float32")
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "rule": "gumbel-match", "seed": 5}):
        for prompts in (PROMPT, [PROMPT, "a quick brown fox jumps"]):
            plain = lm.generate(prompts, drafter=None, max_new_tokens=16, **settings)
            for drafter in ("auto", "mtp"):
                out = lm.generate(prompts, drafter=drafter, head=folder, max_new_tokens=16, **settings)
                for one, other in zip(*(x if isinstance(x, list) else [x] for x in (plain, out)), strict=True):
                    assert one.tokens == other.tokens
                    assert other.trace.method.startswith("mtp") and any(step.drafted for step in other.trace.steps)
    tree = lm.generate(PROMPT, head=folder, max_new_tokens=16, drafter_options={"draft_kind": "dynamic"}, temperature=0)
    assert tree.tokens == lm.generate(PROMPT, drafter=None, max_new_tokens=16, temperature=0).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_predicts_as_its_target_is_accepted(kind: str, tmp_path: Path, tiny: SimpleNamespace) -> None:
    folder = written(tmp_path / kind, kind, tiny, copies=True)
    lm = text.load(folder, dtype="float32", head=folder)
    out = lm.generate(PROMPT, max_new_tokens=18, temperature=0, drafter_options={"length": 5}, drafter="mtp")
    assert out.tokens == lm.generate(PROMPT, drafter=None, max_new_tokens=18, temperature=0).tokens
    assert out.trace.summary().tokens_per_pass == len(out.tokens) / -(-len(out.tokens) // 6)


def test_weights_in_8_bits(tmp_path: Path, tiny: SimpleNamespace) -> None:
    """DeepSeek-V3 is published in FP8 with a scale per block, its MTP layer too."""
    folder = written(tmp_path / "fp8", "DeepseekV3", tiny, copies=True)
    stored = load_file(folder / "model.safetensors")
    for name, weight in list(stored.items()):
        if ".layers." in name and name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name:
            blocks = weight.unflatten(0, (-1, 4)).unflatten(2, (-1, 4))  # [R, 4, C, 4]
            scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
            numbers = (blocks / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
            stored |= {name: numbers, f"{name}_scale_inv": scale}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(described))
    lm = text.load(folder, dtype="float32", head=folder)
    out = lm.generate(PROMPT, max_new_tokens=18, temperature=0, drafter="mtp")
    assert out.tokens == lm.generate(PROMPT, drafter=None, max_new_tokens=18, temperature=0).tokens
    assert out.trace.summary().tokens_per_pass == len(out.tokens) / -(-len(out.tokens) // 6)
    head: Any = read_foreign(folder, lm.target())
    scale = stored["model.layers.2.self_attn.q_a_proj.weight_scale_inv"].repeat_interleave(4, 0).repeat_interleave(4, 1)
    wanted = stored["model.layers.2.self_attn.q_a_proj.weight"].float() * scale
    torch.testing.assert_close(head.chain[0].block.parts[0].self_attn.q_a_proj.weight, wanted)


def test_rows_and_embedding_of_its_own(tmp_path: Path, tiny: SimpleNamespace) -> None:
    """Those in the file are used where they differ from the target's, and are not needed."""
    folder = written(tmp_path / "own", "Glm4Moe", tiny)
    target: Any = text.load(folder, dtype="float32").target()
    tensors = load_file(folder / "model.safetensors")
    shared: Any = read_foreign(folder, target)
    assert shared.words.own is None and "words.embedding" not in shared.state_dict()
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.2.{name}.weight"] *= 1.25
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own: Any = read_foreign(folder, target)
    rows = tensors["model.layers.2.shared_head.head.weight"]
    assert torch.equal(own.words.own.weight, rows)
    assert torch.equal(own.words.embedding, tensors["model.layers.2.embed_tokens.weight"])
    for name in ("embed_tokens", "shared_head.head"):
        del tensors[f"model.layers.2.{name}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    bare: Any = read_foreign(folder, target)
    assert bare.words.own is None and torch.equal(bare.words.embedding, target.network.embedding)


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, tiny: SimpleNamespace) -> None:
    folder = written(tmp_path / "x", "DeepseekV3", tiny)
    lm, at = text.load(folder, dtype="float32"), "model.layers.2"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())

    def refused(changed: dict[str, Tensor], message: str, **fields: Any) -> None:
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(Incompatible, match=message) as error:
            lm.generate(PROMPT, head=folder, max_new_tokens=2)
        assert "\n" not in str(error.value)

    def without(part: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if part not in name}

    refused(without("eh_proj"), "no tensor 'eh_proj.weight'")
    refused(without(f"{at}.self_attn.kv_b_proj"), "no tensor 'self_attn.kv_b_proj.weight'")
    refused(without(f"{at}.mlp.experts"), "no tensor 'mlp.experts")
    refused(tensors | {f"{at}.enorm.weight": torch.ones(16)}, "another shape")
    refused(tensors | {f"{at}.self_attn.o_proj.weight": torch.ones(3, 3)}, "does not fit")
    refused(tensors | {f"{at}.self_attn.extra.weight": torch.ones(3)}, "'self_attn.extra.weight'")
    refused(tensors, "2 MTP layers of 'deepseek_v3'", num_nextn_predict_layers=2)
    refused(tensors, "1 MTP layers of 'mimo'", model_type="mimo")
    refused(tensors, "of a 'glm4_moe', and this target is another model", model_type="glm4_moe")


def eagle3_head(folder: Path, layers: int) -> Path:
    """A random EAGLE-3 head of 300 tokens in the speculators format, for targets of hidden size 32."""
    torch.manual_seed(4)
    at, size = "layers.0", {"q": (32, 64), "k": (16, 64), "v": (16, 64), "o": (32, 32)}
    tensors = {f"{at}.self_attn.{one}_proj.weight": torch.randn(*shape) / 6 for one, shape in size.items()}
    tensors |= {f"{at}.mlp.{one}_proj.weight": torch.randn(32, 32) / 6 for one in ("up", "gate", "down")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"{at}.{name}.weight": torch.ones(32) for name in norms} | {"norm.weight": torch.ones(32)}
    tensors |= {"fc.weight": torch.randn(32, 96) / 10, "lm_head.weight": torch.randn(300, 32)}
    layer = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}
    layer |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    taps = {"eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1]}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **taps}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def on_transformers(folder: Path, tiny: SimpleNamespace, kind: str, **more: Any) -> Path:
    tiny.write(folder)
    (folder / "model.safetensors").unlink()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    sizes = {name: SHAPE[name] for name in names}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2, num_hidden_layers=4, **more)
    torch.manual_seed(1)
    getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).save_pretrained(folder)
    return folder


def test_eagle3_on_a_class_that_our_decoder_does_not_run(tmp_path: Path, tiny: SimpleNamespace) -> None:
    folder = on_transformers(tmp_path / "olmo2", tiny, "Olmo2", pad_token_id=None)
    head = eagle3_head(tmp_path / "head", 4)
    lm = text.load(folder, dtype="float32", head=head)
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "rule": "gumbel-match", "seed": 5}):
        plain = lm.generate(PROMPT, drafter=None, max_new_tokens=16, **settings)
        for drafter, options in (("auto", {"costs": "1:10 2:10 32:10"}), ("eagle3", {})):
            out = lm.generate(PROMPT, drafter=drafter, drafter_options=options, max_new_tokens=16, **settings)
            assert out.tokens == plain.tokens and out.trace.method.startswith(drafter)
            assert any(step.drafted for step in out.trace.steps)
    with pytest.raises(Incompatible, match="on our own decoder, and this one runs on TransformersTarget"):
        lm.generate(PROMPT, drafter="eagle3", head=head / "model.safetensors")


def test_a_class_with_several_states_per_token_is_refused(tmp_path: Path, tiny: SimpleNamespace) -> None:
    """Gemma3n (AltUp) returns four."""
    sizes = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0}
    kinds = {"layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4}
    folder = on_transformers(tmp_path / "n", tiny, "Gemma3nText", head_dim=8, laurel_rank=4, **sizes, **kinds)
    lm = text.load(folder, dtype="float32")
    with pytest.raises(Incompatible, match="several hidden states per token") as error:
        lm.generate(PROMPT, head=eagle3_head(tmp_path / "head", 4), max_new_tokens=2)
    assert "\n" not in str(error.value)
