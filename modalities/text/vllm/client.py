"""Talking to a server of vLLM's: tokens in and out as they come, and what it says of acceptance read back as steps of
ours. Knows HTTP and counters, nothing of models or of how a server is started.
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
from outrider.core.trace import Finish, Source, Step, Times
from outrider.text.vllm.export import WRITERS

NEEDS_NOTHING = ("prompt-lookup", "suffix")
SERVED = "served"  # the drafter of a server that somebody else has set up
_ANSWERING = 600.0  # seconds
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


class ServeError(OutriderError):
    """vLLM can't be started here, or gave up."""


class Refused(ServeError):
    """It runs, and won't do what it is asked for."""


@dataclass(frozen=True)
class Counters:
    """vLLM's own counts of speculation; of everything since its start, or of what came between two readings."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()  # drafts of which this position was accepted

    def __sub__(self, other: Counters) -> Counters:
        before = (*other.by_position, *[0] * (len(self.by_position) - len(other.by_position)))
        places = tuple(a - b for a, b in zip(self.by_position, before, strict=True))
        return Counters(
            self.drafts - other.drafts, self.drafted - other.drafted, self.accepted - other.accepted, places
        )

    @classmethod
    def read(cls, text: str) -> Counters:
        """From the page of metrics; engines side by side are added up."""
        found = dict.fromkeys(_COUNTERS, 0)
        places: dict[int, int] = {}
        for line in text.splitlines():
            label, _, value = line.rpartition(" ")
            name = label.partition("{")[0]
            for key, wanted in _COUNTERS.items():
                if name == wanted:
                    found[key] += int(float(value))
            if name == _BY_POSITION and (place := re.search(r'position="(\d+)"', label)):
                places[int(place[1])] = places.get(int(place[1]), 0) + int(float(value))
        return cls(**found, by_position=tuple(places.get(n, 0) for n in range(max(places, default=-1) + 1)))


@dataclass(frozen=True)
class Reply:
    """One answer."""

    tokens: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]  # tokens as they came, those of one pass together
    seconds: float
    finish: str
    counters: Counters

    def steps(self) -> tuple[Step, ...]:
        """The rounds as ours. vLLM tells which tokens came of one pass, and how many were drafted in all, but neither
        the rejected tokens (-1 stands for each) nor in which of the rounds with one token a draft was rejected: those
        are said to be the first ones. Of chances it tells nothing."""
        counts = self.counters
        left, rejected = counts.drafts - sum(len(one) > 1 for one in self.rounds), counts.drafted - counts.accepted
        found: list[Step] = []
        longest = max(len(counts.by_position), 1)
        for index, tokens in enumerate(self.rounds):
            accepted = len(tokens) - 1
            wasted = 0
            if index and (accepted or left > 0):  # the first token is the prompt's own
                left -= not accepted
                wasted = max(min(longest - accepted, rejected), 0)
                rejected -= wasted
            last = index == len(self.rounds) - 1
            finish: Finish | None = None if not last else "end" if self.finish == "stop" else "limit"
            found.append(told(index, tokens, wasted, self.seconds / len(self.rounds), finish))
        return tuple(found)


def told(index: int, tokens: Sequence[int], wasted: int, seconds: float, finish: Finish | None = None) -> Step:
    """A round as a step: its tokens, all but the last one drafted, and so many more that were rejected."""
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


class Answering:
    """An answer under way: an iterator of the tokens that came of one pass. Closing it ends the answer over there."""

    def __init__(self, client: Client, asked: Mapping[str, Any]) -> None:
        self._client, self._before = client, client.counters()
        self.rounds: list[tuple[int, ...]] = []
        self.seconds, self._finish = 0.0, ""
        self._began = time.perf_counter()
        self._lines = client.stream("/v1/completions", asked)

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
        """What there is so far."""
        counts = self._client.counters() - self._before
        tokens = tuple(one for part in self.rounds for one in part)
        return Reply(tokens, tuple(self.rounds), self.seconds, self._finish, counts)


class Client:
    """Talks to a server of vLLM's, one prompt at a time."""

    def __init__(self, url: str, name: str = "") -> None:
        self.url = url.rstrip("/")
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.url):
            raise InvalidOption(f"'{url}' is no address; give one such as http://127.0.0.1:8000")
        self._name = name
        self._pieces: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The model it serves."""
        if not self._name:
            self._name = str(json.loads(self._ask("/v1/models"))["data"][0]["id"])
        return self._name

    def alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (OSError, ValueError):
            return False

    def counters(self) -> Counters:
        return Counters.read(self._ask("/metrics"))

    @property
    def drafter(self) -> str | None:
        """Who drafts there: a name of ours where `outrider serve` has started it, else SERVED; None: nobody."""
        names = [str(one["id"]).removeprefix(f"{self.name}:") for one in json.loads(self._ask("/v1/models"))["data"]]
        known = [one for one in names if one in (*NEEDS_NOTHING, *WRITERS)]
        return known[0] if known else SERVED if "vllm:spec_decode" in self._ask("/metrics") else None

    def encode(self, text: str) -> list[int]:
        """What a user says as ids, by the server's tokenizer and chat template; where it has none, the bare text."""
        try:
            found = self._post("/tokenize", {"messages": [{"role": "user", "content": text}]})
        except Refused:
            found = self._post("/tokenize", {"prompt": text})
        return [int(one) for one in found["tokens"]]

    def piece(self, token: int) -> str:
        """A single token for showing."""
        if token not in self._pieces:
            self._pieces[token] = str(self._post("/detokenize", {"tokens": [token]})["prompt"]) if token >= 0 else "?"
        return self._pieces[token]

    def answer(
        self, ids: Sequence[int], limit: int, *, end: Sequence[int] = (), temperature: float = 0.0, seed: int = 0
    ) -> Answering:
        """Token ids in, token ids out as they come."""
        asked = {
            "model": self.name,
            "prompt": list(ids),
            "max_tokens": limit,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(end),
            "stream": True,
            "return_token_ids": True,
        }
        return Answering(self, asked)

    def complete(
        self, ids: Sequence[int], limit: int, *, end: Sequence[int] = (), temperature: float = 0.0, seed: int = 0
    ) -> Reply:
        """The same at once."""
        answering = self.answer(ids, limit, end=end, temperature=temperature, seed=seed)
        for _ in answering:
            pass
        if not answering.rounds:
            raise ServeError(f"{self.url} answered without a token")
        return answering.reply()

    def stream(self, path: str, asked: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """What it sends line by line."""
        for line in self._open(path, asked):
            text = line.decode("utf-8").strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                found = json.loads(text.removeprefix("data: "))
                if "error" in found:
                    raise Refused(f"vLLM refused: {str(found['error'])[:300]}")
                yield found

    def _post(self, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(b"".join(self._open(path, {"model": self.name, **asked})))
        return found

    def _ask(self, path: str) -> str:
        return b"".join(self._open(path)).decode("utf-8")

    def _open(self, path: str, asked: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ANSWERING) as answer:
                yield from answer
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise Refused(f"vLLM refused: {said}") from None
        except (OSError, ValueError) as error:
            raise ServeError(f"no server of vLLM's answers at {self.url}: {error}") from None
