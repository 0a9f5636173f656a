"""Text for the page by a server of vLLM's: the same panel, with whatever drafter the server was started with.

Who opens the page says which server; visitors never do. The server tells how many tokens came of a pass and how many
were drafted, so acceptance is shown as it counts it; of p and q it tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from outrider.app.page.backends.interface import Asked, Choice, Knob
from outrider.app.page.backends.text import Text
from outrider.app.page.recordings import Modality, Recording, tokens_in
from outrider.app.viz import trace_html
from outrider.core.bench.runner import PLAIN
from outrider.core.methods.rules import EXACT
from outrider.core.trace import Step, Trace
from outrider.text.vllm.client import Client, ServeError, to_step


class Served:
    """The subject. What the server runs is asked once, when the page opens."""

    name: Modality = "text"
    title = Text.title
    what = Text.what
    examples: tuple[str, ...] = Text.examples
    heat: float = Text.heat
    extras: tuple[Knob | Choice, ...] = Text.extras
    defaults = Text.defaults
    fixed = True

    def __init__(self, url: str) -> None:
        self._client = Client(url)
        if not self._client.alive():
            raise ServeError(f"no vLLM server answers at {url}; start one with `outrider serve`")
        self.usual = self._client.drafter or PLAIN

    @cached_property
    def about(self) -> str:
        return f"{self._client.name} on vLLM"

    @property
    def loaded(self) -> bool:
        return True

    def load(self) -> Client:
        return self._client

    def drafters(self) -> list[str]:
        return [self.usual]

    def rules(self) -> list[str]:
        return [EXACT.name]

    def begin(self, asked: Asked) -> LiveServed:
        return LiveServed(self._client, asked)


class LiveServed:
    """A text under way over there."""

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client, self._asked = client, asked
        ids, limit = client.encode(asked.prompt), int(asked.extra["max_new_tokens"])
        self._answering = client.answer(ids, limit, temperature=asked.temperature, seed=asked.seed)
        self._html: list[str] = []

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        before = self._answering.seconds
        tokens = next(self._answering)
        return to_step(len(self._answering.rounds) - 1, tokens, 0, self._answering.seconds - before)

    def close(self) -> None:
        self._answering.close()

    def seen(self) -> str:
        rounds = self._answering.rounds
        for index in range(len(self._html), len(rounds)):
            one = to_step(index, rounds[index], 0, 0.0)
            self._html.append(trace_html.step_tokens(one, self._client.piece, tips=False))
        return trace_html.running_text("".join(self._html))

    def recording(self) -> Recording:
        asked, reply = self._asked, self._answering.reply()
        facts = {"engine": "vllm", "model": self._client.name, "temperature": asked.temperature, **asked.extra}
        trace = Trace(reply.steps(), asked.drafter, asked.rule, seed=asked.seed, options=facts)
        names = {str(token): self._client.piece(token)[:200] for token in sorted(tokens_in(trace))}
        return Recording("text", trace, asked.prompt, names)
