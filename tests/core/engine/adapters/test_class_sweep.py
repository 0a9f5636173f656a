"""Some classes of the sweep, drawn anew for each version of transformers, and those that once failed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
import class_sweep  # noqa: E402

FAILED = (
    "deepseek_v3",
    "glm4_moe_lite",
    "longcat_flash",
    "youtu",
    "axk1",
    "xmod",
    "mistral",
    "llama4_text",
    "qwen3_next",
)
DRAWN = random.Random(transformers.__version__).sample(sorted(class_sweep.names()), 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*FAILED, *(name for name in DRAWN if name not in FAILED)])
def test_a_class_gives_its_own_tokens_or_is_refused(model_type: str) -> None:
    found = class_sweep.outcome(model_type)
    assert found.kind in (("equal",) if model_type in FAILED else ("equal", "refused", "not built")), found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("moshi", "attends within a sliding window by dropping older entries"),
        ("cpmant", "keeps entries in its cache that are not of tokens"),
        ("openai-gpt", "takes no cache of keys and values"),
        ("mamba", "reads one token per pass once it has a state"),
    ],
)
def test_a_class_is_refused_with_its_reason(model_type: str, reason: str) -> None:
    found = class_sweep.outcome(model_type)
    assert found.kind == "refused" and reason in found.why, found


def test_the_page_lists_every_class() -> None:
    page = class_sweep.PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " not in page:
        pytest.skip("the page is of another version of transformers")
    assert [name for name in class_sweep.names() if f"`{name}`" not in page] == []
    assert " 0 with other tokens" in page
