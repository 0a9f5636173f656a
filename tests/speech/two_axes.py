"""Speculation along time and along depth, measured on a small CSM that is trained for it.

A CSM reads frames with a backbone and draws the codes of the next frame, in order, with a depth decoder. Here a frame
is a code of the included voice's codec, as its digits, one for each level of the quantiser; the text is phonemes.

`python -m tests.speech.two_axes FOLDER --minutes 15` trains the model on the included speech, saves it in FOLDER, and
prints the tokens per target pass of Jacobi decoding whose drafts end with the frame ("depth"), begin with a frame
("time") or do neither ("both"). Without --minutes it measures the model that is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import outrider.core  # noqa: F401  # before torch, whose threads then give way to others

# isort: split
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from outrider.core.bench.runner import bootstrap
from outrider.core.draft import Draft
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.rng import CounterRNG
from outrider.speech import load, recipes
from outrider.speech.phonemes import COUNT
from outrider.speech.training import data
from outrider.speech.training.data import Utterance

AXES = ("depth", "time", "both")
LEVELS = recipes.codec().quantiser.levels
BOOKS, END = len(LEVELS), max(LEVELS)  # the digits of a frame, and the digit that ends
_BATCH = 12  # utterances


class AlongAxis(Jacobi):
    """Jacobi decoding of frames, with drafts along one axis or both. New guesses are the codes of the frame before."""

    def __init__(self, axis: str, window: int) -> None:
        super().__init__(window=window, renew="couple", filler="above", columns=BOOKS)
        self.axis = axis

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        place = torch.tensor(self._count) % self.columns
        if self.axis == "depth":
            room = room.minimum(self.columns - 1 - place)
        elif self.axis == "time":
            room = room.where(place == 0, 0)
        return super().propose(room, rng)


# ---- the model


def digits(codes: np.ndarray) -> Tensor:
    """Codes [T] -> [T, BOOKS]."""
    return torch.from_numpy(np.stack(np.unravel_index(codes.astype(np.int64), LEVELS[::-1])[::-1], 1))


def made(seed: int = 0, width: int = 128, layers: int = 4) -> Any:
    from transformers import CsmConfig, CsmForConditionalGeneration

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    depth = {"backbone_hidden_size": width, "hidden_size": 96, "intermediate_size": 192, "head_dim": 24, **heads}
    # the codec is never used, and as small as the class permits
    mimi = {"model_type": "mimi", "num_quantizers": BOOKS, "hidden_size": 16, "num_filters": 4, "head_dim": 8}
    mimi |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    mimi |= {"codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "codebook_size": 32, "upsample_groups": 16}
    config = CsmConfig(
        num_codebooks=BOOKS,
        vocab_size=END + 1,
        text_vocab_size=COUNT,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        head_dim=width // 4,
        max_position_embeddings=1024,
        codebook_eos_token_id=END,
        codebook_pad_token_id=END,
        pad_token_id=None,
        bos_token_id=None,
        audio_token_id=0,
        audio_eos_token_id=0,
        depth_decoder_config={
            "num_codebooks": BOOKS,
            "vocab_size": END + 1,
            "num_hidden_layers": 2,
            "max_position_embeddings": BOOKS + 1,
            **depth,
        },
        codec_config=mimi,
        **heads,
    )
    return CsmForConditionalGeneration(config)


def nats(model: Any, utterances: Sequence[Utterance]) -> Tensor:
    """The negative log-likelihood of each digit of all frames, the end frame's included, [F, BOOKS]."""
    spoken, wanted, places = [], [], []
    for row, utterance in enumerate(utterances):
        frames, text = digits(utterance.codes), torch.from_numpy(utterance.phonemes)
        spoken.append(torch.cat([model.embed_text_tokens(text), model.backbone_model.embed_tokens(frames[None])[0]]))
        wanted.append(torch.cat([frames, torch.full((1, BOOKS), END)]))
        places.append(torch.tensor([[row, len(text) - 1 + frame] for frame in range(len(frames) + 1)]))
    length = max(map(len, spoken))
    inputs = torch.stack([pad(one, (0, 0, 0, length - len(one))) for one in spoken])
    states = model.backbone_model(inputs_embeds=inputs, use_cache=False).last_hidden_state  # padding comes last
    row, column = torch.cat(places).T
    states, labels = states[row, column], torch.cat(wanted)
    before = pad(labels[:, :-1], (1, 0))
    mask = torch.ones_like(before)
    deep = model.depth_decoder(
        input_ids=before, backbone_last_hidden_state=states, attention_mask=mask, use_cache=False
    ).logits[:, 1 - BOOKS :]
    logits = torch.cat([model.lm_head(states)[:, None], deep], 1)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def trained(model: nn.Module, utterances: Sequence[Utterance], minutes: float, rate: float = 2e-3) -> float:
    """Train for some minutes; returns the nats of a held-out frame."""
    training, held_out = ([one for one in utterances if one.held_out == held] for held in (False, True))
    weights = [each for name, each in model.named_parameters() if not name.startswith("codec_model")]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    rng, begun, share, steps, order = np.random.default_rng(0), time.monotonic(), 0.0, 0, list[int]()
    while share < 1:
        order = order or rng.permutation(len(training)).tolist()
        batch = [training[order.pop()] for _ in range(min(_BATCH, len(order)))]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (steps + 1) / 50) * (1 - share) ** 0.5
        loss = nats(model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        steps += 1
        share = (time.monotonic() - begun) / (60 * minutes)
        if steps % 100 == 0:
            print(f"step {steps}, {100 * share:.0f} %: {float(loss.detach()) * BOOKS:.3f} nats a frame", flush=True)
    with torch.no_grad():
        found = torch.cat([nats(model, held_out[at : at + _BATCH]) for at in range(0, len(held_out[:60]), _BATCH)])
    return float(found.sum(1).mean())


# ---- tokens per target pass


def measured(folder: Path, utterances: Sequence[Utterance], windows: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each axis and window, at temperature 1 under the exact rule."""
    sp, rows = load(folder), []
    prompts = [torch.from_numpy(utterance.phonemes) for utterance in utterances]
    for window in windows:
        for axis in AXES:
            counts = []
            for number, (prompt, utterance) in enumerate(zip(prompts, utterances, strict=True)):
                given = {"drafter": AlongAxis(axis, window), "temperature": 1.0, "seed": number}
                result = sp.generate(prompt, max_new_tokens=len(utterance.codes), **given)
                counts.append((len(result.tokens[0]), len(result.trace.steps)))
            low, high = bootstrap([[tokens / passes] for tokens, passes in counts])
            tokens, passes = map(sum, zip(*counts, strict=True))
            rows.append({"axis": axis, "window": window, "tokens_per_pass": tokens / passes, "low": low, "high": high})
            print(f"{axis:5} window {window:2}: {tokens / passes:.2f} ({low:.2f}-{high:.2f})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--sentences", type=int, default=24, help="held out, to measure on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    utterances = data.load(*recipes.training_data())
    about: dict[str, Any] = {"sentences": options.sentences, "temperature": 1.0}
    if options.minutes:
        model = made()
        about |= {"minutes": options.minutes, "held_out_nats": trained(model, utterances, options.minutes)}
        model.eval().save_pretrained(options.folder)
    held_out = [utterance for utterance in utterances if utterance.held_out][: options.sentences]
    about["rows"] = measured(options.folder, held_out, (4, 8, 16))
    if options.json is not None:
        options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
