"""Training recipes for text, by drafter name: how to build a draft head, its loss, and where its weights are stored.

Bundled weights are in the folder `weights` as TARGET.DRAFTER.safetensors, trained weights in the cache folder. A
drafter without an explicit `model` uses them. Independent of how training runs.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.drafters.trained.acceptance_head import AcceptanceChance
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.drafters.trained.import_checkpoints import read_foreign
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.adapters.recurrent import RecurrentTarget
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, OutriderError, unknown
from outrider.core.methods import DRAFTERS
from outrider.core.methods.draft_model import DRAFT_MODEL, SPECDEC_PLUS_PLUS
from outrider.core.methods.row import Method
from outrider.core.methods.trained import (
    AMPHISTA,
    BLOCKWISE,
    CTC,
    DFLASH,
    DFLASH2,
    DFLY,
    DOMINO,
    DSPARK,
    EAGLE,
    EAGLE3,
    FALCON,
    HYDRA,
    KANGAROO,
    LAYER_SKIP,
    LLASA_PLUS,
    MEDUSA,
    MTP,
    P_EAGLE,
    PASS,
    SPECDEC,
)
from outrider.core.paths import cache_folder
from outrider.core.protocol import Target
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import NoWeights


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one drafter's head is built, as kind(target, vocabulary=..., **options), and trained."""

    method: Method  # the drafter's row
    head: Callable[..., DraftHead] | None = None  # what is trained, if the row does not say so
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "kl"
    rate: float = 1e-3
    reduced: bool = True  # whether it predicts over a reduced vocabulary
    size: str = "lora"  # the option that sets the number of parameters
    watches: str | None = None  # recipe of the draft head whose acceptance it predicts, trained before it or with it

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def kind(self) -> Callable[..., DraftHead]:
        kind = self.head or self.method.draft_head
        assert kind is not None
        return kind

    @property
    def known(self) -> set[str]:
        """The options of the head, with those of the classes that it extends."""
        kind: Any = self.kind
        parts = [inspect.signature(part.__init__).parameters.values() for part in kind.__mro__]
        return {part.name for part in chain(*parts) if part.kind is part.KEYWORD_ONLY} - {"vocabulary"}

    def make(self, target: Decoder, vocabulary: Tensor | None, **options: Any) -> DraftHead:
        for name in options:
            if name not in self.known:
                raise unknown(f"option of {self.name}", name, self.known)
        arguments = dict(self.options) | options
        if self.reduced and vocabulary is not None:
            arguments["vocabulary"] = vocabulary
        return self.kind(target, **arguments)


