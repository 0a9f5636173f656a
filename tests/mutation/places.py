"""The places of a source file that can be changed, and the changed code: mutmut's operators, one change at a time.

Only bodies of functions are changed. Left alone is what no test could see or what is no behaviour: annotations,
decorators, defaults of parameters, what a `raise` or an assertion says, `cast`, and `strict=True` of `zip`, which is an
assertion itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_LEFT_ALONE = (cst.Annotation, cst.Decorator, cst.Parameters, cst.Raise)


@dataclass(frozen=True)
class Place:
    """A node that an operator can change, in one or more ways."""

    path: str
    function: str
    line: int
    column: int
    operator: str
    node: cst.CSTNode = field(repr=False, compare=False)
    changes: tuple[cst.CSTNode, ...] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.operator}"

    def difference(self, way: int) -> str:
        """The expression before and after the change, in one line."""
        empty = cst.Module([])
        before, after = (" ".join(empty.code_for_node(node).split()) for node in (self.node, self.changes[way]))
        return f"{before}  ->  {after}"


class Source:
    """A file, its places, and the code with one of them changed."""

    def __init__(self, root: Path, path: str) -> None:
        self.path, self.file = path, str(root / path)
        self.text = (root / path).read_text(encoding="utf-8")
        wrapper = MetadataWrapper(cst.parse_module(self.text))
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self.places = list(self._walk(self.module, "", inside=False))

    def _walk(self, node: cst.CSTNode, function: str, *, inside: bool) -> Iterator[Place]:
        """The places in a node. `inside`: of a function, not of a module or a class's own body, which run once."""
        if isinstance(node, _LEFT_ALONE):
            return
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            inner = f"{function}.{node.name.value}".lstrip(".")
            yield from self._walk(node.body, inner, inside=isinstance(node, cst.FunctionDef))
            return
        parts = node.children
        if isinstance(node, cst.Assert):
            parts = [node.test]
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "cast":
            parts = [node.args[1].value]
        elif isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict":
            return
        elif inside and not isinstance(node, cst.FormattedString):
            yield from self._changed(node, function)
        for part in parts:
            yield from self._walk(part, function, inside=inside)

    def _changed(self, node: cst.CSTNode, function: str) -> Iterator[Place]:
        for kind, operator in mutation_operators:
            if not isinstance(node, kind):
                continue
            changes = tuple(change for change in operator(node) if not _only_strict(node, change))
            if operator.__name__ == "operator_string":
                changes = changes[:1]
            if changes:
                at = self._positions[node].start
                yield Place(self.path, function, at.line, at.column, operator.__name__[9:], node, changes)

    def changed(self, place: Place, way: int) -> str:
        result = self.module.deep_replace(place.node, place.changes[way])
        assert isinstance(result, cst.Module)
        return result.code

    def replaced(self, changed: str) -> list[tuple[CodeType, CodeType]]:
        """The functions that differ, as compiled before and after the change: a function or method as a whole."""
        before, after = (compile(text, self.file, "exec", dont_inherit=True) for text in (self.text, changed))
        return list(_differing(before, after))


def _only_strict(before: cst.CSTNode, after: cst.CSTNode) -> bool:
    """Whether the change is of zip's `strict` alone."""
    if not (isinstance(before, cst.Call) and isinstance(after, cst.Call)):
        return False
    last = before.args[-1].keyword if before.args else None
    if last is None or last.value != "strict":
        return False
    return [id(arg) for arg in after.args[: len(before.args) - 1]] == [id(arg) for arg in before.args[:-1]]


def _differing(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    if before == after:
        return
    if before.co_flags & 0x1:  # CO_OPTIMIZED: a function; modules and classes are looked into
        yield before, after
        return
    pairs = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (before, after)]
    for old, new in zip(*pairs, strict=True):
        yield from _differing(old, new)
