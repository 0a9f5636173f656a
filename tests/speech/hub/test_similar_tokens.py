"""Which tokens of published models are alike: neighbours within a codebook, by the model's own vectors, for large
codebooks too; Jacobi's defaults; and errors for what a model lacks."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.errors import InvalidOption
from outrider.speech.hub.model import Options, PublishedSpeech, published
from outrider.speech.hub.similar_tokens import STEP, SimilarTokens, grid_points
from outrider.speech.resolve_drafter import resolve_drafter

CLASSES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_model.py"))))


def test_neighbours_stay_in_their_book() -> None:
    """Two books of 4 codes on a line, between words."""
    line = torch.tensor([[0.0], [1.0], [3.0], [6.0]])
    ids = [3, 4, 5, 6, 8, 9, 10, 11]
    similar = SimilarTokens(13, lambda: torch.cat([line, line.flip(0)]), books=2, ids=ids)
    table = similar.neighbours
    assert table.shape == (13, 3)
    assert table[3].tolist() == [4, 5, 6] and table[5].tolist()[0] == 4
    assert table[8].tolist() == [9, 10, 11] and table[11].tolist() == [10, 9, 8]
    assert table[0].tolist() == [0, 0, 0] and table[7].tolist() == [7, 7, 7]
    apart = torch.cdist(similar.codes, similar.codes)
    assert apart[3, 4] == 1 and apart[3, 11] > 900 and apart[3, 0] > 900 and apart[1, 2] > 900
    cosines = torch.nn.functional.cosine_similarity(similar.embeddings[:, None], similar.embeddings[None], dim=-1)
    assert cosines[3, 11] == 0 and cosines[3, 0] == 0 and cosines[3, 4] > 0


def test_a_large_codebook_has_a_sparse_table() -> None:
    """The 4,096 points of a grid of six axes: the nearest differ by one step, and are called alike."""
    points = grid_points(4**6, [4] * 6)
    similar = SimilarTokens(4**6, lambda: points)
    table = similar.neighbours
    assert table.shape == (4**6, 200)
    step = (points - points[table[:, 0]]).norm(dim=1)
    assert torch.allclose(step, torch.full_like(step, STEP))


def test_jacobi_has_the_defaults_of_speech() -> None:
    drafter = resolve_drafter(Options(drafter="jacobi"), draft_model=lambda: None).made  # type: ignore[arg-type,return-value]
    assert isinstance(drafter, Jacobi) and (drafter.window, drafter.renew) == (16, "couple")


@pytest.mark.slow
def test_rules_compare_the_codes_of_a_published_model() -> None:
    sp = CLASSES.tiny("csm")[1]
    (prompt,) = CLASSES.prompts("csm", 1)
    similar = sp.published.similar
    assert similar.books == 3 and similar.neighbours.shape[0] == similar.size
    book = similar.size // 3
    assert bool((similar.neighbours // book == torch.arange(similar.size)[:, None] // book).all())
    for rule in ("lantern", "lantern-plus-plus", "grouped", "coarse-groups"):
        result = sp.generate(prompt, max_new_tokens=4, drafter="jacobi", rule=rule, temperature=1.0)
        assert result.outcome and not result.trace.lossless


@pytest.mark.slow
def test_what_a_model_lacks_is_said() -> None:
    sp = CLASSES.tiny("whisper")[1]
    with pytest.raises(InvalidOption, match="tokens are words"):
        sp.generate(CLASSES.prompts("whisper", 1)[0], rule="lantern", max_new_tokens=4)
    for name in ("csm", "musicgen", "bark"):
        alone = PublishedSpeech(published(CLASSES.tiny(name)[0]), name=name)
        with pytest.raises(InvalidOption, match="there is no processor"):
            alone.generate("a text")
