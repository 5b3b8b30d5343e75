"""Either client: both clients with the same blocking methods, so that one test covers both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from genserve.client import AsyncClient, AsyncStream
from genserve.completion import Completion, Delta


class BlockingStream:
    """An AsyncStream on its own event loop."""

    def __init__(self, runner: asyncio.Runner, stream: AsyncStream) -> None:
        self._runner = runner
        self._stream = stream

    @property
    def text_stream(self) -> Iterator[str]:
        async def all_texts() -> list[str]:
            return [text async for text in self._stream.text_stream]

        return iter(self._runner.run(all_texts()))

    def final(self) -> Completion:
        return self._runner.run(self._stream.final())

    def close(self) -> None:
        self._runner.run(self._stream.close())

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        async def take() -> Delta | None:
            return await anext(self._stream, None)

        delta = self._runner.run(take())
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> BlockingStream:
        self._runner.run(self._stream.__aenter__())
        return self

    def __exit__(self, *problem: Any) -> None:
        self._runner.run(self._stream.__aexit__(*problem))


class BlockingClient:
    """An AsyncClient on its own event loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = self._runner.run(getattr(self._client, name)(*args, **kwargs))
            return BlockingStream(self._runner, answer) if isinstance(answer, AsyncStream) else answer

        return call

    def collect_garbage(self) -> None:
        """Let the loop close streams that were dropped open."""
        self._runner.run(asyncio.sleep(0.01))

    def __enter__(self) -> BlockingClient:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(self, *problem: Any) -> None:
        self._runner.run(self._client.__aexit__(*problem))
        self._runner.close()
