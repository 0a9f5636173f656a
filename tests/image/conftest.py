"""A tiny text-to-image model with random weights: 36 codes and five words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from outrider.image.model import ImageModel
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Layout, Tokenizer

STYLES, WORDS = ("noto", "fluent"), ("cat", "face", "heart", "house", "red")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(seed: int = 0, layers: int = 2) -> TokenModel:
    torch.manual_seed(seed)
    size = {"width": 16, "layers": layers, "heads": 2, "hidden": 24, "plan": 8, "levels": (4, 3, 3)}
    model = TokenModel(codes=36, styles=STYLES, words=WORDS, **size)  # type: ignore[arg-type]
    with torch.no_grad():
        model.head.mul_(40)  # distributions that are neither flat nor certain
        assert model.teller is not None
        model.teller.out.weight.normal_(std=0.2)  # training would move these from zero
        model.teller.place.normal_(std=0.1)
    return model.eval()


@pytest.fixture(scope="session")
def token_model() -> Callable[..., TokenModel]:
    return made


@pytest.fixture(scope="session")
def tokens() -> TokenModel:
    return made()


@pytest.fixture(scope="session")
def codec() -> Tokenizer:
    torch.manual_seed(0)
    return Tokenizer(Layout(levels=(4, 3, 3), channels=(8, 16, 16))).eval()


@pytest.fixture(scope="session")
def im(tokens: TokenModel, codec: Tokenizer) -> ImageModel:
    return ImageModel(
        tokens.network(), tokens.prompt_encoder, codec, name="tiny", draft=lambda: made(1, layers=1).network()
    )
