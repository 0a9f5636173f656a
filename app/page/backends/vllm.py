"""The page's backend for text with a vLLM server and the drafter that the server was started with.

The server's address is an option of `outrider demo`, not of visitors. The server reports the tokens of each pass and
the number of draft tokens, but no probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from outrider.app.page.backends.interface import Choice, Knob, RunSettings
from outrider.app.page.backends.text import TextBackend
from outrider.app.page.recordings import Modality, Recording, tokens_in
from outrider.app.viz import reading
from outrider.core.bench.runner import PLAIN
from outrider.core.methods.rules import EXACT
from outrider.core.trace import Step, Trace
from outrider.text.vllm.client import Client, ServeError, to_step


class VllmBackend:
    """Text by a vLLM server. Its model and drafter are read once, when the page opens."""

    name: Modality = "text"
    title = TextBackend.title
    prompt_label = TextBackend.prompt_label
    lessons = TextBackend.lessons
    examples: tuple[str, ...] = TextBackend.examples
    default_temperature: float = TextBackend.default_temperature
    extra_options: tuple[Knob | Choice, ...] = TextBackend.extra_options[:1]  # max_new_tokens
    defaults = TextBackend.defaults
    is_server = True
    device = ""

    def __init__(self, url: str) -> None:
        self._client = Client(url)
        if not self._client.alive():
            raise ServeError(f"no vLLM server answers at {url}; start one with `outrider serve`")
        self.default_drafter = self._client.drafter or PLAIN

    @cached_property
    def description(self) -> str:
        return f"{self._client.name} on vLLM"

    @property
    def loaded(self) -> bool:
        return True

    def load(self) -> Client:
        return self._client

    def drafters(self) -> list[str]:
        return [self.default_drafter]

    def rules(self) -> list[str]:
        return [EXACT.name]

    def begin(self, settings: RunSettings) -> VllmGeneration:
        return VllmGeneration(self._client, settings)


class VllmGeneration:
    """A text that the server is generating."""

    def __init__(self, client: Client, settings: RunSettings) -> None:
        self._client, self._settings = client, settings
        ids, limit = client.encode(settings.prompt), int(settings.extra["max_new_tokens"])
        self._answering = client.answer(ids, limit, temperature=settings.temperature, seed=settings.seed)
        self._html: list[str] = []

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        before = self._answering.seconds
        tokens = next(self._answering)
        return to_step(len(self._answering.rounds) - 1, tokens, 0, self._answering.seconds - before)

    def close(self) -> None:
        self._answering.close()

    def preview(self) -> str:
        rounds = self._answering.rounds
        for index in range(len(self._html), len(rounds)):
            step = to_step(index, rounds[index], 0, 0.0)
            self._html.append(reading.preview(step, self._client.piece))
        return reading.running_answer(self._html)

    def recording(self) -> Recording:
        settings, reply = self._settings, self._answering.reply()
        facts = {"engine": "vllm", "model": self._client.name, "temperature": settings.temperature, **settings.extra}
        trace = Trace(reply.steps(), settings.drafter, settings.rule, seed=settings.seed, options=facts)
        names = {str(token): self._client.piece(token)[:200] for token in sorted(tokens_in(trace))}
        return Recording("text", trace, settings.prompt, names)
