"""A language model as people use it: prompts in, text out, every step on the way to be looked at.

Puts together what others do: tokens, options, the loop, the reader of text, the conversation's cache. Knows nothing of
how a target computes or a drafter guesses.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from outrider.core.decode import Drafter, Rule, decode
from outrider.core.engine.hf import Adapted
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import DRAFTERS, RULES, make_drafter, make_rule
from outrider.core.record import Record
from outrider.core.target import Target
from outrider.core.trace import Finish, Step, Trace, machine, versions
from outrider.text import auto
from outrider.text.conversation import Kept
from outrider.text.options import Given, Options
from outrider.text.reader import Reader
from outrider.text.tokens import Message, Tokens

Prompt = str | Sequence[Message] | Sequence[int]
Batch = Sequence[str] | Sequence[Sequence[Message]] | Sequence[Sequence[int]]
AUTO = "auto"


@dataclass(frozen=True)
class Result:
    """One prompt's outcome."""

    text: str
    tokens: list[int]  # all of them: a stop string's, which the text leaves out, and the end token
    trace: Trace
    logprobs: list[float] | None  # of each token, if asked for
    finish: Finish | None  # end, stop or limit; None: it was broken off
    prompt: list[int] = field(repr=False)  # as token ids


@dataclass(frozen=True)
class Piece:
    """What one step added to one row."""

    text: str  # certain by now: a character or a stop string that is not complete waits for the next step
    row: int
    step: Step
    finish: Finish | None


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
        folder: Path | None = None,
        keep: bool = True,
    ) -> None:
        self.target = make
        self.tokens = tokens
        self.name, self.context, self.folder = name, context, folder
        self.dtype, self.device = dtype, device
        self.end = tuple(end)
        self._keep = keep
        self._kept: Kept | None = None

    def __repr__(self) -> str:
        return f"<outrider.text model {self.name}, {self.dtype}, context {self.context:,}>"

    @property
    def drafters(self) -> list[str]:
        """Names to give as `drafter`; those that need something take it through drafter_options."""
        return drafters()

    @property
    def rules(self) -> list[str]:
        """Names to give as `rule`."""
        return rules()

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids the model reads for one prompt: a user's message, a conversation, or with `raw` a plain prefix.
        Token ids are taken as they are. A model without a chat template continues strings."""
        if isinstance(prompt, str):
            if not prompt.strip() and not (raw and prompt):
                raise InvalidOption("the prompt is empty; give at least one word")
            if raw or self.tokens.template is None:
                return self.tokens.encode(prompt, special=True)
            return self.tokens.encode(self.tokens.render([{"role": "user", "content": prompt}]), special=False)
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
    def generate(self, prompt: Any, **options: Unpack[Given]) -> Result | list[Result]:
        """Decode to the end: a Result, or for a batch a list of them. The options are those of
        outrider.text.options.Options.

        >>> lm = load("smollm2-135m")
        >>> out = lm.generate("What is the capital of France?", drafter="prompt-lookup", max_new_tokens=8)
        >>> out.text
        'The capital of France is Paris.'
        >>> out.finish, out.trace.summary().tokens == len(out.tokens)
        ('end', True)
        """
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.results if stream.batch else stream.results[0]

    def stream(self, prompt: Prompt | Batch, **options: Unpack[Given]) -> Stream:
        """The same step by step: an iterator of Pieces. Closing it ends the generation; `results` is what there is.

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
        ids = [self.encode(one, raw=wanted.raw) for one in prompts]
        limits = []
        for row, one in enumerate(ids):
            room = self.context - len(one)
            if room < 1:
                raise InvalidOption(
                    f"prompt {row} has {len(one):,} tokens and the model's context is {self.context:,}: "
                    "there is no room for an answer; shorten it"
                )
            limits.append(min(wanted.max_new_tokens, room))
        talk = not batch and not isinstance(prompt, str) and isinstance(prompts[0][0], Mapping)
        return Stream(self, wanted, ids, limits, batch=batch, talk=talk)

    def forget(self) -> None:
        """Let go of the last conversation's cache, which the next turn would have gone on from."""
        self._kept = None

    def take_kept(self) -> Kept | None:
        """The last conversation's cache, for one generation at a time; None for a target that can't keep one."""
        kept, self._kept = self._kept, None
        if kept is None and self._keep:
            target = self.target()
            kept = Kept(target) if isinstance(target, Decoder | Adapted) else None
        return kept

    def give_back(self, kept: Kept) -> None:
        self._kept = kept

    def _where(self) -> str:
        """What measured costs belong to: this model in this precision, here."""
        facts = f"{self.dtype}-{self.device}-{torch.get_num_threads()}".replace(":", "")
        place = hashlib.sha256(str(self.folder or self.name).encode()).hexdigest()[:8]
        return f"{self.name.replace('/', '--')[:60]}-{place}-{facts}"

    def drafter(self, options: Options) -> tuple[Drafter | None, str, str]:
        """The drafter asked for, its name, and the costs it goes by if it is "auto"."""
        wanted = options.drafter
        if wanted is None or not isinstance(wanted, str):
            if options.drafter_options:
                raise InvalidOption(
                    "drafter_options go with a drafter's name; this one is made already, or there is none"
                )
            return wanted, "plain" if wanted is None else type(wanted).__name__, ""
        check_names(wanted, "exact")
        given = dict(options.drafter_options)
        if isinstance(given.get("model"), TextModel):
            given["model"] = given["model"].target()
        if wanted == AUTO:
            made, costs = auto.make(self.target, self._where(), given)
            return made, AUTO, costs
        return make_drafter(wanted, **given), wanted, ""

    def rule(self, options: Options) -> tuple[Rule, str]:
        """The rule asked for, and its name."""
        if not isinstance(options.rule, str):
            if options.rule_options:
                raise InvalidOption("rule_options go with a rule's name; this one is made already")
            return options.rule, type(options.rule).__name__
        check_names(None, options.rule)
        return make_rule(options.rule, **options.rule_options), options.rule


