"""Incremental detokenisation of one row: whole characters only, and nothing after a stop string or a possible beginning
of one. Independent of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_INCOMPLETE = "\ufffd"  # the decoding of an incomplete character


class Detokenizer:
    """Takes tokens with `feed` and returns text with `take`.

    A token can contain part of a character, and a stop string can begin and end within tokens, so text is returned only
    once it is certain. The pieces joined equal the decoding of all tokens at once, cut before the stop string.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._max_stop = max(map(len, self._stop), default=0)
        self.ids: list[int] = []
        self._from = self._to = 0  # the tokens last decoded, as context of the next
        self.text = ""
        self._returned = 0
        self._end: int | None = None  # start of the stop string in the text
        self.cut: int | None = None  # tokens to keep: up to the last of the stop string

    def feed(self, ids: Sequence[int]) -> None:
        """Add tokens; those after a stop string are ignored."""
        for token in ids:
            if self.cut is not None:
                return
            self.ids.append(token)
            before = self._decode(self.ids[self._from : self._to])
            now = self._decode(self.ids[self._from :])
            if not now.endswith(_INCOMPLETE):
                self._add(now[len(before) :])
                self._from, self._to = self._to, len(self.ids)

    def _add(self, text: str) -> None:
        start = max(0, len(self.text) - self._max_stop + 1)
        self.text += text
        positions = [position for stop in self._stop if (position := self.text.find(stop, start)) >= 0]
        if positions:
            self._end, self.cut = min(positions), len(self.ids)
            self.text = self.text[: self._end]

    def take(self, *, last: bool = False) -> str:
        """Return the text that has become certain; with `last` (no more tokens follow), all that is left."""
        if last and self.cut is None:
            before = self._decode(self.ids[self._from : self._to])
            self._add(self._decode(self.ids[self._from :])[len(before) :])
            self._from = self._to = len(self.ids)
        until = len(self.text) if last or self.cut is not None else len(self.text) - self._pending()
        piece = self.text[self._returned : until]
        self._returned = max(self._returned, until)
        return piece

    def _pending(self) -> int:
        """Return how many characters at the end could be the beginning of a stop string."""
        for length in range(min(self._max_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
