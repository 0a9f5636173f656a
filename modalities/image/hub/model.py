"""Published models of pictures by name, as people use them: what `outrider.image.load` gives for a hub id or a folder.

Every class has a file of its own that says how it is read; here is what they have in common: options, drafters and
rules by name, the stream. Which classes there are is `FAMILY`; what was proven of each stands in
modalities/PUBLISHED.md. Knows nothing of how a class computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack, overload

import torch
from torch import Tensor

from outrider.core.assets.hub_models import Family
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.validation import several
from outrider.image.grid import Grid, neighbours
from outrider.image.options import Given, Options
from outrider.image.resolve_drafter import drafter_of, drafters, rule_of, rules
from outrider.image.stream import Result, Stream

if TYPE_CHECKING:
    from PIL.Image import Image

_NEAR = 200  # neighbours of a code that rules may look at


class Published(Protocol):
    """One model of a class: how its prompts become ids, and its codes pictures. Ids of a picture's tokens come first,
    then those of its prompts."""

    raster: Grid
    vocabulary: int  # ids of a picture's tokens, marks included
    guidance: float  # as it is usually run; 1: it knows none

    @property
    def white(self) -> int: ...  # the code that white looks most like
    def read(self, prompt: str) -> list[int]: ...
    def free(self, asked: Sequence[int]) -> list[int]:
        """What guidance is measured against where this was asked for."""

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Target: ...
    def pictures(self, grids: Tensor) -> list[Image]: ...
    @property
    def looks(self) -> Tensor:
        """[vocabulary, D] where each token stands among those that it may be taken for."""


class PublishedModel:
    """A published model as people use it; `small` is asked for another of its family when a drafter wants one."""

    def __init__(
        self,
        published: Published,
        *,
        name: str,
        dtype: str = "float32",
        small: Callable[[], Published] | None = None,
    ) -> None:
        self.published, self.name, self.dtype = published, name, dtype
        self.raster = published.raster
        self._small = small
        self._drafts: Published | None = None

    def __repr__(self) -> str:
        return f"<outrider.image model {self.name}, {self.dtype}, {self.raster.rows}x{self.raster.columns} codes>"

    styles: tuple[str, ...] = ()

    @property
    def drafters(self) -> list[str]:
        """Names to give as `drafter`."""
        return drafters(taught=False)

    @property
    def rules(self) -> list[str]:
        """Names to give as `rule`."""
        return rules()

    @overload  # a string is a sequence of strings too: the first that fits counts
    def generate(self, prompt: str, **options: Unpack[Given]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Sequence[str], **options: Unpack[Given]) -> list[Result]: ...
    def generate(self, prompt: str | Sequence[str], **options: Unpack[Given]) -> Result | list[Result]:
        """Pictures: a Result, or for a batch a list of them, as of any outrider.image model."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.results[0] if isinstance(prompt, str) else stream.results

    def stream(self, prompt: str | Sequence[str], **options: Unpack[Given]) -> Stream:
        """The same step by step."""
        usual: Given = {"guidance": self.guidance}
        wanted = Options.of({**usual, **options})
        if self.published.guidance == 1 and wanted.guidance != 1:
            raise InvalidOption(f"{self.name} knows no guidance, and guidance is {wanted.guidance}; leave it out")
        prompts = several(prompt, "prompt")
        return Stream(self, wanted, prompts, [self.read(one, wanted.style) for one in prompts])

    # ---- what a generation is made of

    @property
    def guidance(self) -> float:
        """The usual one."""
        return self.published.guidance

    def read(self, prompt: str, style: str | None = None) -> list[int]:
        """A prompt's ids."""
        if style is not None:
            raise InvalidOption(f"{self.name} has no styles; say in the prompt how it should look")
        return self.published.read(prompt)

    @cached_property
    def white(self) -> int:
        return self.published.white

    @property
    def root(self) -> int:
        return self.white

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Target:
        """The guided target of some conditions, with a cache of its own."""
        return self.published.target(asked, guidance)

    def draft_model(self, asked: Sequence[Sequence[int]], guidance: float) -> Target:
        """The smaller model of the family, under the same guidance."""
        if self._drafts is None:
            if self._small is None:
                raise InvalidOption(
                    f"a smaller model is wanted to draft for {self.name}; name one of its family when it is loaded, "
                    "as load(..., draft=...)"
                )
            small = self._small()
            if small.vocabulary != self.published.vocabulary or small.raster != self.raster:
                raise InvalidOption(
                    f"the smaller model draws {small.raster.rows}x{small.raster.columns} of {small.vocabulary:,} "
                    f"tokens, and {self.name} {self.raster.rows}x{self.raster.columns} of "
                    f"{self.published.vocabulary:,}: they don't share a tokenizer"
                )
            self._drafts = small
        return self._drafts.target(asked, guidance)

    def drafter(self, options: Options, asked: Sequence[Sequence[int]]) -> tuple[Drafter | None, str]:
        """The drafter asked for, and its name."""
        return drafter_of(options, self.raster.width, lambda: self.draft_model(asked, options.guidance))

    def rule(self, options: Options) -> tuple[Rule, str]:
        """The rule asked for, and its name."""
        return rule_of(options, lambda: self.neighbours, lambda: self.looks)

    @torch.no_grad()
    def pictures(self, grids: Tensor) -> list[Image]:
        """Codes [B, rows, columns] as pictures."""
        return self.published.pictures(grids)

    @cached_property
    def looks(self) -> Tensor:
        """[V, D] where each token stands in the model's own codebook."""
        return self.published.looks.detach().float()

    @cached_property
    def neighbours(self) -> Tensor:
        """[V, 200 or fewer] the codes nearest to each, nearest first."""
        return neighbours(self.looks.cpu(), min(_NEAR, self.published.vocabulary - 1))


FAMILY: Family[Published] = Family(
    package="outrider.image.hub",
    what="picture models",
    classes={
        "janus": ("janus", "JanusForConditionalGeneration"),
        "emu3": ("emu3", "Emu3ForConditionalGeneration"),
        "imagegpt": ("imagegpt", "ImageGPTForCausalImageModeling"),
        "llamagen": ("llamagen", ""),  # a folder that outrider.image.hub.llamagen.convert wrote
    },
    refused={
        "chameleon": "its class in transformers sets the logits of picture codes to -inf and has no decoder of "
        "pixels, so it reads pictures and draws none",
        "glm_image": "its class places tokens in three directions by a table that it keeps from the last prompt it "
        "read, one place for each token to come and none for a draft's; and its codes become pixels only by a "
        "diffusion model of 7 billion weights in another package",
    },
    parts={"vision_language_encoder": "processor"},
)


published = FAMILY.of  # a model object of transformers, with its processor


def load(
    source: str | Path,
    *,
    draft: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
    **options: Any,
) -> PublishedModel:
    """A published model by its hub id or folder; `draft` names a smaller one that shares its tokenizer. Further options
    are those of its class, such as Emu3's ratio."""
    open_ = partial(FAMILY.open, device=device, dtype=dtype, options=options)
    small = None if draft is None else lambda: open_(draft)
    return PublishedModel(open_(source, revision=revision), name=str(source), dtype=dtype, small=small)