def drafters() -> list[str]:
    """The drafters that work on text."""
    return [AUTO, *(name for name, method in DRAFTERS.items() if "text" in method.modalities)]


def rules() -> list[str]:
    """The rules that work on text."""
    return [name for name, method in RULES.items() if "text" in method.modalities and not method.needs]


def check_names(drafter: str | None, rule: str) -> None:
    """Refuse names that are none, before anything costly is done."""
    if drafter is not None and drafter not in drafters():
        raise unknown("drafter", drafter, drafters())
    if rule not in rules():
        raise unknown("rule", rule, rules())


def _is_batch(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        raise InvalidOption(
            f"the prompt is a {type(prompt).__name__}; give a string, a list of messages such as "
            '{"role": "user", "content": "..."}, or a list of either'
        )
    return not prompt or not all(isinstance(one, Mapping | int) for one in prompt)


class Stream(Iterator[Piece]):
    """A generation under way."""

    def __init__(
        self,
        model: TextModel,
        options: Options,
        prompts: list[list[int]],
        limits: list[int],
        *,
        batch: bool,
        talk: bool,
    ) -> None:
        self.batch, self.prompts = batch, prompts
        self._model, self._options = model, options
        drafter, self._method, self._costs = model.drafter(options)
        rule, self._rule = model.rule(options)
        self._lossless, self._seed = rule.lossless, options.drawn_seed()
        self._readers = [Reader(model.tokens.decode, options.stops) for _ in prompts]
        self._texts, self._steps = ["" for _ in prompts], list[Step]()
        self._ends: list[Finish | None] = [None for _ in prompts]
        self._kept = model.take_kept() if talk else None
        self._pieces = self._run(
            decode(
                self._kept or model.target(),
                drafter,
                rule,
                prompts,
                sampling=options.sampling(model.end),
                limit=limits,
                stop=self._stop if options.stops else None,
                seed=self._seed,
                record=Record(logprobs=options.logprobs, alternatives=options.alternatives),
            )
        )

    def _stop(self, row: int, tokens: Sequence[int]) -> int | None:
        reader = self._readers[row]
        reader.feed(tokens[len(reader.ids) :])
        return reader.cut

    def _run(self, steps: Iterator[Step]) -> Generator[Piece]:
        try:
            for step in steps:
                self._steps.append(step)
                reader = self._readers[step.row]
                if not self._options.stops:
                    reader.feed(step.emitted)
                text = reader.take(last=step.finish is not None)
                self._texts[step.row] += text
                self._ends[step.row] = step.finish
                yield Piece(text, step.row, step, step.finish)
        finally:
            if isinstance(steps, Generator):
                steps.close()
            if self._kept is not None:
                self._model.give_back(self._kept)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here."""
        self._pieces.close()

    @property
    def trace(self) -> Trace:
        """Of all rows, as far as it has come."""
        facts = {"model": self._model.name, "dtype": self._model.dtype} | self._options.facts()
        if self._costs:
            facts["drafter.costs"] = self._costs
        if self._kept is not None:
            facts["reused"] = self._kept.reused
        return Trace(
            steps=tuple(self._steps),
            method=self._method,
            rule=self._rule,
            lossless=self._lossless,
            seed=self._seed,
            options=facts,
            machine=machine(),
            versions=versions(),
            memory=peak_memory(),
        )

    @property
    def results(self) -> list[Result]:
        """One for each prompt, as far as it has come."""
        trace = self.trace
        found = []
        for row, prompt in enumerate(self.prompts):
            own = trace.row(row) if self.batch else trace
            logprobs = [one for step in own.steps for one in step.logprobs] if self._options.logprobs else None
            found.append(Result(self._texts[row], own.tokens(row), own, logprobs, self._ends[row], prompt))
        return found


def peak_memory() -> int:
    """Bytes that this process has held at most; on a GPU, that its tensors have held there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024
