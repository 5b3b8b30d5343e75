"""Stream: the deltas of one answer as they come from a server, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from typing import Any, Self

from genserve.request import Completion, Delta, join_deltas

__all__ = ["AsyncStream", "OpeningStream"]


class AsyncStream:
    """`Stream`, awaited. For one task."""

    def __init__(self, deltas: AsyncGenerator[Delta, None]) -> None:
        # A generator that holds the connection in a `with` block lets it go however it ends:
        # at its last delta, by an error, by `close`, or when nobody refers to it any more.
        self._deltas = deltas
        self._read: list[Delta] = []

    @property
    def text_stream(self) -> AsyncIterator[str]:
        """The texts alone, as they come; empty ones are left out."""
        return (delta.text async for delta in self if delta.text)

    async def final(self) -> Completion:
        """Read what is still to come, and return the whole answer.

        Raises:
            StreamBroken: the stream was closed, or broke, before its last delta.
        """
        async for _ in self:
            pass
        return join_deltas(self._read)

    async def close(self) -> None:
        """Stop the answer: the server frees what it holds. A second call does nothing."""
        await self._deltas.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._deltas)
        self._read.append(delta)
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()


class OpeningStream(Coroutine[Any, Any, AsyncStream]):
    """A stream that is asked for: await it, or enter it by `async with`, which closes it behind the block.

    Either once; both raise what the server refused.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncStream]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, None, AsyncStream]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        """Go on, as a coroutine does."""
        return self._opening.send(value)

    def throw(self, *raised: Any) -> Any:
        """Raise where it waits, as a coroutine does."""
        return self._opening.throw(*raised)

    def close(self) -> None:
        """Give up, as a coroutine does: also one that was never awaited."""
        self._opening.close()

    async def __aenter__(self) -> AsyncStream:
        self._stream = await self._opening
        return self._stream

    async def __aexit__(self, *_raised: object) -> None:
        await self._stream.close()
