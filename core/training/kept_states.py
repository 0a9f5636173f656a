"""The teacher's hidden states on disk: later epochs, and a resumed run, read them instead of running the teacher.

One file has the states of row after row, another the index. Independent of what the states are used for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor

from outrider.core.assets.files import write_atomically
from outrider.core.errors import InvalidOption
from outrider.core.training.dataset import Teacher

_ROUNDING = 0.1  # relative difference of states that the teacher computes once more, in other batches


@dataclass(frozen=True)
class _Form:
    """What a file holds: the first line of its index."""

    teacher: str
    taps: tuple[str, ...]
    width: int
    dtype: str

    @property
    def numbers(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def size(self, length: int) -> int:
        """The bytes of a row of this many tokens."""
        return len(self.taps) * length * self.width * self.numbers.itemsize


def _key(row: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(row, np.int64).tobytes(), digest_size=16).hexdigest()


class KeptStates:
    """A teacher that computes the states of each row once, as long as all of them fit in `limit` bytes."""

    def __init__(
        self, teacher: Teacher, folder: Path, limit: int, *, name: str, taps: frozenset[str] = frozenset()
    ) -> None:
        """`name` of the teacher: states of another one are dropped. `taps`: kept besides those asked for."""
        if limit < 1:
            raise InvalidOption(f"limit is {limit} bytes; it must be 1 or more")
        self.teacher, self.name, self.limit, self.taps = teacher, name, limit, taps
        self.device, self.vocabulary = teacher.device, teacher.vocabulary
        self.index, self.file = folder / "states.index", folder / "states.bin"
        self._form: _Form | None = None  # None: there is no file yet
        self._places: dict[str, int] = {}  # where a row's states begin in the file, in bytes
        self._earlier = frozenset[str]()  # rows of an earlier run, until one of them was compared
        folder.mkdir(parents=True, exist_ok=True)

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        return self.teacher.logits(states, vocabulary)

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """The states [B, T, D] of every token; those of padding are 0."""
        needs = needs | self.taps
        self._open(needs)
        taps, keys = sorted(needs | {"last"}), [_key(row) for row in rows]
        earlier = next((n for n, key in enumerate(keys) if key in self._earlier), None)
        if earlier is not None and not self._still_computes(rows[earlier], keys[earlier], needs):
            self._forget()
        new = [n for n, key in enumerate(keys) if key not in self._places]
        made = self.teacher.states([rows[n] for n in new], needs) if new else {}
        found = dict[int, Tensor]()
        for place, n in enumerate(new):
            found[n] = torch.stack([made[tap][place, : len(rows[n])] for tap in taps])
            self.add(rows[n], needs, found[n])
        longest = max(map(len, rows))
        each = [found[n] if n in found else self._read(key, len(rows[n])) for n, key in enumerate(keys)]
        padded = [torch.nn.functional.pad(part, (0, 0, 0, longest - part.shape[1])) for part in each]
        return dict(zip(taps, torch.stack(padded, 1), strict=True))

    def add(self, row: Sequence[int], needs: frozenset[str], states: Tensor) -> None:
        """Keep the states [taps, T, D] of a row, the taps in alphabetical order and with "last"."""
        self._open(needs)
        _, length, width = states.shape
        if self._form is None:
            self._form = _Form(self.name, tuple(sorted(needs | {"last"})), width, str(states.dtype).split(".")[1])
            self.file.write_bytes(b"")
            self.index.write_text(TypeAdapter(_Form).dump_json(self._form).decode() + "\n", encoding="utf-8")
        start, key = self.file.stat().st_size, _key(row)
        if key in self._places or start + self._form.size(length) > self.limit:
            return
        with self.file.open("ab") as file:
            file.write(states.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        with self.index.open("a", encoding="utf-8") as index:
            index.write(json.dumps([key, start, length]) + "\n")
        self._places[key] = start

    def keep(self, rows: Sequence[Sequence[int]]) -> None:
        """Compute the states of those rows that are not kept yet."""
        self._open(self.taps)
        if new := [row for row in rows if _key(row) not in self._places]:
            self.states(new, self.taps)

    def _still_computes(self, row: Sequence[int], key: str, needs: frozenset[str]) -> bool:
        """Whether the teacher has the weights that the states of an earlier run are of: those of one row tell."""
        self._earlier = frozenset()
        made, length = self.teacher.states([row], needs), max(len(row) - 1, 1)  # the last token may not have been read
        now = torch.stack([made[tap][0, :length] for tap in sorted(made)])
        kept = self._read(key, len(row))[:, :length]
        return bool((now - kept).float().norm() <= _ROUNDING * now.float().norm())

    def _forget(self) -> None:
        self._form, self._earlier = None, frozenset()
        self._places.clear()

    def _open(self, needs: frozenset[str]) -> None:
        """Take over what an earlier run wrote of these taps, up to a line or states that are not whole."""
        if self._form is not None and set(self._form.taps) == needs | {"last"}:
            return
        self._forget()
        try:
            first, *lines = self.index.read_text(encoding="utf-8").splitlines()
            form, size = TypeAdapter(_Form).validate_json(first), self.file.stat().st_size
            if form.teacher != self.name or set(form.taps) != needs | {"last"} or not form.size(1):
                return
        except (OSError, ValueError, AttributeError):
            return
        entry, end, whole = TypeAdapter(tuple[str, int, int]), 0, [first]
        with suppress(ValueError):
            for line in lines:
                key, start, length = entry.validate_json(line)
                if start != end or start + form.size(length) > size:
                    break
                self._places[key], end = start, start + form.size(length)
                whole.append(line)
        self._form, self._earlier = form, frozenset(self._places)
        os.truncate(self.file, end)
        write_atomically(self.index, "\n".join(whole) + "\n")

    def _read(self, key: str, length: int) -> Tensor:
        form = self._form
        assert form is not None
        with self.file.open("rb") as file:
            file.seek(self._places[key])
            numbers = bytearray(file.read(form.size(length)))
        return torch.frombuffer(numbers, dtype=form.numbers).view(len(form.taps), length, -1).to(self.device)
