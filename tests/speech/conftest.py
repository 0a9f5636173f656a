"""Fixtures: a small voice with random weights, and a model with its codec and vocoder."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from outrider.speech.codec import Codec
from outrider.speech.model import SpeechModel
from outrider.speech.vocoder import Vocoder
from outrider.speech.voice import Voice

SHAPE = {"codes": 25, "layers": 2, "heads": 2, "hidden": 48, "reading": 16}


def _small_voice(width: int = 32, seed: int = 0) -> Voice:
    """A voice with distributions between uniform and deterministic."""
    torch.manual_seed(seed)
    voice = Voice(width=width, **SHAPE).eval().requires_grad_(False)
    voice.head.mul_(15)
    voice.head[-1] = 0.0
    voice.reader.length.bias.fill_(0.4)
    return voice


@pytest.fixture
def small_voice() -> Callable[..., Voice]:
    return _small_voice


def small_speaker() -> SpeechModel:
    torch.manual_seed(1)
    codec = Codec(width=16, levels=(5, 5), depth=2)
    vocoder = Vocoder(16).requires_grad_(False)
    draft = functools.partial(_small_voice, 16, 3)
    return SpeechModel(_small_voice(), codec, vocoder, name="small", draft=draft, dtype=torch.float64)


@pytest.fixture
def speaker() -> SpeechModel:
    return small_speaker()
