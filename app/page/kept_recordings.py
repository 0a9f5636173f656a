"""The recordings that visitors look at, kept on the server and bounded in number and size.

Independent of models and of Gradio."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from outrider.app.page.recordings import Recording

_COUNT = 64  # recordings
_SIZE = 4_000_000  # numbers in all of them, each some 30 bytes


class KeptRecordings:
    """The last recording of each visitor in each view, or that a run has begun which will make the first. What was
    used least recently makes room for others."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[Recording | None, int]] = OrderedDict()
        self._size = 0

    def keep(self, visitor: str, view: str, recording: Recording) -> None:
        with self._lock:
            self._drop((visitor, view))
            self._kept[visitor, view] = recording, size(recording)
            self._size += size(recording)
            self._make_room()

    def begin(self, visitor: str, view: str) -> None:
        """A run of the visitor has begun in the view."""
        with self._lock:
            self._kept.setdefault((visitor, view), (None, 0))
            self._make_room()

    def has_begun(self, visitor: str, view: str) -> bool:
        """Whether the visitor has begun a run in the view or opened a trace there."""
        with self._lock:
            return (visitor, view) in self._kept

    def find(self, visitor: str, view: str) -> Recording | None:
        with self._lock:
            if (visitor, view) not in self._kept:
                return None
            self._kept.move_to_end((visitor, view))
            return self._kept[visitor, view][0]

    def forget(self, visitor: str) -> None:
        """Release the recordings of a visitor who left."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == visitor]:
                self._drop(key)

    def _make_room(self) -> None:
        while len(self._kept) > 1 and (len(self._kept) > _COUNT or self._size > _SIZE):
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, str]) -> None:
        self._size -= self._kept.pop(key, (None, 0))[1]


def size(recording: Recording) -> int:
    """About how many numbers a recording has; eight characters of an image or of sound count as one."""
    total = len(recording.names) + len(recording.starts) + len(recording.words)
    total += (len(recording.picture) + len(recording.sound)) // 8
    for step in recording.trace.steps:
        total += 60 + 7 * len(step.drafted) + 4 * len(step.emitted) + 3 * sum(map(len, step.alternatives))
    return total + (size(recording.plain) if recording.plain is not None else 0)
