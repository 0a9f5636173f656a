"""The text of a row while its tokens arrive: whole characters only, and nothing past a stop string or what may become
one. Knows tokens as ids; nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_TORN = "\ufffd"  # what an unfinished character decodes to


class Reader:
    """Feed it tokens, take text.

    A token may hold a part of a character, and a stop string may begin and end inside tokens, so text is handed out
    once it is certain: the parts, joined, are what decoding all tokens at once gives, cut before the stop string.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self.ids: list[int] = []
        self._from = self._to = 0  # the tokens last decoded, which the next ones are decoded behind
        self.text = ""
        self._given = 0
        self._end: int | None = None  # where in the text the stop string begins
        self.cut: int | None = None  # how many tokens stay: those up to and including the stop string's last

    def feed(self, ids: Sequence[int]) -> None:
        """More tokens; those behind a stop string are not read."""
        for one in ids:
            if self.cut is not None:
                return
            self.ids.append(one)
            before = self._decode(self.ids[self._from : self._to])
            now = self._decode(self.ids[self._from :])
            if not now.endswith(_TORN):
                self._add(now[len(before) :])
                self._from, self._to = self._to, len(self.ids)

    def _add(self, text: str) -> None:
        start = max(0, len(self.text) - self._longest + 1)
        self.text += text
        found = [place for stop in self._stop if (place := self.text.find(stop, start)) >= 0]
        if found:
            self._end, self.cut = min(found), len(self.ids)
            self.text = self.text[: self._end]

    def take(self, *, last: bool = False) -> str:
        """The text that has become certain; `last`: no more tokens will come, so all that is left."""
        if last and self.cut is None:
            before = self._decode(self.ids[self._from : self._to])
            self._add(self._decode(self.ids[self._from :])[len(before) :])
            self._from = self._to = len(self.ids)
        until = len(self.text) if last or self.cut is not None else len(self.text) - self._pending()
        piece = self.text[self._given : until]
        self._given = max(self._given, until)
        return piece

    def _pending(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
