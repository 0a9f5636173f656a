"""Image and speech models of the trained sizes with random weights, for measuring the speed of passes, which does not
depend on the values of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.methods import make_drafter
from outrider.core.methods.lookup import TOKEN_RECYCLING
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.protocol import Target
from outrider.core.rules.exact import GumbelMatch

DRAFTERS = (JACOBI.name, TOKEN_RECYCLING.name)
_GUIDANCE = 3.0
_COUNTED = 16  # tokens of the short part of a run
Run = Callable[[str | None, bool], tuple[list[list[int]], int]]


def picture(dtype: str, device: str, count: int, tokens: int) -> tuple[Any, Run]:
    """A network and a function that decodes `count` images with it, under guidance (two streams for each)."""
    from outrider.core.engine.adapters.guidance import Guided
    from outrider.image.layout_planner import decoder
    from outrider.image.token_model import TokenModel

    torch.manual_seed(0)
    model = TokenModel(codes=1000, styles=("any",), words=("heart", "red"))
    network = model.network(getattr(torch, dtype), device)
    encoder = model.prompt_encoder
    prompt_ids = encoder.encode_checked("red heart", "any")
    prompt = [0] * 17  # a row of background codes and one more, so that lookup drafters have something to copy
    return network, _run(
        lambda: Guided(decoder(network), [prompt_ids], encoder.unconditional, _GUIDANCE), prompt, count, tokens
    )


def utterance(dtype: str, device: str, count: int, tokens: int) -> tuple[Any, Run]:
    """A network and a function that decodes `count` utterances with it."""
    from outrider.speech.voice import Voice, VoiceDecoder

    torch.manual_seed(0)
    voice = Voice(codes=1000).to(device).eval().requires_grad_(False)
    network = voice.network(getattr(torch, dtype), device)
    script = voice.script([[1 + number % 30 for number in range(40)]])
    return network, _run(lambda: VoiceDecoder(network, script), [voice.end], count, tokens)


PARTS: Mapping[str, Callable[[str, str, int, int], tuple[Any, Run]]] = {"image": picture, "speech": utterance}


def _run(target: Callable[[], Target], prompt: list[int], count: int, tokens: int) -> Run:
    """A function that decodes with a drafter at temperature 1; its output does not depend on the drafter, because the
    rule is gumbel-match. It returns the outputs and the number of target passes."""

    def run(drafter: str | None, short: bool) -> tuple[list[list[int]], int]:
        outputs, passes = [], 0
        for seed in range(1 if short else count):
            drafts = None if drafter is None else make_drafter(drafter)
            steps = decode(
                target(),
                drafts,
                GumbelMatch(),
                [prompt],
                sampling=Sampling(),
                max_new_tokens=_COUNTED if short else tokens,
                seed=seed,
            )
            finished = list(steps)
            outputs.append([token for step in finished for token in step.emitted])
            passes += len(finished)
        return outputs, passes

    return run