def _table(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES = _table(
    Recipe(
        method=DRAFT_MODEL,
        head=SmallModel,
        summary="four of the target's layers with low-rank corrections, and a reduced output layer",
        options={"layers": 4, "rank": 80},
        rate=2e-3,
    ),
    Recipe(
        method=BLOCKWISE,
        summary="four residual heads on the last hidden state; a chain",
        options={"heads": 4, "hidden": 96},
    ),
    Recipe(
        method=MEDUSA,
        summary="four independent heads on the last hidden state",
        options={"heads": 4},
        size="heads",
    ),
    Recipe(
        method=HYDRA,
        summary="four heads, each of which reads the tokens drafted before it",
        options={"heads": 4, "layers": 0, "hidden": 160, "prefix": False},
        size="hidden",
    ),
    Recipe(
        method=AMPHISTA,
        summary="four heads that attend to one another, after two layers that adapt the last hidden state",
        options={"heads": 4, "hidden": 64, "rank": 96, "mixing": 3, "lora": 32},
    ),
    Recipe(
        method=CTC,
        summary="eight frames for the next five tokens; a prefix beam search removes blanks and repeats",
        options={"frames": 8, "length": 5, "hidden": 64, "rank": 96, "mixing": 3, "lora": 32},
    ),
    Recipe(
        method=EAGLE,
        summary="one layer that predicts the target's next hidden states; eagle2 uses it too",
        options={"rounds": 3, "form": {"heads": 6, "intermediate_size": 128}},
    ),
    Recipe(
        method=EAGLE3,
        summary="one layer on the hidden states of three depths, unrolled over its own states",
        options={"rounds": 6},
        rate=2e-3,
    ),
    Recipe(
        method=MTP,
        summary="one module on the last hidden state and the next token, applied repeatedly",
        options={"modules": 1, "rounds": 4, "lora": 64},
    ),
    Recipe(
        method=LLASA_PLUS,
        summary="two layers, one after the other, on the last hidden states of all tokens",
        options={"modules": 2, "hidden": 256},
        size="hidden",
    ),
    Recipe(
        method=DFLASH,
        summary="one layer on the hidden states of three depths that fills in seven positions at once",
        options={"block": 7, "layers": 1, "lora": 48},
        rate=2e-3,
    ),
    Recipe(
        method=P_EAGLE,
        summary="the same layer and states, which guess seven positions in one pass",
        options={"depth": 7, "lora": 48},
        rate=2e-3,
    ),
    Recipe(
        method=DFLASH2,
        summary="dflash with a convolution within its block and a selector of paths through its candidates",
        options={"block": 7, "layers": 1, "rank": 64, "lora": 16},
        rate=2e-3,
    ),
    Recipe(
        method=DFLY,
        summary="dflash with own target states for each of two layers, corrected left to right by a small MLP",
        options={"block": 7, "layers": 2, "correction": 64, "lora": 13},
        rate=2e-3,
    ),
    Recipe(
        method=DOMINO,
        summary="dflash, corrected left to right by a recurrent network over the drafted tokens",
        options={"block": 7, "layers": 1, "recurrent": 64, "rank": 64, "lora": 24},
        rate=2e-3,
    ),
    Recipe(
        method=DSPARK,
        summary="the same, with a left-to-right correction by the previous token",
        options={"block": 7, "layers": 1, "rank": 128, "lora": 64},
        rate=2e-3,
    ),
    Recipe(
        method=SPECDEC,
        summary="an independent drafter: two layers read the tokens, one fills in the next five positions",
        options={"block": 5, "layers": 1, "encoder": 2, "lora": 32},
        rate=2e-3,
    ),
    Recipe(
        method=FALCON,
        summary="an LSTM and a layer that predict two of the target's next hidden states per pass",
        options={"block": 2, "hidden": 192, "lora": 48},
        rate=2e-3,
    ),
    Recipe(
        method=PASS,
        summary="four embeddings that the target reads after the text, predicting one more token after each",
        options={"embeddings": 4, "anchors": 12},
        rate=1e-2,
    ),
    Recipe(
        method=LAYER_SKIP,
        summary="an early exit after a third of the target's layers",
        options={"hidden": 192},
    ),
    Recipe(
        method=KANGAROO,
        summary="an adapter with one attention layer after a sixth of the target's layers",
    ),
    Recipe(
        method=SPECDEC_PLUS_PLUS,
        head=AcceptanceChance,
        summary="predicts the acceptance of the draft model's next token, to stop drafting in time",
        reduced=False,
        watches=DRAFT_MODEL.name,
    ),
)

KINDS: dict[str, Callable[..., DraftHead]] = {
    kind.__name__: kind for kind in (recipe.kind for recipe in RECIPES.values())
}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def home(target: str) -> Path:
    """Return the folder of a target's training data and runs."""
    return cache_folder() / "training" / target.replace("/", "--")


def find(target: str, drafter: str) -> Path | None:
    """Return the weights of a drafter for a target: the bundled ones, else the trained ones with the best validation of
    all runs. Drafters that use the same draft head share weights."""
    folder, name = Path(str(resources.files("outrider.text"))) / "weights", target.replace("/", "--")
    kind = DRAFTERS[drafter].draft_head if drafter in DRAFTERS else None
    sharing = [recipe.name for recipe in RECIPES.values() if recipe.name != drafter and recipe.kind is kind]
    for candidate in (drafter, *sharing):
        shipped = folder / f"{name}.{candidate}.safetensors"
        if shipped.is_file() and shipped.with_suffix(".json").is_file():
            return shipped
        trained = [(worth(path), path) for path in sorted(home(target).glob(f"*/{candidate}.safetensors"))]
        validated = [(value, path) for value, path in trained if value is not None]
        if validated:
            return max(validated, key=lambda recipe: recipe[0])[1]
    return None


def trained_tree(target: str) -> Path | None:
    """Return the weights trained for a target on this machine, of drafters that draft trees, with the best validation:
    their guesses can be merged with those of others."""
    trees = [name for name in RECIPES if name in DRAFTERS and DRAFTERS[name].drafts_trees]
    files = [path for name in trees for path in sorted(home(target).glob(f"*/{name}.safetensors"))]
    validated = [(value, path) for path in files if (value := worth(path)) is not None]
    return max(validated, key=lambda each: each[0])[1] if validated else None


def recipe_for(method: Method) -> str:
    """Return the recipe that trains the head of a drafter: its own, or that of another drafter with the same head."""
    alike = [recipe.name for recipe in RECIPES.values() if recipe.kind is method.draft_head]
    return method.name if method.name in RECIPES or not alike else alike[0]


def draft_model_for(target: str, drafter: str) -> str:
    """Return the recipe whose weights a drafter uses by default."""
    return DRAFT_MODEL.name if drafter in RECIPES or find(target, DRAFT_MODEL.name) else drafter


def worth(path: Path) -> float | None:
    """Return the tokens per target pass of a file's validation, or None if its metadata is unreadable."""
    from outrider.core.training.checkpoint import about

    with suppress(OutriderError, OSError):
        provenance = about(path).get("provenance")
        validation = provenance.get("validation") if isinstance(provenance, dict) else None
        value = validation.get("tokens_per_pass") if isinstance(validation, dict) else None
        return float(value) if isinstance(value, int | float) else 0.0
    return None


def load(path: Path, drafter: str | None, target: Target) -> DraftHead:
    """Load a trained draft head for a target, from a file of ours or a published folder. Without a drafter it may be of
    any kind."""
    from outrider.core.training.checkpoint import load as load_trained

    published = path.is_dir()
    if not published and not path.is_file():
        raise InvalidOption(
            f"there is no file {path}; give a file of trained weights, or the folder or hub id (owner/name) of a "
            "published draft head"
        )
    if not isinstance(target, Decoder) and not (published and isinstance(target, TransformersTarget | RecurrentTarget)):
        raise Incompatible(
            f"draft heads need a target on our own decoder, and this one runs on {type(target).__name__}; a causal "
            "language model of transformers takes published heads, in a folder or by hub id"
        )
    head = read_foreign(path, target) if published else load_trained(path, KINDS, target)
    kind = RECIPES[drafter].kind if drafter in RECIPES else DRAFTERS[drafter].draft_head if drafter else DraftHead
    if not isinstance(kind, type) or not isinstance(head, kind):
        runs = ", ".join(drafters_of(head))
        raise Incompatible(
            f"{path} holds a {type(head).__name__}, which the drafter '{drafter}' can't use; choose {runs or 'another'}"
        )
    return head


def drafters_of(head: Any) -> list[str]:
    """The drafters that run a draft head."""
    kinds = type(head).__mro__
    known = [method.draft_head for method in DRAFTERS.values()]
    nearest = next((kind for kind in kinds if kind in known), None)
    return [name for name, method in DRAFTERS.items() if nearest is not None and method.draft_head is nearest]


def missing(target: str, drafter: str) -> NoWeights:
    """Return the error for missing weights."""
    trained = recipe_for(DRAFTERS[drafter]) if drafter in DRAFTERS else drafter
    if trained in RECIPES:
        return NoWeights(
            f"there are no weights of {drafter} for {target}; train them with "
            f"`outrider train {trained} --model {shlex.quote(target)}`, or name a file of them or a published head as "
            "head=... (--head)"
        )
    return NoWeights(f"the drafter '{drafter}' needs model=..., a smaller model of any tokenizer")
