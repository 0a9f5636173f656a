"""LongRoPE on both sides of the original context: each token's logits are those of transformers for a text of its
length, whatever was drafted and whatever else is in the batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.checkpoints import load
from outrider.core.engine.linear import fastest
from outrider.core.engine.loading.folder import target_of_folder
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.testing.conformance import trial_drafter
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.tree import Tree

transformers = pytest.importorskip("transformers")

ORIGINAL, VOCABULARY, GREEDY = 24, 61, Sampling(temperature=0)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7] * 9, [8, 9, 10] * 10]  # the last one is longer than the original context
NAMES = ["prompt-lookup", "token-recycling", "draft-model", "layer-skip", "sampled-tree"]


@cache
def theirs() -> Any:
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.2, 1.5],
        "long_factor": [4.0, 6.0, 9.0],
        "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": 0.75,
    }
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
        sliding_window=None,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.25
    return model


@torch.no_grad()
def expected(text: list[int]) -> torch.Tensor:
    """The logits after the whole text, read at once."""
    logits: torch.Tensor = theirs()(torch.tensor([text])).logits[0, -1]
    return logits


def ours(noise: float = 0.0, **options: Any) -> Decoder:
    torch.manual_seed(3)
    tensors = {key: value + noise * torch.randn(value.shape) for key, value in theirs().state_dict().items()}
    return load(theirs().config.to_dict(), tensors, **options)


@cache
def greedy() -> list[list[int]]:
    """35 tokens after each prompt."""
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        for _ in range(35):
            text.append(int(expected(text).argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


def test_each_token_has_the_factors_of_its_own_length() -> None:
    ids = torch.randint(0, VOCABULARY, (3, 50), generator=torch.Generator().manual_seed(1))
    decoder, starts = ours(), (10, ORIGINAL + 1, 35)
    decoder.begin([row[:start].tolist() for row, start in zip(ids, starts, strict=True)], Sampling())
    tokens = torch.stack([row[start : start + 15] for row, start in zip(ids, starts, strict=True)])
    logits = decoder.score(Draft.guess(tokens, Tree.chain(15), torch.ones(3, 15, dtype=torch.bool))).logits()
    assert decoder.context == 128
    for row, start in enumerate(starts):
        for place in range(16):
            wanted = expected(ids[row, : start + place].tolist())
            torch.testing.assert_close(logits[row, place], wanted, atol=1e-4, rtol=0)


def decoded(target: Decoder, drafter: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    steps = list(decode(target, drafter, make_rule(), prompts, sampling=GREEDY, max_new_tokens=35))
    return [[token for step in steps if step.row == row for token in step.emitted] for row in range(len(prompts))]


@pytest.mark.parametrize("name", [None, *NAMES])
def test_drafting_across_the_switch_changes_no_token(name: str | None) -> None:
    def drafter() -> Any:
        return None if name is None else trial_drafter(DRAFTERS[name], {}, lambda: ours(noise=0.02))

    assert decoded(ours(), drafter()) == greedy()
    for row, prompt in enumerate(PROMPTS):  # alone, all its rows become long
        assert decoded(ours(), drafter(), [prompt]) == [greedy()[row]]


@pytest.mark.parametrize("name", ["prompt-lookup", "draft-model"])
def test_continuous_batches_cross_the_switch(name: str) -> None:
    def make() -> Any:
        return trial_drafter(DRAFTERS[name], {}, lambda: ours(noise=0.02))

    batch = ContinuousBatch(ours(), make, make_rule(), sampling=GREEDY, rows=2)
    numbers = [batch.add(prompt, 35) for prompt in PROMPTS]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    for step in batch:
        texts[step.row] += step.emitted
    assert [texts[number] for number in numbers] == greedy()


@pytest.mark.parametrize("name", [None, "prompt-lookup"])
def test_graphs_cross_the_switch(name: str | None) -> None:
    with shadow_device():
        target = ours(device="cuda")
        drafter = None if name is None else trial_drafter(DRAFTERS[name], {}, lambda: target)
        assert decoded(make_decoder(with_graphs(target.network)), drafter) == greedy()


def test_threads_on_both_sides_of_the_switch() -> None:
    network = ours().network
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda prompt: decoded(make_decoder(network), None, [prompt])[0], PROMPTS * 6)
        assert list(found) == greedy() * 6


def test_compiled_passes_cross_the_switch() -> None:
    scaling = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
        "long_factor": [3.0 + pair for pair in range(12)],
        "original_max_position_embeddings": float(ORIGINAL),
        "attention_factor": 1.2,
    }
    config = Config(
        vocabulary=VOCABULARY,
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        intermediate_size=64,
        rotary_dim=24,
        rope_scaling=("longrope", scaling),
        context=128,
    )

    def target(dtype: torch.dtype, seed: int = 1) -> Decoder:
        return make_decoder(random_network(config, seed, dtype=dtype).map_linears(fastest))

    plain = decoded(target(torch.bfloat16), None)
    assert decoded(target(torch.bfloat16), trial_drafter(DRAFTERS["prompt-lookup"], {}, lambda: None)) == plain
    decoder, wide = target(torch.bfloat16), target(torch.float32)
    for model in (decoder, wide):
        model.begin([[*range(1, 1 + ORIGINAL)]], Sampling())
    draft = Draft.guess(torch.arange(10)[None], Tree.chain(10), torch.ones(1, 10, dtype=torch.bool))
    torch.testing.assert_close(decoder.score(draft).logits().float(), wide.score(draft).logits(), atol=0.3, rtol=0)


def test_a_folder_has_the_whole_context(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    make, context = target_of_folder(tmp_path, "float32", torch.device("cpu"))
    target = make()
    assert context == 128 and isinstance(target, Decoder)
    assert decoded(target, None) == greedy()
