"""The text model's API: prompts in, text out, with the trace of every round.

Combines the tokenizer, options, the loop, the stream and the cache of a conversation. Independent of how a target
computes and a drafter drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from outrider.core.batching import PREFIX_MEMORY
from outrider.core.distribution import Sampling
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
from outrider.text.structured.grammar import Grammars
from outrider.text.structured.tools import Tools
from outrider.text.tokenizer import Message, Tokens, check_messages
from outrider.text.vocab_bridge import Bridge

Prompt = str | Sequence[Message] | Sequence[int]
Batch = Sequence[str] | Sequence[Sequence[Message]] | Sequence[Sequence[int]]


class TextModel:
    """A target with its tokenizer. `make` returns a target over the same weights with a cache of its own, so that
    several generations can run at once. `keep`: the cache is kept between the turns of a conversation, which is wrong
    if the weights can change."""

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
        plain: Callable[[], Path] | None = None,
        keep: bool = True,
        load_other: Callable[[TextModel, str], TextModel] | None = None,
        draft_model: Any = None,
    ) -> None:
        self.target = make
        self.tokens = tokens
        self.name, self.context, self.folder, self._plain = name, context, folder, plain
        self.source = name  # what load() finds it by: of a GGUF file the path
        self.dtype, self.device, self.kv_cache_dtype = dtype, device, kv_cache_dtype
        self.end = tuple(end)
        self.grammars = Grammars(tokens, self.end)
        self._keep = keep
        self._prefix_cache: PrefixCache | None = None
        self._load_other = load_other
        self.draft_model = draft_model  # for drafters that take one; options can name another
        self.head: Any = None  # a draft head for the drafters that it fits; options can name another
        self.draft_heads: dict[tuple[Path, str], DraftHead] = {}  # by file and drafter
        self.prepared_heads: dict[tuple[Path, str], DraftHead] = {}  # those that are prepared for inference
        self.companions: dict[str, TextModel] = {}  # other models that draft for this one, by name
        self.bridges: dict[TextModel, Bridge] = {}  # to those with another tokenizer

    def plain_folder(self) -> Path | None:
        """The folder, for other programs: with weights that are not quantized. None if it was loaded from no folder."""
        return self.folder if self._plain is None else self._plain()

    def __repr__(self) -> str:
        return f"<outrider.text model {self.name}, {self.dtype} on {self.device}, context {self.context:,}>"

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

    def encode(self, prompt: Prompt, *, raw: bool = False, tools: Tools | None = None) -> list[int]:
        """The token ids of one prompt: a user's message, a conversation, or with `raw` a plain prefix. Token ids are
        returned unchanged. A model without a chat template continues strings. The model is told of the tools."""
        if isinstance(prompt, str):
            if not prompt.strip() and not (raw and prompt):
                raise InvalidOption("the prompt is empty; give at least one word")
            if raw or (self.tokens.template is None and tools is None):
                return self.tokens.encode(prompt, special=True)
            return self._rendered([{"role": "user", "content": prompt}], tools)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidOption(
                f"a prompt is a string, a list of messages or a list of token ids, not a {type(prompt).__name__}"
            )
        if len(prompt) and all(isinstance(token, int) for token in prompt):
            return [token for token in prompt if isinstance(token, int)]
        if raw:
            raise InvalidOption("a conversation cannot be raw; give its text as a string, or leave raw out")
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if len(messages) < len(prompt):
            raise InvalidOption(f"a prompt is a string, a list of messages or a list of token ids, not {prompt!r:.60}")
        return self._rendered(messages, tools)

    def _rendered(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        if tools is None:
            return self.tokens.encode(self.tokens.render(messages), special=False)
        check_messages(messages, self.tokens.template)
        shown = tools.shown(messages, self.tokens.template)
        written = [function.written for function in tools.functions]
        return self.tokens.encode(self.tokens.render(shown, written), special=False)

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
        """Like `generate`, as an iterator of Pieces, one per row and target pass; `async for` works as well. `close`
        ends the generation; `results` has the results so far.

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
        ids = [
            encoded
            for prompt in prompts
            for encoded in [self.encode(prompt, raw=wanted.raw, tools=wanted.offered)] * samples
        ]
        limits = [
            self.room(encoded, wanted.max_new_tokens, f"prompt {row // samples}") for row, encoded in enumerate(ids)
        ]
        conversation = not batch and not isinstance(prompt, str) and isinstance(prompts[0][0], Mapping)
        return Stream(self, wanted, ids, limits, batch=batch, samples=n, conversation=conversation and n is None)

    @shows_options(Options)
    def batch(
        self,
        *,
        rows: int = 8,
        memory: int | None = None,
        prefix_memory: int | None = PREFIX_MEMORY,
        own_formats: bool = False,
        **options: Unpack[Given],
    ) -> TextBatch:
        """Continuous batching: up to `rows` requests at once, in at most `memory` bytes of cache; new ones enter while
        others are decoded. At most `prefix_memory` of these bytes hold what requests have read, for prompts that begin
        with the same tokens (None: prompts are read whole). The options hold for all requests; with `own_formats` each
        may have a `response_format`, `regex` or `grammar` of its own, or none.

        >>> lm = load("smollm2-135m")
        >>> batch = lm.batch(rows=2, drafter="prompt-lookup")
        >>> requests = [batch.add(f"What is the capital of {country}?", 8) for country in ("France", "Italy", "Spain")]
        >>> for piece in batch:
        ...     pass  # new text of request number piece.row
        >>> requests[0].result.text
        'The capital of France is Paris.'
        """
        limits = {"rows": rows, "memory": memory, "prefix_memory": prefix_memory}
        return TextBatch(self, Options.of(options), own_formats=own_formats, **limits)  # type: ignore[arg-type]

    def room(self, prompt: Sequence[int], wanted: int, name: str) -> int:
        """The number of new tokens that fit into the context after a prompt, at most `wanted`."""
        room = self.context - len(prompt)
        if room < 1:
            raise InvalidOption(
                f"{name} has {len(prompt):,} tokens and the model's context is {self.context:,}, "
                "which leaves no room for output; shorten the prompt"
            )
        return min(wanted, room)

    def sampling(self, options: Options, vocabulary: int) -> Sampling:
        """How tokens are drawn, the format of the options included, over the target's vocabulary."""
        wanted = options.format
        constraint = None if wanted is None else wanted.constraint(self.grammars, vocabulary)
        return options.sampling(self.end, constraint)

    def forget(self) -> None:
        """Free the last conversation's cache; its next turn is read from the start."""
        self._prefix_cache = None

    def take_prefix_cache(self) -> PrefixCache | None:
        """The last conversation's cache, or a new one, for one generation at a time; None if the target cannot keep its
        cache."""
        cache, self._prefix_cache = self._prefix_cache, None
        if cache is None and self._keep:
            target = self.target()
            cache = PrefixCache(target) if isinstance(target, Decoder | TransformersTarget) else None
        return cache

    def return_prefix_cache(self, cache: PrefixCache) -> None:
        self._prefix_cache = cache

    def companion(self, name: str) -> TextModel:
        """Another language model by NAME or NAME:DTYPE, on the same device and by default in the same precision. It is
        loaded once."""
        if name not in self.companions:
            if self._load_other is None:
                raise InvalidOption(f"{self.name} cannot load '{name}' by name; load it and give the object instead")
            self.companions[name] = self._load_other(self, name)
        return self.companions[name]

    def measurement_key(self) -> str:
        """A file name for measurements of this model in this precision on this machine."""
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
    return not prompt or not all(isinstance(item, Mapping | int) for item in prompt)
