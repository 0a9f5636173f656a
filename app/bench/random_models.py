"""The models of pictures and speech in the sizes that are learned, with weights as they begin, for measuring passes:
how long one takes does not depend on what weights say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.methods import make_drafter, make_rule
from outrider.core.protocol import Target

DRAFTERS = ("jacobi", "token-recycling")
_GUIDANCE = 3.0
Run = Callable[[str | None], tuple[list[list[int]], int]]


def picture(dtype: str, device: str, count: int, tokens: int) -> tuple[Any, Run]:
    """So many pictures, two streams each: the network, and how it is run."""
    from outrider.core.engine.adapters.guidance import Guided
    from outrider.image.layout_planner import decoder
    from outrider.image.token_model import TokenModel

    torch.manual_seed(0)
    model = TokenModel(codes=1000, styles=("any",), words=("heart", "red"))
    network = model.network(getattr(torch, dtype), device)
    encoder = model.prompt_encoder
    prompt_ids = encoder.encode_checked("red heart", "any")
    prompt = [0] * 17  # a row of white patches and one more, which drafters may copy from
    return network, _run(
        lambda: Guided(decoder(network), [prompt_ids], encoder.unconditional, _GUIDANCE), prompt, count, tokens
    )


def utterance(dtype: str, device: str, count: int, tokens: int) -> tuple[Any, Run]:
    """So many utterances."""
    from outrider.speech.voice import Speaker, Voice

    torch.manual_seed(0)
    voice = Voice(codes=1000).to(device).eval().requires_grad_(False)
    network = voice.network(getattr(torch, dtype), device)
    script = voice.script([[1 + number % 30 for number in range(40)]])
    return network, _run(lambda: Speaker(network, script), [voice.end], count, tokens)


PARTS: Mapping[str, Callable[[str, str, int, int], tuple[Any, Run]]] = {"image": picture, "speech": utterance}


def _run(target: Callable[[], Target], prompt: list[int], count: int, tokens: int) -> Run:
    """Drawn at temperature 1, and yet the same whoever drafts."""

    def run(drafter: str | None) -> tuple[list[list[int]], int]:
        outputs, calls = [], 0
        for seed in range(count):
            drafts = None if drafter is None else make_drafter(drafter)
            how = decode(
                target(),
                drafts,
                make_rule("gumbel-match"),
                [prompt],
                sampling=Sampling(),
                max_new_tokens=tokens,
                seed=seed,
            )
            steps = list(how)
            outputs.append([token for step in steps for token in step.emitted])
            calls += len(steps)
        return outputs, calls

    return run
