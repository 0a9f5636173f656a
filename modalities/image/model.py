"""The image model's API: prompts in, images out, with the trace of every round.

Combines the prompt encoder, the tokenizer, the guided target, options and the loop. Independent of how a target
computes and a drafter drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from outrider.core.device import AUTO, usable_device, usual_dtype
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Resolved
from outrider.core.protocol import Drafter, Rule
from outrider.core.training.draft_head import DraftHead
from outrider.core.validation import as_list, dtype_name, shows_options
from outrider.image import recipes
from outrider.image.grid import Grid, neighbours
from outrider.image.known_names import KnownNames
from outrider.image.layout_planner import decoder
from outrider.image.options import Given, Options
from outrider.image.prompt_encoder import PromptEncoder
from outrider.image.resolve_drafter import listed_drafters, listed_rules, resolve_drafter, resolve_rule
from outrider.image.stream import Result, Stream
from outrider.image.tokenizer import Tokenizer, images

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 64  # pixels


class ImageModel:
    """A token model with its tokenizer. `draft` loads a smaller model and `draft_head` a trained head when a drafter
    first needs one. Several generations may run side by side."""

    def __init__(
        self,
        network: Network,
        prompt_encoder: PromptEncoder,
        codec: Tokenizer,
        *,
        name: str,
        draft: Callable[[], Network] | None = None,
        draft_head: Callable[[str, Decoder], DraftHead] | None = None,
        dtype: str = "float32",
        folder: Path | None = None,
        known: KnownNames | None = None,
    ) -> None:
        if prompt_encoder.codes != codec.layout.codes:
            raise InvalidOption(
                f"the token model has {prompt_encoder.codes:,} codes and the tokenizer {codec.layout.codes:,}; "
                "they must match"
            )
        self.network, self.prompt_encoder, self.codec = network, prompt_encoder, codec
        self.name, self.dtype, self.known = name, dtype, known or KnownNames()
        side = _SIDE // codec.factor
        self.raster = Grid(side, side)
        self.white = self.root = codec.white  # an image begins as if after a white patch
        self._draft, self._draft_head, self._folder = draft, draft_head, folder
        self._drafts: Network | None = None
        self._ready: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<outrider.image model {self.name}, {self.dtype}, {self.raster.rows}x{self.raster.columns} codes>"

    @property
    def styles(self) -> tuple[str, ...]:
        """Names to give as `style`."""
        return self.prompt_encoder.styles

    @property
    def drafters(self) -> Listing:
        """Names to give as `drafter`, with what each does, needs and lacks here."""
        return listed_drafters(draft=self._draft is not None, folder=self._folder)

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
        prompt, of which image i is that of `seed + i`. The options are described in outrider.image.options.Options."""
        stream = self.stream(prompt, num_images_per_prompt=num_images_per_prompt, **options)
        for _ in stream:
            pass
        return stream.results[0] if isinstance(prompt, str) and num_images_per_prompt is None else stream.results

    @shows_options(Options)
    def stream(
        self, prompt: str | Sequence[str], *, num_images_per_prompt: int | None = None, **options: Unpack[Given]
    ) -> Stream:
        """Like `generate`, as an iterator of Pieces, each of which can show the image so far."""
        wanted = Options.of(options)
        prompts = as_list(prompt, "prompt")
        conditions = [self.read(text, wanted.style) for text in prompts]
        negative = wanted.negative_prompt
        unconditional = None if negative is None else self.prompt_encoder.encode_checked(negative)
        return Stream(self, wanted, prompts, conditions, unconditional, num_images_per_prompt)

    # ---- the parts of a generation

    guidance = 3.0  # the default scale

    def read(self, prompt: str, style: str | None = None) -> list[int]:
        """A prompt's ids. Without a style, it is drawn in one that has an image of this name, since the model saw few
        images without a style in training and draws them worse."""
        if style is None:
            style = self.known.style(prompt, self.styles)
        return self.prompt_encoder.encode_checked(prompt, style)

    def target(
        self, prompt_ids: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Guided:
        """The guided target of some conditions, with a cache of its own. `unconditional`: ids of a negative prompt."""
        return Guided(decoder(self.network), prompt_ids, unconditional or self.prompt_encoder.unconditional, guidance)

    def draft_model(
        self, prompt_ids: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Guided:
        """The draft model under the same guidance."""
        if self._drafts is None:
            if self._draft is None:
                raise recipes.missing(recipes.DRAFT)
            self._drafts = self._draft()
        return Guided(decoder(self._drafts), prompt_ids, unconditional or self.prompt_encoder.unconditional, guidance)

    def drafter(
        self, options: Options, prompt_ids: Sequence[Sequence[int]], unconditional: Sequence[int] | None = None
    ) -> Resolved[Drafter | None]:
        """The drafter of these options."""
        return resolve_drafter(
            options,
            columns=self.raster.columns,
            draft_model=lambda: self.draft_model(prompt_ids, options.guidance_scale, unconditional),
            draft_head=self._head,
        )

    def _head(self, drafter: str) -> Any:
        """The head of a trained drafter, laid out for this machine."""
        if drafter not in self._ready:
            if self._draft_head is None:
                raise recipes.missing(f"{recipes.PREFIX}{drafter}")
            target = decoder(self.network)
            self._ready[drafter] = self._draft_head(drafter, target).drafts(target)
        return self._ready[drafter]

    def rule(self, options: Options) -> Resolved[Rule]:
        """The rule of these options."""
        return resolve_rule(options, neighbours=lambda: self.neighbours, codes=lambda: self.code_vectors)

    # ---- images

    @torch.no_grad()
    def to_images(self, grids: Tensor) -> list[Image]:
        """Codes [B, rows, columns] as images."""
        device = self.codec.codebook.device
        return images(torch.cat([self.codec.decode(part.to(device)) for part in torch.split(grids, 32)]))

    @cached_property
    def code_vectors(self) -> Tensor:
        """[K, 3 f f] each code's patch among patches of the same code: pixels in [-1, 1], scaled so that distances are
        root mean squares."""
        codes = torch.arange(self.prompt_encoder.codes, device=self.codec.codebook.device)
        size, found = self.codec.factor, []
        with torch.no_grad():
            for part in torch.split(codes, 250):
                drawn = self.codec.decode(part[:, None, None].expand(-1, 3, 3))
                found.append(drawn[:, :, size : 2 * size, size : 2 * size].flatten(1).float())
        vectors = torch.cat(found)
        return vectors / math.sqrt(vectors.shape[1])

    @cached_property
    def neighbours(self) -> Tensor:
        """[K, 200 or fewer] the codes with the most similar patches, nearest first."""
        return neighbours(self.code_vectors.cpu(), min(200, self.prompt_encoder.codes - 1))


def load(
    name: str = recipes.MODEL,
    *,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    folder: Path | None = None,
) -> ImageModel:
    """Load the text-to-image model "emoji". `folder` holds weights of your own training, in place of those that ship.

    >>> im = load("emoji")
    >>> im.generate("red heart", style="noto", seed=1).image.size
    (64, 64)
    """
    if name != recipes.MODEL:
        raise unknown("image model", name, (recipes.MODEL,))
    device = usable_device(device)
    dtype = usual_dtype(device) if dtype == AUTO else dtype_name(dtype, _DTYPES)
    precision = _DTYPES[dtype]
    if folder is None:
        codec, model = recipes.tokenizer(), recipes.tokens()
    else:
        codec, model = recipes.tokenizer(folder), recipes.tokens(path=folder / "tokens.safetensors")
    small = None if folder is None else folder / "draft.safetensors"
    return ImageModel(
        model.network(precision, device),
        model.prompt_encoder,
        codec.to(device),
        name=name,
        draft=lambda: recipes.tokens(recipes.DRAFT, small, model).network(precision, device),
        draft_head=lambda drafter, target: recipes.draft_head(drafter, target, folder),
        dtype=dtype,
        folder=folder,
        known=recipes.known_names(folder),
    )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
