"""Drafters of ours measured as vLLM serves them: a server for each, one after another, every prompt of the benchmark.

What comes out is outrider.text.bench.run's report: vLLM's own plain decoding is what its drafters are compared with,
and near-ties are judged by our own target. Servers are heavy, so they don't take turns as our own contenders do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Outcome, Run
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.paths import cache_folder
from outrider.text.bench.run import Settings, report
from outrider.text.model import TextModel
from outrider.text.vllm.client import Client, Counters
from outrider.text.vllm.server import Setup, can_draft, free_port, running, speculative

ENGINE = "vllm"


@dataclass
class Served:
    """Drafters to be measured, and what was found."""

    lm: TextModel  # the same model, ours: its tokenizer, and who judges near-ties
    settings: Settings
    items: Sequence[Item]
    python: Path
    threads: int
    extra: tuple[str, ...] = ()  # vLLM's own options
    folders: dict[str, Path] = field(default_factory=dict)  # drafters that were exported before
    counters: dict[str, Counters] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bench: Bench = field(init=False)

    def __post_init__(self) -> None:
        if self.lm.folder is None:
            raise InvalidOption(f"{self.lm.name} is no folder of safetensors, which is what vLLM reads")
        names = [PLAIN, *(name for name in self.settings.drafters if name != PLAIN)]
        contenders = [Contender(name, _elsewhere, engine=ENGINE) for name in names]
        self.bench = Bench(contenders, self.items, self.settings.repeat)

    def go(self) -> Iterator[str]:
        """Start each server in turn and ask it everything; yields what is being done. One that can't be started is
        left out, with the reason."""
        for one in self.bench.contenders:
            yield f"starting vLLM, {one.name}"
            try:
                yield from self._measure(one.name)
            except OutriderError as error:
                self.skipped[f"{ENGINE} {one.name}"] = str(error)
                if one.name == PLAIN:
                    raise

    def _measure(self, name: str) -> Iterator[str]:
        length = self.settings.options.get(name, {}).get("length")
        drafter = None if name == PLAIN else name
        can_draft(self.python, drafter)
        room = max(len(self.lm.encode(item.content)) for item in self.items) + self.settings.max_new_tokens + 16
        assert self.lm.folder is not None
        setup = Setup(
            folder=self.lm.folder,
            name=self.lm.name,
            drafter=drafter,
            speculative=speculative(self.lm.name, drafter, length=length, weights=self.folders.get(name)),
            port=free_port(),
            dtype=self.lm.dtype,
            context=min(self.lm.context, room),
            rows=1,
            extra=("--no-enable-prefix-caching", *self.extra),
        )
        with ExitStack() as stack:
            log = cache_folder() / "peers" / f"vllm-serve-{name}.log"
            client = stack.enter_context(running(setup, self.python, threads=self.threads, log=log))
            before = client.counters()
            ask(client, self.lm, self.items[0], self.settings)  # warms up
            for repeat in range(self.settings.repeat):
                for item in self.items:
                    yield name
                    self.bench.runs.append(Run(name, item, repeat, ask(client, self.lm, item, self.settings)))
            self.counters[name] = client.counters() - before

    def report(self, about: dict[str, Any]) -> dict[str, Any]:
        """What is done so far."""
        counts = {name: vars(one) for name, one in self.counters.items()}
        told = {**about, "vllm_counters": counts, "in_turns": False}
        return report(self.bench, self.lm, self.settings, cost=None, about=told, skipped=self.skipped)


def ask(client: Client, lm: TextModel, item: Item, settings: Settings) -> Outcome:
    """One prompt, as a decoding of ours."""
    reply = client.complete(
        lm.encode(item.content),
        settings.max_new_tokens,
        end=lm.end,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    return Outcome(reply.tokens, reply.seconds, reply.steps())


def _elsewhere(item: Item) -> Outcome:
    raise InvalidOption(f"{item.id} is decoded by a server that is started for it")
