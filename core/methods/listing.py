"""The methods that a model supports, as shown by `model.drafters` and `model.rules`: what each does, needs and
lacks on this machine. Independent of how a modality finds weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.methods.row import Method
from outrider.core.protocol import Capability

Missing = Callable[[Method], tuple[str, ...]]
_WIDTH = 100  # characters per line


@dataclass(frozen=True)
class Entry:
    """A method as supported by one model."""

    method: Method
    missing: tuple[str, ...] = ()  # what must be given or trained first

    @property
    def ready(self) -> bool:
        """Whether it runs with its default options."""
        return not self.missing

    @property
    def needs(self) -> dict[str, str]:
        """The options whose values come from the model or the user, with descriptions."""
        return {option: str(kind) for option, kind in self.method.inputs.items()}

    @property
    def summary(self) -> str:
        return self.method.summary

    @property
    def topology(self) -> tuple[str, ...]:
        return self.method.topology

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        return self.method.capabilities

    @property
    def options(self) -> dict[str, Any]:
        return self.method.options

    def __repr__(self) -> str:
        method, kind = self.method, "drafts" if self.method.lossless is None else "verifies"
        lines = [
            f"{method.name}: {method.summary}",
            f"  {kind} {', '.join(method.topology)}",
            *([f"  {', '.join(map(str, method.capabilities))}"] if method.capabilities else []),
            *(f"  {option}: {what}" for option, what in self.needs.items()),
            "  ready" if self.ready else f"  missing: {'; '.join(self.missing)}",
        ]
        return "\n".join(lines)


class Listing(Mapping[str, Entry]):
    """Methods by name."""

    def __init__(self, methods: Iterable[Method], missing_inputs: Missing = lambda method: ()) -> None:
        self._methods = {method.name: method for method in methods}
        self._missing = missing_inputs

    def __getitem__(self, name: str) -> Entry:
        method = self._methods[name]
        return Entry(method, self._missing(method))

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    @property
    def ready(self) -> list[str]:
        """The names of the methods that run with their default options."""
        return [name for name, entry in self.items() if entry.ready]

    def __repr__(self) -> str:
        width = max(map(len, self._methods), default=0)
        lines = []
        for name, entry in self.items():
            text = entry.summary if entry.ready else f"missing: {'; '.join(entry.missing)}"
            line = f"{name:{width}}  {'ready' if entry.ready else '-':5}  {text}"
            lines.append(line if len(line) <= _WIDTH else line[: _WIDTH - 1].rstrip() + "…")
        return "\n".join(lines)
