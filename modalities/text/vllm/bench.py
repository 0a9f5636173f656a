"""Measures our drafters in vLLM: starts one server per drafter and runs every prompt of the benchmark on it.

Returns the report of outrider.text.bench.run, with vLLM's plain decoding as the baseline; near-ties are checked with
our own target. Servers run one after another, because several would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Outcome, Run, sweep
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods import DRAFTERS
from outrider.core.paths import cache_folder
from outrider.text.bench.run import Settings, report
from outrider.text.model import TextModel
from outrider.text.vllm.client import Client, Counters
from outrider.text.vllm.server import Setup, can_draft, free_port, running, speculative

ENGINE = "vllm"


@dataclass
class VllmBench:
    """The drafters to measure, and the measurements so far."""

    lm: TextModel  # the same model here, for its tokenizer and for checking near-ties
    settings: Settings
    items: Sequence[Item]
    python: Path
    threads: int
    extra: tuple[str, ...] = ()  # vLLM's own options
    folders: dict[str, Path] = field(default_factory=dict)  # drafters that are already exported
    counters: dict[str, Counters] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bench: Bench = field(init=False)
    _folder: Path = field(init=False)

    def __post_init__(self) -> None:
        if (folder := self.lm.plain_folder()) is None:
            raise InvalidOption(f"{self.lm.name} is not a folder of safetensors, which vLLM needs")
        self._folder = folder
        names = [PLAIN, *(name for name in self.settings.drafters if name != PLAIN)]
        contenders = [Contender(name, _not_run_here, engine=ENGINE) for name in names]
        self.bench = Bench(contenders, self.items, self.settings.repeat)

    def run(self) -> Iterator[str]:
        """Run all servers in turn; yield the current activity. Servers that cannot be started are skipped, with the
        reason."""
        for contender in self.bench.contenders:
            yield f"starting vLLM, {contender.name}"
            try:
                yield from self._measure(contender.name)
            except OutriderError as error:
                self.skipped[f"{ENGINE} {contender.name}"] = str(error)
                if contender.name == PLAIN:
                    raise

    def _measure(self, name: str) -> Iterator[str]:
        drafter, length = None if name == PLAIN else name, None
        if drafter is not None:
            (given, *_) = sweep(drafter, self.settings.drafters, DRAFTERS, self.settings.drafter_options)
            length = given.get("length")
        can_draft(self.python, drafter)
        context = max(len(self.lm.encode(item.content)) for item in self.items) + self.settings.max_new_tokens + 16
        setup = Setup(
            folder=self._folder,
            name=self.lm.name,
            drafter=drafter,
            speculative=speculative(self.lm.name, drafter, length=length, weights=self.folders.get(name)),
            port=free_port(),
            dtype=self.lm.dtype,
            context=min(self.lm.context, context),
            rows=1,
            extra=("--no-enable-prefix-caching", *self.extra),
        )
        with ExitStack() as stack:
            log = cache_folder() / "peers" / f"vllm-serve-{name}.log"
            client = stack.enter_context(running(setup, self.python, threads=self.threads, log=log))
            before = client.counters()
            ask(client, self.lm, self.items[0], self.settings)  # warm-up
            for repeat in range(self.settings.repeat):
                for item in self.items:
                    yield name
                    self.bench.runs.append(Run(name, item, repeat, ask(client, self.lm, item, self.settings)))
            self.counters[name] = client.counters() - before

    def report(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the measurements so far."""
        counts = {name: vars(counter) for name, counter in self.counters.items()}
        facts = {**about, "vllm_counters": counts, "in_turns": False}
        return report(self.bench, self.lm, self.settings, cost=None, about=facts, skipped=self.skipped)


def ask(client: Client, lm: TextModel, item: Item, settings: Settings) -> Outcome:
    """Decode one prompt on the server and return it as an Outcome."""
    reply = client.complete(
        lm.encode(item.content),
        settings.max_new_tokens,
        end=lm.end,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    return Outcome(reply.tokens, reply.seconds, reply.steps())


def _not_run_here(item: Item) -> Outcome:
    raise InvalidOption(f"{item.id} can only be decoded by its vLLM server")
