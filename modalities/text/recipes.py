"""What is trained for text, by the drafter's name: how a draft head is made, what it minimises, and where its weights
are.

Weights that ship stand in the folder `weights` as TARGET.DRAFTER.safetensors; those that were trained here, in the
cache folder. Whoever asks for such a drafter and gives no `model` gets them. Knows nothing of how training runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.drafters.trained.acceptance_head import AcceptanceChance
from outrider.core.drafters.trained.block_diffusion import DFlashBlock, DSparkBlock, SpecDecBlock
from outrider.core.drafters.trained.ctc import CtcFrames
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead
from outrider.core.drafters.trained.early_exit import ExitHead, KangarooHead
from outrider.core.drafters.trained.falcon import FalconHead
from outrider.core.drafters.trained.heads import HydraHeads, MedusaHeads
from outrider.core.drafters.trained.lookahead_embeddings import LookaheadEmbeddings
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.drafters.trained.parallel_heads import AmphistaHeads, BlockwiseHeads
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, OutriderError, unknown
from outrider.core.methods import DRAFTERS
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.paths import cache_folder
from outrider.core.protocol import Target
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.recipes import NoWeights


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one drafter's draft head is made and trained. `kind` is made as kind(target, vocabulary=..., **options)."""

    name: str  # the drafter's
    kind: Callable[..., DraftHead]
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "kl"
    rate: float = 1e-3
    reduced: bool = True  # does it guess over a reduced vocabulary?
    watches: str | None = None  # the recipe whose draft head it learns about, trained before it or beside it

    def make(self, target: Decoder, vocabulary: Tensor | None, **options: Any) -> DraftHead:
        given = dict(self.options) | options
        if self.reduced and vocabulary is not None:
            given["vocabulary"] = vocabulary
        return self.kind(target, **given)


