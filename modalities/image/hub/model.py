"""Published image models by name: the object that `outrider.image.load` returns for a hub id or a folder.

Each model class has its own module; this one holds what they share: options, drafters and rules by name, and the
stream. `FAMILY` lists the classes; modalities/PUBLISHED.md reports the tests of each. Independent of how a class
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack, overload

import torch
from torch import Tensor

from outrider.core.assets.hub_models import DTYPES, Family, HubClass
from outrider.core.device import AUTO, usable_device, usual_dtype
from outrider.core.engine.network import Network
from outrider.core.errors import InvalidOption
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Resolved
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.validation import as_list, dtype_name, shows_options
from outrider.image import recipes
from outrider.image.grid import Grid, neighbours
from outrider.image.options import Given, Options
from outrider.image.resolve_drafter import listed_drafters, listed_rules, resolve_drafter, resolve_rule
from outrider.image.stream import Result, Stream

if TYPE_CHECKING:
    from PIL.Image import Image

_NEIGHBOURS = 200  # of each code, the maximum that rules may use


class Published(Protocol):
    """A model of one class: encodes prompts, decodes codes to images. Ids of image tokens come first, then those of
    prompts."""

    raster: Grid
    vocabulary: int  # number of image tokens, end-of-row markers included
    guidance: float  # default strength; 1: the model has no guidance

    @property
    def network(self) -> Network:
        """What draft heads share: the embedding and the output rows of image tokens, and the last layer where it is
        ours."""

    @property
    def white(self) -> int: ...  # the code of a white patch
    def read(self, prompt: str) -> list[int]: ...
    def unconditional(self, prompt: Sequence[int]) -> list[int]:
        """The ids that guidance compares a prompt with."""

    def target(
        self, prompts: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Target:
        """The guided target; `unconditional`: ids of a negative prompt for all prompts."""

    def to_images(self, grids: Tensor) -> list[Image]: ...
    @property
    def code_vectors(self) -> Tensor:
        """The codebook [vocabulary, D] in which neighbour rules measure distances."""


class PublishedModel:
    """A published model with its drafters and rules. `small` loads a smaller model of its family when a drafter first
    needs one; `folder` holds draft heads trained for it, in place of those in the cache."""

    def __init__(
        self,
        published: Published,
        *,
        name: str,
        dtype: str = "float32",
        small: Callable[[], Published] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.published, self.name, self.dtype = published, name, dtype
        self.raster = published.raster
        self._small, self._folder = small, folder
        self._drafts: Published | None = None
        self._heads: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<outrider.image model {self.name}, {self.dtype}, {self.raster.rows}x{self.raster.columns} codes>"

    styles: tuple[str, ...] = ()

    @property
    def drafters(self) -> Listing:
        """Names to give as `drafter`, with what each does, needs and lacks here."""
        return listed_drafters(draft=self._small is not None, folder=self._folder, published=self.name)

    @property
    def rules(self) -> Listing:
        """Names to give as `rule`, with what each does."""
        return listed_rules()

    @overload  # a string is a sequence of strings too: the first that fits counts
    def generate(self, prompt: str, **options: Unpack[Given]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Sequence[str], **options: Unpack[Given]) -> list[Result]: ...
    @overload
    def generate(
        self, prompt: str | Sequence[str], *, num_images_per_prompt: int, **options: Unpack[Given]
    ) -> list[Result]: ...
    @shows_options(Options)
    def generate(
        self, prompt: str | Sequence[str], *, num_images_per_prompt: int | None = None, **options: Unpack[Given]
    ) -> Result | list[Result]:
        """Generate images: a Result, or a list of them for a batch or for `num_images_per_prompt` images of each
        prompt, of which image i is that of `seed + i`."""
        stream = self.stream(prompt, num_images_per_prompt=num_images_per_prompt, **options)
        for _ in stream:
            pass
        return stream.results[0] if isinstance(prompt, str) and num_images_per_prompt is None else stream.results

    @shows_options(Options)
    def stream(
        self, prompt: str | Sequence[str], *, num_images_per_prompt: int | None = None, **options: Unpack[Given]
    ) -> Stream:
        """Like `generate`, as an iterator over steps."""
        defaults: Given = {"guidance_scale": self.guidance}
        if self.guidance == 1 and (options.get("guidance_scale", 1) != 1 or options.get("negative_prompt") is not None):
            raise InvalidOption(f"{self.name} has no guidance; leave out guidance_scale and negative_prompt")
        wanted = Options.of({**defaults, **options})
        prompts = as_list(prompt, "prompt")
        conditions, negative = [self.read(text, wanted.style) for text in prompts], wanted.negative_prompt
        unconditional = None if negative is None else self.read(negative)
        return Stream(self, wanted, prompts, conditions, unconditional, num_images_per_prompt)

    # ---- what a generation is made of

    @property
    def guidance(self) -> float:
        """The default guidance."""
        return self.published.guidance

    def read(self, prompt: str, style: str | None = None) -> list[int]:
        """A prompt's ids."""
        if style is not None:
            raise InvalidOption(f"{self.name} has no styles; describe the style in the prompt")
        return self.published.read(prompt)

    @cached_property
    def white(self) -> int:
        return self.published.white

    @property
    def root(self) -> int:
        return self.white

    def target(
        self, prompt_ids: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Target:
        """A guided target for prompts, with its own cache."""
        return self.published.target(prompt_ids, guidance, unconditional)

    def draft_model(
        self, prompt_ids: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Target:
        """The smaller model of the family, under the same guidance."""
        if self._drafts is None:
            if self._small is None:
                raise InvalidOption(
                    f"this drafter needs a smaller model of {self.name}'s family; name it when loading: "
                    "load(..., draft_model=...)"
                )
            small = self._small()
            if small.vocabulary != self.published.vocabulary or small.raster != self.raster:
                raise InvalidOption(
                    f"the smaller model has {small.raster.rows}x{small.raster.columns} tokens from a vocabulary of "
                    f"{small.vocabulary:,}, {self.name} {self.raster.rows}x{self.raster.columns} from "
                    f"{self.published.vocabulary:,}; they don't share a tokenizer"
                )
            self._drafts = small
        return self._drafts.target(prompt_ids, guidance, unconditional)

    def drafter(
        self, options: Options, prompt_ids: Sequence[Sequence[int]], unconditional: Sequence[int] | None = None
    ) -> Resolved[Drafter | None]:
        """The drafter of these options."""
        return resolve_drafter(
            options,
            columns=self.raster.width,
            draft_model=lambda: self.draft_model(prompt_ids, options.guidance_scale, unconditional),
            draft_head=self._head,
        )

    def _head(self, drafter: str) -> Any:
        """The head of a trained drafter, laid out for this machine."""
        if drafter not in self._heads:
            head = recipes.published_head(drafter, self.published, self.name, self._folder)
            self._heads[drafter] = head.drafts(self.published)
        return self._heads[drafter]

    def rule(self, options: Options) -> Resolved[Rule]:
        """The rule of these options."""
        return resolve_rule(options, neighbours=lambda: self.neighbours, codes=lambda: self.code_vectors)

    @torch.no_grad()
    def to_images(self, grids: Tensor) -> list[Image]:
        """Codes [B, rows, columns] as images."""
        return self.published.to_images(grids)

    @cached_property
    def code_vectors(self) -> Tensor:
        """The model's codebook [V, D]."""
        return self.published.code_vectors.detach().float()

    @cached_property
    def neighbours(self) -> Tensor:
        """The nearest codes of each code [V, up to 200], nearest first."""
        return neighbours(self.code_vectors.cpu(), min(_NEIGHBOURS, self.published.vocabulary - 1))


FAMILY: Family[Published] = Family(
    package="outrider.image.hub",
    what="image models",
    classes={
        "janus": HubClass("janus", "Janus", "JanusForConditionalGeneration"),
        "emu3": HubClass("emu3", "Emu3", "Emu3ForConditionalGeneration"),
        "imagegpt": HubClass("imagegpt", "ImageGPT", "ImageGPTForCausalImageModeling"),
        "llamagen": HubClass("llamagen", opener="open_folder"),  # written by llamagen.convert
    },
    refused={
        "chameleon": "its class in transformers sets the logits of image codes to -inf and has no pixel decoder, "
        "so it reads images but cannot generate them",
        "glm_image": "its class takes positions from a table that is computed from the prompt and has none for draft "
        "tokens; its codes become pixels only through a diffusion model of 7 billion weights in another package",
    },
    parts={"vision_language_encoder": "processor"},
)


published = FAMILY.wrap  # wraps a transformers model object and its processor


def load(
    source: str | Path,
    *,
    draft_model: str | Path | None = None,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    revision: str | None = None,
    folder: Path | None = None,
    **options: Any,
) -> PublishedModel:
    """Load a published model by its hub id or folder. `draft_model` names a smaller model that shares its
    tokenizer, `folder` holds draft heads trained for it (by default those in the cache); further options are those of
    the class, such as Emu3's ratio."""
    device = usable_device(device)
    dtype = usual_dtype(device) if dtype == AUTO else dtype_name(dtype, DTYPES)
    open_ = partial(FAMILY.open, device=device, dtype=dtype, options=options)
    small = None if draft_model is None else lambda: open_(draft_model)
    return PublishedModel(open_(source, revision=revision), name=str(source), dtype=dtype, small=small, folder=folder)
