"""Imported heads: small checkpoints in the published layouts against the published formulas; exported heads are read
back unchanged.

Over 400 lines: a plain reference computation for each format.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from outrider.core.assets.store import AssetError
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.trained.blocks.block_diffusion import DFlashBlock
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.export_checkpoints import write_published, write_speculators
from outrider.core.drafters.trained.head_runner import HeadRunner
from outrider.core.drafters.trained.import_checkpoints import read_foreign
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.rules.exact import Exact
from outrider.core.training.draft_head import Batch
from outrider.core.tree import Tree

SHAPE = Config(
    vocabulary=40, hidden_size=16, layers=9, heads=4, kv_heads=2, head_dim=4, intermediate_size=24, tied=False
)
KEPT = (3, 4, 5, 9, 11, 17, 23, 30, 38)
TEXT = [7, 1, 30, 12, 5, 9, 22]
LAYER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "model_type": "llama",
}


def target(rotary_dim: int | None = None) -> Decoder:
    return Decoder.random(replace(SHAPE, rotary_dim=rotary_dim), seed=2, gain=1.5)


def olmo2() -> TransformersTarget:
    """A target that our decoder does not run."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9, "num_attention_heads": 4}
    config = Olmo2Config(vocab_size=40, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None, **sizes)
    torch.manual_seed(2)
    model = Olmo2ForCausalLM(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(drawn(*weight.shape) * 1.5)
    return TransformersTarget(model)


@pytest.fixture(params=["ours", "of transformers"])
def model(request: pytest.FixtureRequest) -> Any:
    return target() if request.param == "ours" else olmo2()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * torch.randn(*shape)


def layer(at: str, into: int) -> dict[str, Tensor]:
    return {
        f"{at}.self_attn.q_proj.weight": drawn(16, into),
        f"{at}.self_attn.k_proj.weight": drawn(8, into),
        f"{at}.self_attn.v_proj.weight": drawn(8, into),
        f"{at}.self_attn.o_proj.weight": drawn(16, 16),
        f"{at}.mlp.gate_proj.weight": drawn(20, 16),
        f"{at}.mlp.up_proj.weight": drawn(20, 16),
        f"{at}.mlp.down_proj.weight": drawn(16, 20),
        f"{at}.post_attention_layernorm.weight": drawn(16),
    }


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def ran(
    tensors: dict[str, Tensor], at: str, residual: Tensor, read: Tensor, rotated: int = 8, window: int = 99
) -> Tensor:
    """One Llama layer over [T, ...], two query heads of 8 and one head of keys, causal, positions from 0."""
    count, half = len(read), rotated // 2
    angles = torch.arange(count)[:, None] / 5000.0 ** (torch.arange(0, rotated, 2) / rotated)
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)

    def turned(x: Tensor) -> Tensor:
        part, rest = x[:, :rotated], x[:, rotated:]
        return torch.cat([part * cos + torch.cat([-part[:, half:], part[:, :half]], 1) * sin, rest], 1)

    q, k, v = (read @ tensors[f"{at}.self_attn.{one}_proj.weight"].T for one in "qkv")
    mask = torch.full((count, count), -torch.inf).triu(1) + torch.full((count, count), -torch.inf).tril(-window)
    heads = [torch.softmax(turned(part) @ turned(k).T / 8**0.5 + mask, -1) @ v for part in (q[:, :8], q[:, 8:])]
    x = residual + torch.cat(heads, 1) @ tensors[f"{at}.self_attn.o_proj.weight"].T
    y = rms(x, tensors[f"{at}.post_attention_layernorm.weight"])
    up = y @ tensors[f"{at}.mlp.up_proj.weight"].T
    inner = F.silu(y @ tensors[f"{at}.mlp.gate_proj.weight"].T) * up
    return x + inner @ tensors[f"{at}.mlp.down_proj.weight"].T


