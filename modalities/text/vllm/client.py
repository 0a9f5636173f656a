"""A client of a vLLM server: streams tokens, and converts vLLM's acceptance counters into trace steps.

Starts no server: outrider.text.vllm.server does.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods import DRAFTERS
from outrider.core.trace import Finish, Source, Step, Times
from outrider.text.vllm.export import WRITERS

NEEDS_NOTHING = tuple(name for name, method in DRAFTERS.items() if method.vllm and not method.needs)
SERVED = "served"  # the drafter of a server that `outrider serve` did not start
_TIMEOUT = 600.0  # seconds
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class ServeError(OutriderError):
    """vLLM cannot be started, or stopped."""


class Refused(ServeError):
    """The server rejected a request."""


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculation, since its start or between two readings."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()  # accepted tokens at each position of a draft

    def __sub__(self, other: Counters) -> Counters:
        before = (*other.by_position, *[0] * (len(self.by_position) - len(other.by_position)))
        by_position = tuple(a - b for a, b in zip(self.by_position, before, strict=True))
        return Counters(
            self.drafts - other.drafts, self.drafted - other.drafted, self.accepted - other.accepted, by_position
        )

    @classmethod
    def read(cls, text: str) -> Counters:
        """Parse the metrics page; the counters of several engines are added up."""
        totals = dict.fromkeys(_COUNTERS, 0)
        by_position: dict[int, int] = {}
        for line in text.splitlines():
            label, _, value = line.rpartition(" ")
            name = label.partition("{")[0]
            for key, metric in _COUNTERS.items():
                if name == metric:
                    totals[key] += int(float(value))
            if name == _BY_POSITION and (match := re.search(r'position="(\d+)"', label)):
                by_position[int(match[1])] = by_position.get(int(match[1]), 0) + int(float(value))
        return cls(**totals, by_position=tuple(by_position.get(n, 0) for n in range(max(by_position, default=-1) + 1)))


@dataclass(frozen=True)
class Reply:
    """A complete answer."""

    tokens: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]  # the tokens of each target pass
    seconds: float
    finish: str
    counters: Counters

    def steps(self) -> tuple[Step, ...]:
        """Convert to trace steps. vLLM reports the tokens of each pass and the total number drafted, but not the
        rejected tokens (each becomes -1), nor which of the rounds with one token had a rejected draft (the first
        ones are assumed), nor any probabilities."""
        counts = self.counters
        left, rejected = counts.drafts - sum(len(one) > 1 for one in self.rounds), counts.drafted - counts.accepted
        steps: list[Step] = []
        max_length = max(len(counts.by_position), 1)
        for index, tokens in enumerate(self.rounds):
            accepted = len(tokens) - 1
            wasted = 0
            if index and (accepted or left > 0):  # the first token comes from the prompt's pass, without a draft
                left -= not accepted
                wasted = max(min(max_length - accepted, rejected), 0)
                rejected -= wasted
            last = index == len(self.rounds) - 1
            finish: Finish | None = None if not last else "end" if self.finish == "stop" else "limit"
            steps.append(to_step(index, tokens, wasted, self.seconds / len(self.rounds), finish))
        return tuple(steps)


def to_step(index: int, tokens: Sequence[int], wasted: int, seconds: float, finish: Finish | None = None) -> Step:
    """Make the step of a round: all tokens but the last were drafted and accepted, `wasted` more were rejected."""
    accepted = len(tokens) - 1
    drafted = (*tokens[:accepted], *[-1] * wasted)
    count = len(drafted)
    last: Source = "resampled" if wasted else "bonus"
    return Step(
        row=0,
        index=index,
        drafted=drafted,
        parents=tuple(range(-1, count - 1)),
        fixed=(True,) * count,
        tried=(True,) * min(accepted + 1, count) + (False,) * max(count - accepted - 1, 0),
        path=tuple(range(accepted)),
        emitted=tuple(tokens),
        sources=(*["drafted"] * accepted, last),  # type: ignore[arg-type]
        finish=finish,
        times=Times(score=seconds),
    )


class ReplyStream:
    """A streamed answer: an iterator of the tokens of each pass. Closing it ends the request on the server."""

    def __init__(self, client: Client, payload: Mapping[str, Any]) -> None:
        self._client, self._before = client, client.counters()
        self.rounds: list[tuple[int, ...]] = []
        self.seconds, self._finish = 0.0, ""
        self._began = time.perf_counter()
        self._lines = client.stream("/v1/completions", payload)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self

    def __next__(self) -> tuple[int, ...]:
        for line in self._lines:
            self.seconds = time.perf_counter() - self._began
            choice = (line.get("choices") or [{}])[0]
            self._finish = choice.get("finish_reason") or self._finish
            if tokens := choice.get("token_ids"):
                self.rounds.append(tuple(tokens))
                return self.rounds[-1]
        raise StopIteration

    def close(self) -> None:
        self._lines.close()

    def reply(self) -> Reply:
        """Return the answer so far."""
        counts = self._client.counters() - self._before
        tokens = tuple(token for round_tokens in self.rounds for token in round_tokens)
        return Reply(tokens, tuple(self.rounds), self.seconds, self._finish, counts)


class Client:
    """Sends one prompt at a time to a vLLM server."""

    def __init__(self, url: str, name: str = "") -> None:
        self.url = url.rstrip("/")
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            raise InvalidOption(f"'{url}' is not a URL; give one such as http://127.0.0.1:8000")
        self._name = name
        self._pieces: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The name of the served model."""
        if not self._name:
            self._name = str(json.loads(self._get("/v1/models"))["data"][0]["id"])
        return self._name

    def alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (OSError, ValueError):
            return False

    def counters(self) -> Counters:
        return Counters.read(self._get("/metrics"))

    @property
    def drafter(self) -> str | None:
        """Its drafter: our name if `outrider serve` started the server, else SERVED; None for plain decoding."""
        names = [
            str(model["id"]).removeprefix(f"{self.name}:") for model in json.loads(self._get("/v1/models"))["data"]
        ]
        known = [model for model in names if model in (*NEEDS_NOTHING, *WRITERS)]
        return known[0] if known else SERVED if "vllm:spec_decode" in self._get("/metrics") else None

    def encode(self, text: str) -> list[int]:
        """Tokenize a user's message with the server's chat template, or as plain text if it has none."""
        try:
            response = self._post("/tokenize", {"messages": [{"role": "user", "content": text}]})
        except Refused:
            response = self._post("/tokenize", {"prompt": text})
        return [int(token) for token in response["tokens"]]

    def piece(self, token: int) -> str:
        """Return one token as text for display."""
        if token not in self._pieces:
            self._pieces[token] = str(self._post("/detokenize", {"tokens": [token]})["prompt"]) if token >= 0 else "?"
        return self._pieces[token]

    def answer(
        self, ids: Sequence[int], limit: int, *, end: Sequence[int] = (), temperature: float = 0.0, seed: int = 0
    ) -> ReplyStream:
        """Send token ids and stream the answer's token ids."""
        payload = {
            "model": self.name,
            "prompt": list(ids),
            "max_tokens": limit,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(end),
            "stream": True,
            "return_token_ids": True,
        }
        return ReplyStream(self, payload)

    def complete(
        self, ids: Sequence[int], limit: int, *, end: Sequence[int] = (), temperature: float = 0.0, seed: int = 0
    ) -> Reply:
        """Return the complete answer."""
        answering = self.answer(ids, limit, end=end, temperature=temperature, seed=seed)
        for _ in answering:
            pass
        if not answering.rounds:
            raise ServeError(f"{self.url} returned no tokens")
        return answering.reply()

    def stream(self, path: str, payload: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the server-sent events of a request."""
        for line in self._open(path, payload):
            text = line.decode("utf-8").strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise Refused(f"vLLM refused: {str(event['error'])[:300]}")
                yield event

    def _post(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        response: dict[str, Any] = json.loads(b"".join(self._open(path, {"model": self.name, **payload})))
        return response

    def _get(self, path: str) -> str:
        return b"".join(self._open(path)).decode("utf-8")

    def _open(self, path: str, payload: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                yield from answer
        except urllib.error.HTTPError as error:
            with error:
                message = error.read(500).decode(errors="replace")
            raise Refused(f"vLLM refused: {message}") from None
        except (OSError, ValueError) as error:
            raise ServeError(f"no vLLM server answers at {self.url}: {error}") from None
