"""Every kind of target on a device: drafting changes no token, in float64 the tokens are those of the CPU, and the host
waits as often as is stated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from outrider.core.decode import decode
from outrider.core.draft import Draft
from outrider.core.engine import checkpoints
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.offload import offload_layers
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import DRAFTERS, Method, make_rule
from outrider.core.protocol import Drafter, Target
from outrider.core.testing.conformance import trial_drafter
from outrider.image.layout_planner import decoder as planned_decoder
from outrider.image.token_model import TokenModel
from outrider.speech.voice import Voice, VoiceDecoder
from tests.core.shadow.cases import CONFIG, DEVICES, PROMPTS, SAMPLINGS, Device, Outcome, drafter_on, network, outcome

Make = Callable[[str], Callable[[int], Target]]  # device -> rows -> a target
WIDE = replace(CONFIG, hidden_size=64, head_dim=16, intermediate_size=128)  # as quantised weights need


SMALL: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "hidden": 24}


def whole(device: str) -> Callable[[int], Target]:
    shared = network(device)
    return lambda rows: Decoder(shared)


def eight_bit_cache(device: str) -> Callable[[int], Target]:
    shared = network(device, dtype=torch.float32)
    return lambda rows: Decoder(shared, cache_bits=8)


def quantised(bits: int) -> Make:
    def make(device: str) -> Callable[[int], Target]:
        shared = with_graphs(quantize(random_network(WIDE, 1, dtype=torch.bfloat16, device=device), bits))
        return lambda rows: Decoder(shared)

    return make


def offloaded(device: str) -> Callable[[int], Target]:
    shared, _ = offload_layers(random_network(CONFIG, 1, dtype=torch.float64, device=device), 0.5)
    return lambda rows: Decoder(shared)


def offloaded_8_bit(device: str) -> Callable[[int], Target]:
    shared, _ = offload_layers(quantize(random_network(WIDE, 1, dtype=torch.bfloat16, device=device), 8), 0.5)
    return lambda rows: Decoder(shared)


def windowed(device: str) -> Callable[[int], Target]:
    variant = replace(CONFIG.variant, windows=(4, 0, 6))
    shared = network(device, config=replace(CONFIG, variant=variant))
    return lambda rows: make_decoder(shared)


def guided(device: str) -> Callable[[int], Target]:
    shared = network(device)
    return lambda rows: Guided(Decoder(shared), [[7, row] for row in range(rows)], [9, 9], 2.5)


def picture(device: str) -> Callable[[int], Target]:
    torch.manual_seed(0)
    model = TokenModel(codes=CONFIG.vocabulary, styles=("any",), words=("heart", "red"), **SMALL)
    shared, encoder = model.network(torch.float64, device), model.prompt_encoder
    ids = encoder.encode_checked("red heart", "any")
    return lambda rows: Guided(planned_decoder(shared), [ids] * rows, encoder.unconditional, 3.0)


def voice(device: str) -> Callable[[int], Target]:
    torch.manual_seed(0)
    model = Voice(codes=CONFIG.vocabulary - 1, reading=16, **SMALL).to(device).eval().requires_grad_(False)
    shared = model.network(torch.float64, device)
    return lambda rows: VoiceDecoder(
        shared, model.script([[1 + (row + k) % 30 for k in range(9)] for row in range(rows)])
    )


def llama(**shape: Any) -> tuple[Any, Any]:
    """A random model of transformers and its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, attn_implementation="eager")
    return LlamaForCausalLM(config).eval(), config


def of_transformers(device: str) -> Callable[[int], Target]:
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model, _ = llama(**shape, num_attention_heads=4, num_key_value_heads=2)
    model = model.double().to(device)
    return lambda rows: TransformersTarget(model)


TARGETS: dict[str, tuple[Make, int]] = {  # with the waits in a round
    "whole": (whole, 1),
    "8-bit cache": (eight_bit_cache, 1),
    "8-bit weights": (quantised(8), 1),
    "4-bit weights": (quantised(4), 1),
    "offloaded": (offloaded, 1),
    "offloaded 8-bit weights": (offloaded_8_bit, 1),
    "windows": (windowed, 1),
    "guided": (guided, 1),
    "picture": (picture, 1),
    "voice": (voice, 1),
    "transformers": (of_transformers, 4),
}
OTHER_NUMBERS = (
    "8-bit cache",
    "8-bit weights",
    "4-bit weights",
    "offloaded 8-bit weights",
)  # rounded otherwise on a CPU
PAIRS = [
    ("prompt-lookup", "exact", "greedy"),
    ("jacobi", "gumbel-match", "top-p"),
    ("top-k-tree", "gumbel-match", "top-p"),
]


def run(
    target: Target, drafter: str | None, rule: str, sampling: str, rows: int, device: str, gpu: Any = None
) -> Outcome:
    drafts = None if drafter is None else drafter_on(device, DRAFTERS[drafter])
    prompts, options = PROMPTS[:rows], SAMPLINGS[sampling]
    if isinstance(target, VoiceDecoder):
        prompts = [[CONFIG.vocabulary - 1]] * rows  # its end token alone
    steps = decode(target, drafts, make_rule(rule), prompts, sampling=options, max_new_tokens=24, seed=[1, 2, 3][:rows])
    return outcome(steps, gpu)


def tokens(found: Outcome) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for row, emitted, _ in found.steps:
        rows.setdefault(row, []).extend(emitted)
    return [rows[row] for row in sorted(rows)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TARGETS)