def _table(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES = _table(
    Recipe(
        name="draft-model",
        kind=SmallModel,
        summary="four of the target's own layers with learned low-rank corrections, and its commonest output rows",
        options={"layers": 4, "rank": 80},
        rate=2e-3,
    ),
    Recipe(
        name="blockwise",
        kind=BlockwiseHeads,
        summary="four residual heads on the last state; a chain",
        options={"heads": 4, "hidden": 256},
    ),
    Recipe(
        name="medusa",
        kind=MedusaHeads,
        summary="four heads on the last state, none of which knows of the others",
        options={"heads": 4},
    ),
    Recipe(
        name="hydra",
        kind=HydraHeads,
        summary="four heads, each of which sees the tokens drafted before it",
        options={"heads": 4, "layers": 0, "hidden": 160, "prefix": False},
    ),
    Recipe(
        name="amphista",
        kind=AmphistaHeads,
        summary="four heads that look at one another, behind two layers that adapt the last state",
        options={"heads": 4, "hidden": 512, "lora": 128},
    ),
    Recipe(
        name="ctc",
        kind=CtcFrames,
        summary="eight frames for the next five tokens, with blanks and repeats that fall away",
        options={"frames": 8, "length": 5, "hidden": 512, "lora": 128},
    ),
    Recipe(
        name="eagle",
        kind=EagleHead,
        summary="one layer that foresees the target's next states; eagle2 drafts with it too",
        options={"rounds": 2},
    ),
    Recipe(
        name="eagle3",
        kind=Eagle3Head,
        summary="one layer on states of three depths, unrolled over its own states",
        options={"rounds": 4, "lora": 128},
        rate=2e-3,
    ),
    Recipe(
        name="mtp",
        kind=MtpModules,
        summary="one module on the last state and the next token, used again behind itself",
        options={"modules": 1, "rounds": 4},
    ),
    Recipe(
        name="dflash",
        kind=DFlashBlock,
        summary="seven places filled in at once by a layer that reads states of three depths",
        options={"block": 7, "layers": 1, "lora": 128},
        rate=2e-3,
    ),
    Recipe(
        name="dspark",
        kind=DSparkBlock,
        summary="the same, corrected from left to right by the token before",
        options={"block": 7, "layers": 1, "rank": 128, "lora": 64},
        rate=2e-3,
    ),
    Recipe(
        name="specdec",
        kind=SpecDecBlock,
        summary="a drafter of its own: two layers read the tokens, one fills in the next five places",
        options={"block": 5, "layers": 1, "encoder": 2, "lora": 128},
        rate=2e-3,
    ),
    Recipe(
        name="falcon",
        kind=FalconHead,
        summary="one layer that foresees two of the target's next states a pass, and goes on behind them",
        options={"block": 2, "lora": 128},
        rate=2e-3,
    ),
    Recipe(
        name="pass",
        kind=LookaheadEmbeddings,
        summary="four inputs that the target reads ahead of what is known, and says the next tokens behind",
        options={"embeddings": 4},
        rate=1e-2,
    ),
    Recipe(
        name="layer-skip",
        kind=ExitHead,
        summary="a way out behind a third of the target's layers",
        options={"hidden": 512},
    ),
    Recipe(
        name="kangaroo",
        kind=KangarooHead,
        summary="an adapter of one attention behind a sixth of the target's layers",
    ),
    Recipe(
        name="specdec-plus-plus",
        kind=AcceptanceChance,
        summary="how likely the draft model's next token is to be accepted: where it stops",
        reduced=False,
        watches="draft-model",
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
    """The folder of a target's training: its answers, and a folder for each run."""
    return cache_folder() / "training" / target.replace("/", "--")


def find(target: str, drafter: str) -> Path | None:
    """The weights of a drafter for a target: those that ship with us, else the best that were trained here, by what
    their own validation says, whichever run they come from. Drafters that grow another tree with the same draft head
    share them."""
    folder, name = Path(str(resources.files("outrider.text"))) / "weights", target.replace("/", "--")
    kind = DRAFTERS[drafter].draft_head if drafter in DRAFTERS else None
    alike = [one.name for one in RECIPES.values() if one.name != drafter and one.kind is kind]
    for wanted in (drafter, *alike):
        shipped = folder / f"{name}.{wanted}.safetensors"
        if shipped.is_file() and shipped.with_suffix(".json").is_file():
            return shipped
        trained = [(worth(path), path) for path in sorted(home(target).glob(f"*/{wanted}.safetensors"))]
        known = [(value, path) for value, path in trained if value is not None]
        if known:
            return max(known, key=lambda one: one[0])[1]
    return None


def draft_model_for(target: str, drafter: str) -> str:
    """The recipe whose model a drafter takes if none is given: a trained draft model suits any."""
    return DRAFT_MODEL.name if drafter in RECIPES or find(target, DRAFT_MODEL.name) else drafter


def worth(path: Path) -> float | None:
    """The tokens a target call that a file's validation came to; None if nothing usable is said about it."""
    from outrider.core.training.checkpoint import about

    with suppress(OutriderError, OSError):
        provenance = about(path).get("provenance")
        validation = provenance.get("validation") if isinstance(provenance, dict) else None
        value = validation.get("tokens_per_pass") if isinstance(validation, dict) else None
        return float(value) if isinstance(value, int | float) else 0.0
    return None


def load(path: Path, drafter: str, target: Target) -> DraftHead:
    """Trained weights for a target."""
    from outrider.core.training.checkpoint import load as load_trained

    if not isinstance(target, Decoder):
        raise Incompatible(
            f"weights for {drafter} are made for targets that run on our own decoder, and this one runs on "
            f"{type(target).__name__}"
        )
    if not path.is_file():
        raise InvalidOption(f"there is no file {path}; give a file of trained weights")
    return load_trained(path, KINDS, target)


def missing(target: str, drafter: str) -> NoWeights:
    """What to say where there are no weights."""
    if drafter in RECIPES:
        return NoWeights(
            f"there are no weights of {drafter} for {target}; train them with "
            f"`outrider train {drafter} --model {target}`, or name a file of them"
        )
    return NoWeights(f"the drafter '{drafter}' needs model=..., a smaller model of any tokenizer")