def kept_in(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    save_file({name: one.contiguous() for name, one in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def states(model: Any, taps: tuple[str, ...]) -> Tensor:
    """Behind each of the tokens, side by side [T, F]."""
    hidden = model.begin([[*TEXT, 0]], Sampling(), frozenset(taps)).hidden
    return torch.cat([hidden[tap][0] for tap in taps], -1)


def said(draft_head: Any, model: Any, chain: int) -> Tensor:
    """[1 + chain, R] our logits behind the text but its last tokens, which are drafted."""
    prompt, rest = TEXT[: len(TEXT) - chain], TEXT[len(TEXT) - chain :]
    runner = HeadRunner(draft_head.drafts(model))
    runner.set_hidden(model.begin([prompt], Sampling(), draft_head.needs).hidden)
    runner.begin([prompt], Sampling())
    found = [runner.score(Draft.empty(1)).logits()[0]]
    for node in range(chain):
        ids = torch.tensor([rest[: node + 1]])
        found.append(runner.score(Draft.guess(ids, Tree.chain(node + 1), ids >= 0), node).logits()[0])
    return torch.cat(found)


def eagle3(at: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids = torch.tensor(KEPT)
    return {
        "fc.weight": drawn(16, 48),
        "norm.weight": drawn(16),
        "lm_head.weight": drawn(9, 16) * 3,
        "d2t": ids - torch.arange(9),
        "t2d": torch.zeros(40, dtype=torch.bool).index_fill_(0, ids, True),
        f"{at}.hidden_norm.weight": drawn(16),
        f"{at}.input_layernorm.weight": drawn(16),
        **layer(at, 32),
    }


def expected3(
    tensors: dict[str, Tensor],
    at: str,
    model: Any,
    chain: int,
    normed: bool = False,
    rotated: int = 8,
    window: int = 99,
) -> Tensor:
    """EAGLE-3 as published: features of the tokens before the root, then its own states, one token at a time."""
    embedding, tokens = model.network.embedding, torch.tensor(TEXT[1:])
    taps = states(model, ("layer.1", "layer.3", "layer.5"))
    known = len(TEXT) - 1 - chain
    x = taps[:known] @ tensors["fc.weight"].T
    logits = []
    for step in range(chain + 1):
        entered = rms(x, tensors[f"{at}.hidden_norm.weight"])
        read = torch.cat([rms(embedding[tokens[: len(x)]], tensors[f"{at}.input_layernorm.weight"]), entered], 1)
        out = ran(tensors, at, entered if normed else x, read, rotated, window)
        out = second(tensors, out)
        logits.append(rms(out[-1:], tensors["norm.weight"]) @ tensors["lm_head.weight"].T)
        if step < chain:
            x = torch.cat([x, out[-1:]])
    return torch.cat(logits)


def second(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """A second layer, if there is one: an ordinary one."""
    at = "layers.1"
    if f"{at}.input_layernorm.weight" not in tensors:
        return x
    return ran(tensors, at, x, rms(x, tensors[f"{at}.input_layernorm.weight"]))


@pytest.mark.parametrize(
    "kind",
    ["published", "of transformers", "two layers", "windows", "speculators", "normed residual", "partial rotary"],
)
def test_eagle3(kind: str, tmp_path: Path) -> None:
    published = kind in ("published", "of transformers")
    at = "midlayer" if published else "layers.0"
    tensors = eagle3(at)
    config: dict[str, Any] = {**LAYER, "draft_vocab_size": 9}
    rotated = 4 if kind == "partial rotary" else 8
    deep = kind in ("two layers", "windows")
    if deep:
        tensors |= layer("layers.1", 16) | {"layers.1.input_layernorm.weight": drawn(16)}
    if not published:
        normed = kind == "normed residual"
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": LAYER
            | {"partial_rotary_factor": rotated / 8, "num_hidden_layers": 2 if deep else 1},
            "draft_vocab_size": 9,
            "norm_before_residual": normed,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        }
    if kind == "windows":
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention", "full_attention"]}
        config["transformer_layer_config"] |= {"sliding_window": 3}
    model: Any = olmo2() if kind == "of transformers" else target(2 if published else None)  # rotates otherwise
    draft_head = read_foreign(kept_in(tmp_path, tensors, config), model)
    assert isinstance(draft_head, Eagle3Head)
    assert draft_head.words.vocabulary is not None and draft_head.words.vocabulary.tolist() == list(KEPT)
    window = 3 if kind == "windows" else 99
    wanted = expected3(tensors, at, model, 3, kind == "normed residual", rotated, window)
    torch.testing.assert_close(said(draft_head, model, 3), wanted, atol=2e-4, rtol=1e-4)
    unrolled = [guess.logits[len(TEXT) - 4] for guess in draft_head.guesses(read(draft_head, model))]  # in training
    torch.testing.assert_close(torch.stack(unrolled), wanted, atol=2e-4, rtol=1e-4)
    plain, fast = (
        [
            token
            for step in decode(model, one, Exact(), [TEXT], sampling=Sampling(temperature=0), max_new_tokens=12)
            for token in step.emitted
        ]
        for one in (None, Learned(draft_head.drafts(model), nodes=8))
    )
    assert plain == fast
    if deep:
        rows_alike(draft_head, model)
    if deep or kind == "partial rotary":
        write_speculators(draft_head, tmp_path / "out", "small")
        again = read_foreign(tmp_path / "out", model)
        torch.testing.assert_close(said(again, model, 3), wanted, atol=0.1, rtol=0.05)  # written in 16 bits
        again_equal(again, model, tmp_path / "out")


def drafts_right(draft_head: Any, model: Any) -> None:
    """Decoding with the head gives the tokens of plain decoding, and the head drafts."""
    plain, fast = (
        list(decode(model, one, Exact(), [TEXT], sampling=Sampling(temperature=0), max_new_tokens=12))
        for one in (None, Learned(draft_head.drafts(model), nodes=8))
    )
    assert [token for step in plain for token in step.emitted] == [token for step in fast for token in step.emitted]
    assert any(step.drafted for step in fast)


def speculators(kind: str, **fields: Any) -> dict[str, Any]:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    return {
        "speculators_model_type": kind,
        "speculators_config": {"proposal_methods": methods, "verifier": {"name_or_path": "someone/small"}},
        "transformer_layer_config": LAYER,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        **fields,
    }


@pytest.mark.parametrize("norms", ["joint", "each", "output"])
def test_eagle3_with_its_norms_and_an_embedding_of_its_own(norms: str, model: Any, tmp_path: Path) -> None:
    """norm_before_fc, fc_norm and norm_output, each alone; the embedding is a fine-tuned copy."""
    at = "layers.0"
    own = model.network.embedding + 0.3 * torch.randn_like(model.network.embedding)
    tensors = eagle3(at) | {"embed_tokens.weight": own}
    taps, names = states(model, ("layer.1", "layer.3", "layer.5")), ["norm_before_fc", "fc_norm", "norm_output"]
    if norms == "joint":
        tensors["input_norm.weight"] = drawn(48)
        taps = rms(taps, tensors["input_norm.weight"])
    elif norms == "each":
        tensors |= {f"fc_norm.{i}.weight": drawn(16) for i in range(3)}
        taps = torch.cat([rms(taps[:, 16 * i : 16 * i + 16], tensors[f"fc_norm.{i}.weight"]) for i in range(3)], 1)
    flag = names[["joint", "each", "output"].index(norms)]
    draft_head = read_foreign(kept_in(tmp_path, tensors, speculators("eagle3", **{flag: True})), model)
    chain, tokens, wanted = 2, torch.tensor(TEXT[1:]), []
    x = taps[: len(TEXT) - 1 - chain] @ tensors["fc.weight"].T
    for _ in range(chain + 1):
        entered = rms(x, tensors[f"{at}.hidden_norm.weight"])
        read = torch.cat([rms(own[tokens[: len(x)]], tensors[f"{at}.input_layernorm.weight"]), entered], 1)
        out = ran(tensors, at, x, read)[-1:]
        normed = rms(out, tensors["norm.weight"])
        wanted.append(normed @ tensors["lm_head.weight"].T)
        x = torch.cat([x, normed if norms == "output" else out])
    torch.testing.assert_close(said(draft_head, model, chain), torch.cat(wanted), atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)
    again_equal(draft_head, model, tmp_path)


def again_equal(draft_head: Any, model: Any, folder: Path) -> None:
    """A head whose weights 16 bits hold is exported and read back unchanged."""
    with torch.no_grad():
        for weight in draft_head.state_dict().values():
            if weight.is_floating_point():
                weight.copy_(weight.bfloat16())
    write_published(draft_head, folder / "again", "someone/small")
    again = read_foreign(folder / "again", model)
    assert type(again) is type(draft_head) and again.config == draft_head.config
    for name, weight in draft_head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, atol=0, rtol=0)


@pytest.mark.parametrize(("layers", "window"), [(1, 99), (2, 99), (2, 4)])
def test_peagle(layers: int, window: int, model: Any, tmp_path: Path) -> None:
    """P-EAGLE: behind the root, positions of the mask token and a learned state, each attending to those before it."""
    at, count = "layers.0", 3
    own = model.network.embedding + 0.3 * torch.randn_like(model.network.embedding)
    tensors = eagle3(at) | {"embed_tokens.weight": own, "mask_hidden": torch.randn(1, 1, 48)}
    if layers == 2:
        tensors |= layer("layers.1", 16) | {"layers.1.input_layernorm.weight": drawn(16)}
    config = speculators("peagle", mask_token_id=2)
    config["transformer_layer_config"] = LAYER | {"num_hidden_layers": layers}
    if window < 99:
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
        config["transformer_layer_config"] |= kinds
    draft_head = read_foreign(kept_in(tmp_path, tensors, config), model)
    taps = states(model, ("layer.1", "layer.3", "layer.5"))[: len(TEXT) - 1]
    read_taps = torch.cat([taps, tensors["mask_hidden"][0].expand(count - 1, -1)])
    tokens = torch.tensor([*TEXT[1:], *[2] * (count - 1)])
    x = read_taps @ tensors["fc.weight"].T
    entered = rms(x, tensors[f"{at}.hidden_norm.weight"])
    read = torch.cat([rms(own[tokens], tensors[f"{at}.input_layernorm.weight"]), entered], 1)
    out = second(tensors, ran(tensors, at, x, read, window=window))[-count:]
    wanted = rms(out, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(parallel(draft_head, model), wanted, atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)
    rows_alike(draft_head, model)
    again_equal(draft_head, model, tmp_path)


def parallel(draft_head: Any, model: Any) -> Tensor:
    """[K, R] the logits of a head that guesses K positions behind the text in one pass."""
    runner = HeadRunner(draft_head.drafts(model))
    runner.set_hidden(model.begin([TEXT], Sampling(), draft_head.needs).hidden)
    runner.begin([TEXT], Sampling())
    return runner.future_logits()[0]


@pytest.mark.parametrize("own_format", [True, False], ids=["published", "speculators"])
def test_dflash(own_format: bool, model: Any, tmp_path: Path) -> None:
    """Two layers; an anchor and its masks attend to all states before them and to one another."""
    torch.manual_seed(5)
    ids = torch.tensor(KEPT)
    tensors = {"fc.weight": drawn(16, 48), "hidden_norm.weight": drawn(16), "norm.weight": drawn(16)}
    for index in range(2):
        at = f"layers.{index}"
        tensors |= layer(at, 16) | {f"{at}.input_layernorm.weight": drawn(16)}
        tensors |= {f"{at}.self_attn.{one}_norm.weight": drawn(8) for one in "qk"}
    shape = {**LAYER, "num_hidden_layers": 2, "model_type": "qwen3"}
    if own_format:
        config = shape | {"block_size": 4, "auto_map": {"AutoModel": "x.Y"}}
        config["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": [1, 3, 5]}
        outputs = model.network.head.weight
    else:
        outputs = drawn(9, 16) * 3
        tensors |= {"lm_head.weight": outputs, "d2t": ids - torch.arange(9)}
        tensors["t2d"] = torch.zeros(40, dtype=torch.bool).index_fill_(0, ids, True)
        config = speculators("dflash", block_size=4, mask_token_id=2, aux_hidden_state_layer_ids=[2, 4, 6])
        config["transformer_layer_config"] = shape
    draft_head = read_foreign(kept_in(tmp_path, tensors, config), model)
    context = states(model, ("layer.1", "layer.3", "layer.5"))[: len(TEXT) - 1] @ tensors["fc.weight"].T
    context = rms(context, tensors["hidden_norm.weight"])
    x = model.network.embedding[torch.tensor([TEXT[-1], 2, 2, 2])]
    for index in range(2):
        x = crossed(tensors, f"layers.{index}", context, x)
    wanted = rms(x[1:], tensors["norm.weight"]) @ outputs.T
    torch.testing.assert_close(parallel(draft_head, model), wanted, atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)
    with torch.no_grad():  # the mask's row of the embedding is not rounded with the head's weights
        model.network.embedding.copy_(model.network.embedding.bfloat16())
        draft_head.mask.copy_(draft_head.mask.bfloat16())
    again_equal(draft_head, model, tmp_path)


WINDOWED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    # changed fields of the layers' config and of dflash_config or the speculators config; the rule of each layer
    "published": ({"layer_types": ["sliding_attention", "full_attention"]}, {}, ("last 5, causal", "all")),
    "speculators": ({"layer_types": ["full_attention", "sliding_attention"]}, {}, ("all", "5 before, causal")),
    "speculators, not causal": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window_non_causal": True},
        ("5 before", "all"),
    ),
    "use_swa": ({}, {"use_swa": True, "swa_window_size": 5}, ("last 5", "last 5")),
    "causal": ({}, {"causal": True}, ("causal", "causal")),
    "overridden": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"causal": False},
        ("last 5", "all"),
    ),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_dflash_with_windows(kind: str, model: Any, tmp_path: Path) -> None:
    """Queries see 5 positions, their own included, or the 5 before their block; blocks are causal or not."""
    torch.manual_seed(5)
    tensors = {"fc.weight": drawn(16, 48), "hidden_norm.weight": drawn(16), "norm.weight": drawn(16)}
    for index in range(2):
        at = f"layers.{index}"
        tensors |= layer(at, 16) | {f"{at}.input_layernorm.weight": drawn(16)}
        tensors |= {f"{at}.self_attn.{one}_norm.weight": drawn(8) for one in "qk"}
    changed, fields, rules = WINDOWED[kind]
    shape = {**LAYER, "num_hidden_layers": 2, "model_type": "qwen3", "sliding_window": 5, **changed}
    if kind.startswith("speculators"):
        outputs = tensors["lm_head.weight"] = drawn(40, 16) * 3
        config = speculators("dflash", block_size=4, mask_token_id=2, aux_hidden_state_layer_ids=[2, 4, 6], **fields)
        config["transformer_layer_config"] = shape
    else:
        outputs = model.network.head.weight
        config = shape | {"block_size": 4}
        config["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": [1, 3, 5], **fields}
    draft_head: Any = read_foreign(kept_in(tmp_path, tensors, config), model)
    context = states(model, ("layer.1", "layer.3", "layer.5"))[: len(TEXT) - 1] @ tensors["fc.weight"].T
    context = rms(context, tensors["hidden_norm.weight"])
    x = model.network.embedding[torch.tensor([TEXT[-1], 2, 2, 2])]
    key, query = torch.arange(10), torch.arange(6, 10)[:, None]  # six positions of context, four of the block
    for index, rule in enumerate(rules):
        mask = torch.ones(4, 10, dtype=torch.bool)
        mask = mask & (key > query - 5) if "last 5" in rule else mask & (key >= 1) if "5 before" in rule else mask
        mask = mask & (key <= query) if "causal" in rule else mask
        x = crossed(tensors, f"layers.{index}", context, x, mask)
    wanted = rms(x[1:], tensors["norm.weight"]) @ outputs.T
    torch.testing.assert_close(parallel(draft_head, model), wanted, atol=2e-4, rtol=1e-4)
    trained = draft_head.block_states(read(draft_head, model), torch.tensor([[3, len(TEXT) - 1]]))[
        0, 1
    ]  # as in training
    torch.testing.assert_close(draft_head.words.logits(trained), wanted, atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)
    rows_alike(draft_head, model)
    with torch.no_grad():
        model.network.embedding.copy_(model.network.embedding.bfloat16())
        draft_head.mask.copy_(draft_head.mask.bfloat16())
    again_equal(draft_head, model, tmp_path)


def read(draft_head: Any, model: Any) -> Batch:
    """The text as the teacher has read it."""
    taps = dict(zip(draft_head.taps, states(model, draft_head.taps)[None].chunk(3, 2), strict=True))
    live = torch.ones(1, len(TEXT), dtype=torch.bool)
    return Batch(torch.tensor([TEXT]), live, live, taps, lambda last, kept: last)


def rows_alike(draft_head: Any, model: Any) -> None:
    """Rows of unequal length are drafted in a batch as alone."""
    prompts = [TEXT, TEXT[:3], TEXT[2:]]

    def drafted(texts: list[list[int]]) -> list[list[tuple[int, ...]]]:
        drafter = Learned(draft_head.drafts(model), nodes=6)
        steps = decode(model, drafter, Exact(), texts, sampling=Sampling(temperature=0), max_new_tokens=8)
        found: list[list[tuple[int, ...]]] = [[] for _ in texts]
        for step in steps:
            found[step.row].append(step.drafted)
        return found

    assert drafted(prompts) == [drafted([prompt])[0] for prompt in prompts]


def crossed(tensors: dict[str, Tensor], at: str, context: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """A Qwen-3 layer over a block behind a context, whose keys and values are those of the context's states. `mask`
    [block, context + block]: true where attended."""
    y = rms(x, tensors[f"{at}.input_layernorm.weight"])
    both, count = torch.cat([context, y]), len(context)
    q, k, v = (
        part @ tensors[f"{at}.self_attn.{name}_proj.weight"].T for part, name in ((y, "q"), (both, "k"), (both, "v"))
    )
    angles = torch.arange(len(both))[:, None] / 5000.0 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)

    def turned(part: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = rms(part, weight)
        return part * cos + torch.cat([-part[:, 4:], part[:, :4]], 1) * sin

    k = turned(k, tensors[f"{at}.self_attn.k_norm.weight"], cos, sin)
    heads = []
    for part in (q[:, :8], q[:, 8:]):
        query = turned(part, tensors[f"{at}.self_attn.q_norm.weight"], cos[count:], sin[count:])
        scores = query @ k.T / 8**0.5
        heads.append(torch.softmax(scores if mask is None else scores.where(mask, -torch.inf), -1) @ v)
    x = x + torch.cat(heads, 1) @ tensors[f"{at}.self_attn.o_proj.weight"].T
    y = rms(x, tensors[f"{at}.post_attention_layernorm.weight"])
    inner = F.silu(y @ tensors[f"{at}.mlp.gate_proj.weight"].T) * (y @ tensors[f"{at}.mlp.up_proj.weight"].T)
    return x + inner @ tensors[f"{at}.mlp.down_proj.weight"].T


@pytest.mark.parametrize("native", [True, False], ids=["within the target", "speculators"])
def test_mtp(native: bool, model: Any, tmp_path: Path) -> None:
    """One layer, applied again to its own normed states."""
    torch.manual_seed(6)
    at = "mtp_layers.0"
    tensors = layer(at, 16) | {f"{at}.{name}_layernorm.weight": drawn(16) for name in ("input", "token", "hidden")}
    tensors |= {f"{at}.final_layernorm.weight": drawn(16), f"{at}.input_proj.weight": drawn(16, 32)}
    stored, config = tensors, speculators("mtp")
    if native:
        names = {"input_proj": "fc", "final_layernorm": "norm", "token_layernorm": "pre_fc_norm_embedding"}
        names["hidden_layernorm"] = "pre_fc_norm_hidden"
        stored, config = {"model.norm.weight": drawn(16)}, LAYER
        for name, tensor in tensors.items():
            part = name.removeprefix(f"{at}.").removesuffix(".weight")
            stored[f"mtp.{names[part]}.weight" if part in names else f"mtp.layers.0.{part}.weight"] = tensor
    draft_head = read_foreign(kept_in(tmp_path, stored, config), model)
    chain, tokens, wanted = 2, torch.tensor(TEXT[1:]), []
    x = states(model, ("last",))[: len(TEXT) - 1 - chain]
    for _ in range(chain + 1):
        embedded = rms(model.network.embedding[tokens[: len(x)]], tensors[f"{at}.token_layernorm.weight"])
        both = torch.cat([embedded, rms(x, tensors[f"{at}.hidden_layernorm.weight"])], 1)
        fused = both @ tensors[f"{at}.input_proj.weight"].T
        out = ran(tensors, at, fused, rms(fused, tensors[f"{at}.input_layernorm.weight"]))[-1:]
        out = rms(out, tensors[f"{at}.final_layernorm.weight"])
        wanted.append(out @ model.network.head.weight.T)
        x = torch.cat([x, out])
    torch.testing.assert_close(said(draft_head, model, chain), torch.cat(wanted), atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)
    again_equal(draft_head, model, tmp_path)


def test_llasa_plus(model: Any, tmp_path: Path) -> None:
    """Module 1 reads the normed states, module 2 module 1's; both go straight to the output rows."""
    torch.manual_seed(8)
    tensors: dict[str, Tensor] = {}
    for at in ("mtp_1", "mtp_2"):
        tensors |= layer(f"{at}_block", 16) | {f"{at}_block.input_layernorm.weight": drawn(16)}
        tensors |= {f"{at}_proj.weight": drawn(16, 16), f"{at}_proj.bias": torch.randn(16) * 0.1}
        tensors[f"{at}_local_RMSNorm.weight"] = drawn(16)
    stored = tensors | {"llm.model.norm.weight": drawn(16)}
    draft_head = read_foreign(kept_in(tmp_path, stored, LAYER), model)
    x, wanted = states(model, ("last",))[: len(TEXT) - 2], []
    for at in ("mtp_1", "mtp_2"):
        x = rms(x, tensors[f"{at}_local_RMSNorm.weight"]) @ tensors[f"{at}_proj.weight"].T + tensors[f"{at}_proj.bias"]
        x = ran(tensors, f"{at}_block", x, rms(x, tensors[f"{at}_block.input_layernorm.weight"]))
        wanted.append(x[-1:] @ model.network.head.weight.T)
    torch.testing.assert_close(said(draft_head, model, 1), torch.cat(wanted), atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)


@pytest.mark.parametrize("prefix", [False, True], ids=["hydra", "hydra++"])
def test_hydra(prefix: bool, tmp_path: Path) -> None:
    """Each head reads the state and the embeddings of the tokens after it; Hydra++'s state has passed a layer."""
    torch.manual_seed(7)
    shape = replace(SHAPE, heads=2, kv_heads=1, head_dim=8, intermediate_size=20, rope_theta=5000.0, norm_eps=1e-5)
    model, tensors, count = Decoder.random(shape, seed=2, gain=1.5), dict[str, Tensor](), 3
    first, second, output = ("1", "3", ".1") if prefix else ("0", "1", "")
    for k in range(count):
        at, wide = f"hydra_mlp.{k}", 16 * (k + 2)
        tensors |= {f"{at}.{first}.linear.weight": drawn(16, wide), f"{at}.{first}.linear.bias": torch.randn(16) * 0.1}
        tensors |= {f"{at}.{first}.res_connection.weight": drawn(16, wide)}
        tensors |= {f"{at}.{first}.res_connection.bias": torch.randn(16) * 0.1}
        tensors |= {f"{at}.{second}.linear.weight": drawn(16, 16), f"{at}.{second}.linear.bias": torch.randn(16) * 0.1}
        tensors |= {f"hydra_lm_head.{k}{output}.weight": drawn(40, 16) * 3}
        tensors |= {f"hydra_lm_head.{k}{output}.bias": torch.randn(40) * 0.1}
    config = {"hydra_num_heads": count, "hydra_num_layers": 2, "grounded_heads": True, "hydra_head_arch": "mlp"}
    chain, x = 2, states(model, ("last",))[: len(TEXT) - 3]
    if prefix:
        at = "prefix_embeding_layer.layers.0"
        tensors |= layer(at, 16) | {f"{at}.input_layernorm.weight": drawn(16)}
        tensors |= {"prefix_embeding_layer.norm.weight": drawn(16)}
        tensors |= {"prefix_embeding_layer.embed_tokens.weight": torch.randn(40, 16)}
        config["hydra_head_arch"] = "prefix-mlp"
        x = ran(tensors, at, x, rms(x, tensors[f"{at}.input_layernorm.weight"]))
        x = rms(x, tensors["prefix_embeding_layer.norm.weight"])
    draft_head = read_foreign(medusa_in(tmp_path / "h", tensors, config, "hydra_lm_head.pt"), model)
    wanted, embedded = [], model.network.embedding[torch.tensor(TEXT[len(TEXT) - chain - 1 :])]
    for k in range(chain + 1):
        both = torch.cat([x[-1], *embedded[: k + 1]])
        at = f"hydra_mlp.{k}"

        def linear(name: str, y: Tensor) -> Tensor:
            return tensors[f"{name}.weight"] @ y + tensors[f"{name}.bias"]

        y = linear(f"{at}.{first}.res_connection", both) + F.silu(linear(f"{at}.{first}.linear", both))
        y = y + F.silu(linear(f"{at}.{second}.linear", y))
        wanted.append(linear(f"hydra_lm_head.{k}{output}", y))
    torch.testing.assert_close(said(draft_head, model, chain), torch.stack(wanted), atol=2e-4, rtol=1e-4)
    drafts_right(draft_head, model)
    for wrong, message in (
        ({"grounded_heads": False}, "not grounded"),
        ({"hydra_head_arch": "eagle-attn"}, "'eagle-attn'"),
    ):
        with pytest.raises(Incompatible, match=message):
            read_foreign(medusa_in(tmp_path / message.strip("'"), tensors, config | wrong, "hydra_lm_head.pt"), model)


@pytest.mark.parametrize("ours", [False, True], ids=["published", "speculators"])
def test_eagle(ours: bool, model: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    at, fuse = ("transformer", "fusion_fc") if ours else ("layers.0", "fc")
    tensors = {f"{fuse}.weight": drawn(16, 32), f"{fuse}.bias": torch.randn(16) * 0.1, **layer(at, 16)}
    if not ours:
        tensors["embed_tokens.weight"] = model.network.embedding.clone()
    draft_head = read_foreign(
        kept_in(tmp_path, tensors, {"speculators_model_type": "eagle"} | LAYER if ours else LAYER), model
    )
    x, tokens = states(model, ("last",))[: len(TEXT) - 3], torch.tensor(TEXT[1:])
    logits = []
    for _ in range(3):
        both = torch.cat([model.network.embedding[tokens[: len(x)]], x], 1)
        read = both @ tensors[f"{fuse}.weight"].T + tensors[f"{fuse}.bias"]
        out = ran(tensors, at, read, read)[-1:]
        logits.append(out @ model.network.head.weight.T)
        x = torch.cat([x, out])
    torch.testing.assert_close(said(draft_head, model, 2), torch.cat(logits), atol=2e-4, rtol=1e-4)
    again_equal(draft_head, model, tmp_path)


def test_medusa(model: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    tensors: dict[str, Tensor] = {}
    for k in range(3):
        for j in range(2):
            tensors |= {f"{k}.{j}.linear.weight": drawn(16, 16), f"{k}.{j}.linear.bias": torch.randn(16) * 0.1}
        tensors[f"{k}.2.weight"] = drawn(40, 16)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "small"}
    draft_head = read_foreign(kept_in(tmp_path, tensors, config), model)
    state = states(model, ("last",))[len(TEXT) - 4]
    wanted = []
    for k in range(3):
        x = state
        for j in range(2):
            x = x + F.silu(tensors[f"{k}.{j}.linear.weight"] @ x + tensors[f"{k}.{j}.linear.bias"])
        wanted.append(tensors[f"{k}.2.weight"] @ x)
    torch.testing.assert_close(said(draft_head, model, 2), torch.stack(wanted), atol=1e-4, rtol=1e-4)
    again_equal(draft_head, model, tmp_path)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("vocabulary", [0, (30, 3, 9, 4)], ids=["all words", "few words"])
def test_exported_heads_read_back_the_same(steady: bool, vocabulary: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = target()
    draft_head = Eagle3Head(model, steady=steady, hidden=12, vocabulary=vocabulary)
    with torch.no_grad():
        for weight in draft_head.parameters():  # what 16 bits hold
            weight.copy_((weight + torch.randn_like(weight) * 0.1).bfloat16())
    write_speculators(draft_head, tmp_path, "somebody/small")
    again = read_foreign(tmp_path, model)
    assert isinstance(again, Eagle3Head) and again.taps == draft_head.taps
    before, after = said(draft_head, model, 2), said(again, model, 2)
    if vocabulary:
        assert again.words.vocabulary is not None and again.words.vocabulary.tolist() == sorted(vocabulary)
        before = before[:, torch.tensor(vocabulary).argsort()]
    torch.testing.assert_close(after, before, atol=0.05, rtol=0.05)  # the output rows were rounded to 16 bits
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["speculators_config"]["verifier"]["name_or_path"] == "somebody/small"
    assert described["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, tensors = target(), eagle3("midlayer")
    config: dict[str, Any] = {**LAYER, "draft_vocab_size": 9}
    with pytest.raises(Incompatible, match="has no tensor"):
        read_foreign(kept_in(tmp_path, {k: v for k, v in tensors.items() if k != "norm.weight"}, config), model)
    with pytest.raises(Incompatible, match="does not use"):
        read_foreign(kept_in(tmp_path, tensors | {"extra.weight": torch.ones(2)}, config), model)
    with pytest.raises(Incompatible, match="another shape"):
        read_foreign(kept_in(tmp_path, tensors | {"fc.weight": torch.ones(16, 32)}, config), model)
    with pytest.raises(Incompatible, match="embedding"):
        read_foreign(kept_in(tmp_path, tensors | {"embed_tokens.weight": torch.ones(40, 16)}, config), model)
    with pytest.raises(Incompatible, match="input_norm"):
        read_foreign(kept_in(tmp_path, tensors, config | {"norm_before_fc": True}), model)
    for wrong, message in (
        ({"hidden_size": 24}, "hidden_size of 24, and this target has 16"),
        ({"vocab_size": 50}, "vocab_size of 50, and this target has 40"),
        ({"num_hidden_layers": 2}, "no tensor 'layers.1."),
        ({"layer_types": ["sliding_attention"]}, "sliding windows of None tokens"),
    ):
        with pytest.raises(Incompatible, match=message):
            read_foreign(kept_in(tmp_path, tensors, config | wrong), model)
    shape = LAYER | {"layer_types": ["sliding_attention"]}
    windowed = speculators("eagle", transformer_layer_config=shape | {"sliding_window": 4})
    with pytest.raises(Incompatible, match="sliding windows, which EAGLE's do not have here"):
        read_foreign(kept_in(tmp_path, tensors, windowed), model)
    for wrong, message in (
        ({}, "sliding windows of None tokens"),
        ({"sliding_window": 4, "layer_types": ["linear_attention"]}, "expected full or sliding"),
        ({"sliding_window": 4, "layer_types": []}, "has no tensor 'fc.weight'"),
    ):
        block = speculators("dflash", block_size=4, mask_token_id=2, transformer_layer_config=shape | wrong)
        with pytest.raises(Incompatible, match=message):
            read_foreign(kept_in(tmp_path, {"norm.weight": torch.ones(16)}, block), model)
    with pytest.raises(InvalidOption, match="windows has 1 values"):
        DFlashBlock(model, layers=2, windows=(4,))
    with pytest.raises(Incompatible, match="ids up to 46, and the target has 40"):
        read_foreign(kept_in(tmp_path, tensors | {"d2t": tensors["d2t"] + 8}, config), model)
    without = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    with pytest.raises(Incompatible, match="no d2t"):
        read_foreign(kept_in(tmp_path, without, config), model)
    moe = {"speculators_model_type": "mtp", "transformer_layer_config": LAYER | {"model_type": "qwen3_next"}}
    with pytest.raises(Incompatible, match="one of 'qwen3_next', which can't be read"):
        read_foreign(kept_in(tmp_path, tensors, moe), model)
    with pytest.raises(Incompatible, match="kind"):
        read_foreign(kept_in(tmp_path, {"a": torch.ones(1)}, {"model_type": "resnet"}), model)
    with pytest.raises(Incompatible, match="normed state"):
        write_speculators(Eagle3Head(model, taps=("layer.1", "last")), tmp_path, "x")


def medusa_tensors() -> dict[str, Tensor]:
    torch.manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for k in range(5):
        tensors |= {f"{k}.0.linear.weight": drawn(16, 16), f"{k}.0.linear.bias": torch.zeros(16)}
        tensors[f"{k}.1.weight"] = drawn(40, 16)
    return tensors


def medusa_in(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / file)
    return folder


def test_medusa_in_all_its_layouts(tmp_path: Path) -> None:
    """A pickle whose config names two of its five heads, as the first to be published; a prefix; vLLM's names."""
    model, tensors = target(), medusa_tensors()
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "small"}
    first = read_foreign(medusa_in(tmp_path / "a", tensors, config, "medusa_lm_head.pt"), model)
    assert first.depth == 5 and first.config["own"]
    below = {f"medusa_head.{name}": one for name, one in tensors.items()}
    theirs = {}
    for k in range(5):
        theirs |= {f"blocks.{k}.layers.0.weight": tensors[f"{k}.0.linear.weight"]}
        theirs |= {f"lm_heads.{k}.weight": tensors[f"{k}.1.weight"]}
    served = {"model_type": "medusa", "num_heads": 5, "num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 16}
    for place, (named, about) in enumerate([(below, config), (theirs, served)]):
        other = read_foreign(medusa_in(tmp_path / str(place), named, about, "pytorch_model.bin"), model)
        for name, one in first.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], one, atol=0, rtol=0)
    with pytest.raises(Incompatible, match="no Medusa heads"):
        read_foreign(medusa_in(tmp_path / "none", {"x.y": torch.ones(2)}, served, "pytorch_model.bin"), model)


def test_eagle3_as_published_in_a_pickle(tmp_path: Path) -> None:
    model = target()
    torch.manual_seed(1)
    draft_head = Eagle3Head(model, steady=False, hidden=12, vocabulary=(30, 3, 9, 4))
    write_speculators(draft_head, tmp_path / "ours", "small")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    published = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
    described = json.loads((tmp_path / "ours" / "config.json").read_text())
    config = described["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 4,
    }
    published["t2d"] = published["t2d"].bool()
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(published, folder / "pytorch_model.bin")
    torch.save({"steps": torch.ones(1)}, folder / "optimizer.pt")  # is none of the drafter's
    again, before = read_foreign(folder, model), read_foreign(tmp_path / "ours", model)
    for name, one in before.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], one, atol=0, rtol=0)


def test_a_pickle_with_more_than_weights_is_refused(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {**medusa_tensors(), "path": Path("/")}
    with pytest.raises(AssetError, match="more than weights"):
        read_foreign(medusa_in(tmp_path / "x", tensors, {"medusa_num_heads": 5}, "medusa_lm_head.pt"), target())