def test_drafting_changes_no_token(name: str, device: Device) -> None:
    make, waits = TARGETS[name]
    on_cpu = None if name in OTHER_NUMBERS else make("cpu")
    for number, (drafter, rule, sampling) in enumerate(PAIRS):
        rows = 1 + 2 * (number % 2)
        expected = None if on_cpu is None else tokens(run(on_cpu(rows), None, rule, sampling, rows, "cpu"))
        with device() as gpu:
            target = make("cuda")
            plain = tokens(run(target(rows), None, rule, sampling, rows, "cuda"))
            found = run(target(rows), drafter, rule, sampling, rows, "cuda", gpu)
        assert tokens(found) == plain
        assert expected is None or plain == expected
        assert found.steady <= waits, (found.waits, found.captures, found.places)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["prompt-lookup", "draft-model", "eagle3"])
def test_every_growth_of_the_cache(name: str, device: Device) -> None:
    """Behind 900 tokens a store of 1,024 columns grows, and reading in steps of 256 columns too."""
    prompts = [[1 + (7 * place + place**2) % 60 for place in range(length)] for length in (900, 1020)]

    def generate(place: str, gpu: Any = None) -> Outcome:
        drafter = drafter_on(place, DRAFTERS[name])
        options: dict[str, Any] = {"sampling": SAMPLINGS["greedy"], "max_new_tokens": 130}
        return outcome(decode(Decoder(network(place)), drafter, make_rule(), prompts, **options), gpu)

    expected = tokens(generate("cpu"))
    with device() as gpu:
        found = generate("cuda", gpu)
    assert tokens(found) == expected
    assert found.steady <= 1, found.places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["prompt-lookup", "dynamic-tree", "eagle3"])
def test_a_vocabulary_of_128_thousand(name: str, device: Device) -> None:
    config = replace(CONFIG, vocabulary=128_256, layers=2)

    def generate(place: str, gpu: Any = None) -> Outcome:
        target = Decoder(network(place, config=config, dtype=torch.float32))
        method = DRAFTERS[name]
        made = drafter_of(method, lambda: Decoder(network(place, 0.3, config, torch.float32)), target)
        options: dict[str, Any] = {"sampling": SAMPLINGS["greedy"], "max_new_tokens": 12}
        return outcome(decode(target, made, make_rule(), PROMPTS[:1], **options), gpu)

    expected = tokens(generate("cpu"))
    with device() as gpu:
        found = generate("cuda", gpu)
    assert tokens(found) == expected
    assert found.steady <= 1, found.places


def drafter_of(method: Method, model: Callable[[], Target], target: Target) -> Drafter:
    """For a target of another size than the drafters of `drafter_on`."""
    return trial_drafter(method, method.test_options[0], lambda: target if method.draft_head else model())


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_device(device: Device) -> None:
    expected = tokens(run(Decoder(network("cpu")), "eagle3", "exact", "greedy", 3, "cpu"))
    with device(2) as gpu:
        found = run(Decoder(network("cuda:1")), "eagle3", "exact", "greedy", 3, "cuda:1", gpu)
    assert tokens(found) == expected
    assert found.steady <= 1, found.places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [None, "suffix", "eagle3", "layer-skip", "predrafted"])
def test_two_threads_share_a_model(name: str | None, device: Device) -> None:
    """Their targets share weights, captured passes and buffers."""
    expected = [tokens(run(Decoder(network("cpu")), name, "exact", "greedy", rows, "cpu")) for rows in (1, 3)]
    found: dict[int, list[list[int]]] = {}
    errors: list[BaseException] = []
    with device():
        shared: Network = network("cuda")

        def generate(number: int, rows: int) -> None:
            try:
                found[number] = tokens(run(Decoder(shared), name, "exact", "greedy", rows, "cuda"))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=generate, args=given) for given in ((0, 1), (1, 3), (2, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert [found[0], found[1], found[2]] == [*expected, expected[0]]


@pytest.mark.parametrize("device", DEVICES)
def test_attention_runs_without_cudnn(device: Device) -> None:
    """It makes a plan for every shape, which takes tens of milliseconds on Hopper."""
    attend, allowed = F.scaled_dot_product_attention, list[bool]()

    def seen(*given: Any, **options: Any) -> Any:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*given, **options)

    with device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", seen)
        run(Decoder(network("cuda")), "eagle3", "exact", "greedy", 1, "cuda")
    assert allowed and not any(allowed)


@pytest.mark.gpu
def test_a_context_of_32_thousand() -> None:
    prompt = [1 + (7 * place + place**2) % 60 for place in range(32_000)]
    config = replace(CONFIG, layers=2, context=40_000)

    def generate(place: str) -> list[list[int]]:
        target = Decoder(network(place, config=config))
        return tokens(
            outcome(
                decode(
                    target,
                    drafter_of(DRAFTERS["eagle3"], lambda: target, target),
                    make_rule(),
                    [prompt],
                    sampling=SAMPLINGS["greedy"],
                    max_new_tokens=60,
                )
            )
        )

    assert generate("cuda") == generate("cpu")


@pytest.mark.gpu
def test_bfloat16_is_as_close_to_float32_as_transformers() -> None:
    shape = {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
    model, config = llama(**shape, num_attention_heads=8, num_key_value_heads=2)
    prompt = [1 + 37 * place % 31_000 for place in range(300)]
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        exact = model(torch.tensor([prompt])).logits[0, -1]
        theirs = model.bfloat16().cuda()(torch.tensor([prompt]).cuda()).logits[0, -1].float().cpu()
    target = checkpoints.load(config.to_dict(), tensors, dtype=torch.bfloat16, device="cuda")
    target.begin([prompt], SAMPLINGS["greedy"])
    ours = target.score(Draft.empty(1, torch.device("cuda"))).logits()[0, 0].float().cpu()
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()
