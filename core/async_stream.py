"""Iterates over a running generation with `async for`. Independent of what is generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Closable(Protocol[T_co]):
    """An iterator that `close` ends."""

    def __next__(self) -> T_co: ...
    def close(self) -> None: ...


async def pieces(stream: Closable[T]) -> AsyncGenerator[T, None]:
    """The items of a stream. Each target pass runs in a thread, so that the event loop is not blocked. Cancelling the
    task, or leaving the loop, ends the generation after the current pass."""
    loop, end = asyncio.get_running_loop(), object()

    def following() -> T | object:  # a StopIteration cannot be raised into a future
        try:
            return stream.__next__()
        except StopIteration:
            return end

    with ThreadPoolExecutor(1, "outrider-stream") as pool:
        try:
            while (piece := await loop.run_in_executor(pool, following)) is not end:
                yield piece  # type: ignore[misc]
        finally:
            await asyncio.shield(loop.run_in_executor(pool, stream.close))  # waits for the current pass
