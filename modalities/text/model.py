"""A language model as people use it: prompts in, text out, every step on the way to be looked at.

Puts together what others do: tokens, options, the loop, the reader of text, the conversation's cache. Independent of
how a target computes and a drafter guesses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native
from outrider.core.methods.listing import Listing
from outrider.core.protocol import Target
from outrider.core.training.draft_head import DraftHead
from outrider.core.validation import copies_of, shows_options
from outrider.text.batching import TextBatch
from outrider.text.options import Given, Options
from outrider.text.prefix_cache import PrefixCache
from outrider.text.resolve_drafter import listed_drafters, listed_rules
from outrider.text.stream import Result, Stream
from outrider.text.tokenizer import Message, Tokens
from outrider.text.vocab_bridge import Bridge

Prompt = str | Sequence[Message] | Sequence[int]
Batch = Sequence[str] | Sequence[Sequence[Message]] | Sequence[Sequence[int]]


class TextModel:
    """A target with its tokenizer. `make` gives a target with a cache of its own over the same weights, so that several
    generations may run side by side. `keep`: may a conversation's cache be gone on from? Not if weights change."""

    def __init__(
        self,
        make: Callable[[], Target],
        tokens: Tokens,
        *,
        name: str,
        end: Sequence[int],
        context: int,
        dtype: str = "",
        device: str = "cpu",
        kv_cache_dtype: str | None = None,
        folder: Path | None = None,
        keep: bool = True,
        load_other: Callable[[TextModel, str], TextModel] | None = None,
        draft_model: Any = None,
    ) -> None:
        self.target = make
        self.tokens = tokens
        self.name, self.context, self.folder = name, context, folder
        self.dtype, self.device, self.kv_cache_dtype = dtype, device, kv_cache_dtype
        self.end = tuple(end)
        self._keep = keep
        self._kept: PrefixCache | None = None
        self._load_other = load_other
        self.draft_model = draft_model  # used by drafters that take one, unless a call names another
        self.draft_heads: dict[tuple[Path, str], DraftHead] = {}  # by file and drafter
        self.laid_out: dict[tuple[Path, str], DraftHead] = {}  # those of them that need no further preparation
        self.companions: dict[str, TextModel] = {}  # other models that draft for this one
        self.bridges: dict[TextModel, Bridge] = {}  # to those of them that have other tokens

    def __repr__(self) -> str:
        return f"<outrider.text model {self.name}, {self.dtype}, context {self.context:,}>"

    @property
    def drafters(self) -> Listing:
        """Names to give as `drafter`, with what each does, needs and lacks here; inputs are given in drafter_options.

        >>> lm = load("smollm2-135m")
        >>> lm.drafters["eagle3"].ready
        True
        """
        return listed_drafters(self.name, self)

    @property
    def rules(self) -> Listing:
        """Names to give as `rule`, with what each does."""
        return listed_rules()

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids the model reads for one prompt: a user's message, a conversation, or with `raw` a plain prefix.
        Token ids are taken as they are. A model without a chat template continues strings."""
        if isinstance(prompt, str):
            if not prompt.strip() and not (raw and prompt):
                raise InvalidOption("the prompt is empty; give at least one word")
            if raw or self.tokens.template is None:
                return self.tokens.encode(prompt, special=True)
            return self.tokens.encode(self.tokens.render([{"role": "user", "content": prompt}]), special=False)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidOption(
                f"a prompt is a string, a list of messages or a list of token ids, not a {type(prompt).__name__}"
            )
        if len(prompt) and all(isinstance(one, int) for one in prompt):
            return [one for one in prompt if isinstance(one, int)]
        if raw:
            raise InvalidOption("a conversation can't be raw; give its text as a string, or leave raw out")
        messages = [one for one in prompt if isinstance(one, Mapping)]
        if len(messages) < len(prompt):
            raise InvalidOption(f"a prompt is a string, a list of messages or a list of token ids, not {prompt!r:.60}")
        return self.tokens.encode(self.tokens.render(messages), special=False)

    @overload  # a string is a sequence of strings too: the first that fits counts
    def generate(self, prompt: Prompt, **options: Unpack[Given]) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Batch, **options: Unpack[Given]) -> list[Result]: ...
    @overload
    def generate(self, prompt: Prompt | Batch, *, n: int, **options: Unpack[Given]) -> list[Result]: ...
    @shows_options(Options)
    def generate(self, prompt: Any, *, n: int | None = None, **options: Unpack[Given]) -> Result | list[Result]:
        """Generate text: a Result, or a list of them for a batch or for `n` samples of each prompt, of which sample i
        is that of `seed + i`. The options are described in outrider.text.options.Options.

        >>> lm = load("smollm2-135m")
        >>> out = lm.generate("What is the capital of France?", drafter="prompt-lookup", max_new_tokens=8)
        >>> out.text
        'The capital of France is Paris.'
        >>> out.finish_reason, out.trace.summary().tokens == len(out.tokens)
        ('stop', True)
        """
        stream = self.stream(prompt, n=n, **options)
        for _ in stream:
            pass
        return stream.results if stream.batch else stream.results[0]

    @shows_options(Options)
    def stream(self, prompt: Prompt | Batch, *, n: int | None = None, **options: Unpack[Given]) -> Stream:
        """Like `generate`, as an iterator of Pieces, one for each row and target pass; `async for` works as well.
        Closing it ends the generation; `results` holds the outcome so far.

        >>> lm = load("smollm2-135m")
        >>> for piece in lm.stream("What is the capital of France?", drafter="prompt-lookup", stop=["."]):
        ...     print(piece.text, end="")
        The capital of France is Paris
        """
        wanted = Options.of(options)
        batch = _is_batch(prompt)
        prompts: Sequence[Any] = list(prompt) if batch else [prompt]
        if not prompts:
            raise InvalidOption("there are no prompts; a batch is a list of at least one")
        samples = copies_of(n, "n")
        ids = [encoded for prompt in prompts for encoded in [self.encode(prompt, raw=wanted.raw)] * samples]
        limits = [
            self.room(encoded, wanted.max_new_tokens, f"prompt {row // samples}") for row, encoded in enumerate(ids)
        ]
        talk = not batch and not isinstance(prompt, str) and isinstance(prompts[0][0], Mapping)
        return Stream(self, wanted, ids, limits, batch=batch, samples=n, talk=talk and n is None)

    @shows_options(Options)
    def batch(self, *, rows: int = 8, memory: int | None = None, **options: Unpack[Given]) -> TextBatch:
        """Requests that enter and leave while others are decoded, `rows` at a time and in `memory` bytes of cache; the
        options hold for all of them.

        >>> lm = load("smollm2-135m")
        >>> batch = lm.batch(rows=2, drafter="prompt-lookup")
        >>> asked = [batch.add(f"What is the capital of {country}?", 8) for country in ("France", "Italy", "Spain")]
        >>> for piece in batch:
        ...     pass  # text as it comes: piece.row is a request's number
        >>> asked[0].result.text
        'The capital of France is Paris.'
        """
        return TextBatch(self, Options.of(options), rows=rows, memory=memory)

    def room(self, prompt: Sequence[int], wanted: int, name: str) -> int:
        """How many new tokens there may be behind a prompt, `wanted` at most."""
        room = self.context - len(prompt)
        if room < 1:
            raise InvalidOption(
                f"{name} has {len(prompt):,} tokens and the model's context is {self.context:,}: "
                "there is no room for an answer; shorten it"
            )
        return min(wanted, room)

    def forget(self) -> None:
        """Let go of the last conversation's cache, which the next turn would have gone on from."""
        self._kept = None

    def take_kept(self) -> PrefixCache | None:
        """The last conversation's cache, for one generation at a time; None for a target that can't keep one."""
        kept, self._kept = self._kept, None
        if kept is None and self._keep:
            target = self.target()
            kept = PrefixCache(target) if isinstance(target, Decoder | TransformersTarget) else None
        return kept

    def give_back(self, kept: PrefixCache) -> None:
        self._kept = kept

    def companion(self, name: str) -> TextModel:
        """Another language model by its name, or NAME:DTYPE, on the same device and in the same precision unless one is
        named. It is loaded once."""
        if name not in self.companions:
            if self._load_other is None:
                raise InvalidOption(f"{self.name} can't load '{name}' by its name; load that model and give it instead")
            self.companions[name] = self._load_other(self, name)
        return self.companions[name]

    def where(self) -> str:
        """What measured costs belong to: this model in this precision, here."""
        facts = f"{self.dtype}-{self.device}-{torch.get_num_threads()}".replace(":", "")
        facts += f"-{native.build_id()}" if self.device == "cpu" else ""
        facts += f"-cache-{self.kv_cache_dtype}" if self.kv_cache_dtype else ""
        place = hashlib.sha256(str(self.folder or self.name).encode()).hexdigest()[:8]
        return f"{self.name.replace('/', '--')[:60]}-{place}-{facts}"


def _is_batch(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Sequence):
        raise InvalidOption(
            f"the prompt is a {type(prompt).__name__}; give a string, a list of messages such as "
            '{"role": "user", "content": "..."}, or a list of either'
        )
    return not prompt or not all(isinstance(one, Mapping | int) for one in prompt)
