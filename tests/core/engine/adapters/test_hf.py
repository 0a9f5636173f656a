"""Models of transformers as targets: audited like our own decoder, with a mask for trees and with branches as rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import DraftModel, TopKTree
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import make_rule
from outrider.core.testing.cache_audit import emitted, paths, random_draft, random_verdict
from outrider.core.tree import Tree

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT_NEO = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 128,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MPT = {"vocab_size": 31, "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
BART = {
    "vocab_size": 31,
    "d_model": 24,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 128,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "encoder_layers": 2,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {"Llama": SHAPE, "Qwen3": SHAPE, "GPT2": GPT2, "Gemma": SHAPE}
WINDOWS = SHAPE | {"sliding_window": 4}
# a token's position is its column in the cache
BY_COLUMN = {"GPTNeo": GPT_NEO, "Mpt": MPT, "Bart": BART, "Mistral": WINDOWS}
WAYS = [(name, trees) for name in MODELS for trees in ("mask", "branches")] + [(name, "branches") for name in BY_COLUMN]
MODELS |= BY_COLUMN


def made(name: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**(MODELS.get(name, SHAPE) | options))
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.25
    return model


@torch.no_grad()
def fresh(model: Any, text: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([text])).logits[0]
    return found


@pytest.mark.parametrize(("name", "trees"), WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_audit(name: str, trees: str, rows: int) -> None:
    rng = random.Random(f"{name}{rows}")
    model = made(name)
    target = TransformersTarget(model, trees=trees)
    texts = [[rng.randrange(31) for _ in range(rng.randint(1, 7))] for _ in range(rows)]
    target.begin(texts, Sampling())
    mark, marked = target.mark(), [list(text) for text in texts]
    for step in range(7):
        if step == 4:
            target.rewind(mark)
            texts = marked
        draft, parents = random_draft(rng, rows, 31, 5)
        half = draft.size // 2
        part = Draft.guess(draft.tokens[:, :half], Tree(draft.tree.parents[:, :half]), draft.live[:, :half])
        pieces = [target.score(part), target.score(draft, half)] if rng.random() < 0.4 else [target.score(draft)]
        if rng.random() < 0.2:
            target.rewind(target.mark())
        found = torch.cat([piece.logits() for piece in pieces], 1)
        for row, text in enumerate(texts):
            for path in [[], *paths(parents[row])]:
                wanted = fresh(model, [*text, *(int(draft.tokens[row, node]) for node in path)])[-1]
                said = found[row, path[-1] + 1 if path else 0]
                torch.testing.assert_close(said, wanted, atol=1e-5 if name in BY_COLUMN else 1e-9, rtol=0)
        verdict, count = random_verdict(rng, draft, parents, 31)
        target.keep(draft, verdict, count)
        texts = [[*text, *emitted(draft, verdict, row, int(count[row]))] for row, text in enumerate(texts)]
    target.end()


@pytest.mark.parametrize("name", MODELS)
def test_the_context_is_the_class_s_own(name: str) -> None:
    assert TransformersTarget(made(name)).context == 128


@pytest.mark.parametrize("name", MODELS)
def test_classes_take_masks(name: str) -> None:
    assert TransformersTarget(made(name)).trees == ("branches" if name in BY_COLUMN else "mask")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trees"), WAYS)
def test_drafting_changes_nothing(name: str, trees: str) -> None:
    target, drafts = TransformersTarget(made(name), trees=trees), TransformersTarget(made(name), trees=trees)
    with torch.no_grad():
        for parameter in drafts.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    prompts = [[1, 2, 3, 4], [5, 6], [7]]
    greedy = Sampling(temperature=0)
    texts = []
    for drafter in (None, DraftModel(drafts, length=3), TopKTree(drafts)):
        steps = list(decode(target, drafter, make_rule(), prompts, sampling=greedy, max_new_tokens=14))
        texts.append([[token for step in steps if step.row == row for token in step.emitted] for row in range(3)])
    assert texts[0] == texts[1] == texts[2]


def test_states_at_the_taps() -> None:
    model = made("Llama")
    target = TransformersTarget(model)
    needs = frozenset({"embedding", "layer.0", "last"})
    prefill = target.begin([[1, 2, 3], [4, 5]], Sampling(), needs)
    tree = Draft.guess(torch.tensor([[6, 7], [8, 9]]), Tree.of((-1, -1)), torch.ones(2, 2).bool())
    scores = target.score(tree)
    assert {tap: states.shape for tap, states in scores.hidden.items()} == dict.fromkeys(needs, (2, 3, 24))
    assert all(states.shape == (2, 2, 24) for states in prefill.hidden.values())
    head = model.get_output_embeddings()
    torch.testing.assert_close(head(scores.hidden["last"]), scores.logits())
    branching = TransformersTarget(model, trees="branches")
    branching.begin([[1, 2, 3], [4, 5]], Sampling(), needs)
    for tap, states in branching.score(tree).hidden.items():
        torch.testing.assert_close(states, scores.hidden[tap], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Mamba", {"state_size": 4}, "MambaForCausalLM keeps a recurrent state"),
        ("DeepseekV32", {}, "uses a cache of an unsupported kind"),
    ],
)
def test_caches_that_cannot_be_cut_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    config = f"{name}Config"
    shape = {key: value for key, value in SHAPE.items() if name != "Mamba" or key in ("vocab_size", "hidden_size")}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**(shape | options)))
    with pytest.raises(Incompatible, match=reason) as found:
        TransformersTarget(model)
    assert "\n" not in str(found.value)


def test_what_cannot_be_done_is_said() -> None:
    model = made("Llama")
    with pytest.raises(InvalidOption, match="Known: branches, mask"):
        TransformersTarget(model, trees="leaves")
    with pytest.raises(InvalidOption, match=r"Known: embedding, last, layer\.0"):
        TransformersTarget(model).begin([[1]], Sampling(), frozenset({"layer.1"}))
    with pytest.raises(InvalidOption, match="context is 128"):
        TransformersTarget(model).begin([[1] * 129], Sampling())
