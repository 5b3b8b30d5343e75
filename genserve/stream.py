"""Stream: the deltas of one answer as they come, whoever makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

from genserve.request import Completion, Delta, join_deltas

__all__ = ["Stream"]


class _Deltas(Protocol):
    """What a stream reads from: a generator, or an engine's stream."""

    def __next__(self) -> Delta: ...

    def close(self) -> None: ...


class Stream:
    """The deltas of one answer; close it, or use it as a context manager, to stop the answer early.

    What was read is kept, so that `final` can be asked at any point. For one thread.
    """

    def __init__(self, deltas: _Deltas) -> None:
        self._deltas = deltas
        self._read: list[Delta] = []

    @property
    def text_stream(self) -> Iterator[str]:
        """The texts alone, as they come; empty ones are left out."""
        return (delta.text for delta in self if delta.text)

    def final(self) -> Completion:
        """Read what is still to come, and return the whole answer.

        Raises:
            StreamBroken: the stream was closed, or broke, before its last delta.
        """
        for _ in self:
            pass
        return join_deltas(self._read)

    def close(self) -> None:
        """Stop the answer, and free what it holds. A second call does nothing."""
        self._deltas.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = next(self._deltas)
        self._read.append(delta)
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
