"""Local replicas: real replicas of a model in this process, which a test can kill."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from genserve.completion import Delta
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import Broadcast, GenerationCall, InferenceItem
from genserve.errors import ReplicaLost
from genserve.inference import InferenceRequest

T = TypeVar("T")


class LocalReplicas:
    """A `ReplicaSet` over replicas of this process; by default they take turns.

    Attributes:
        replicas: those that live, by number.
        calls: the number of the replica of each call so far.
    """

    def __init__(
        self, *replicas: ModelReplica, choose: Callable[[GenerationCall], int] | None = None
    ) -> None:
        self.replicas = dict(enumerate(replicas))
        self.calls: list[int] = []
        self._choose = choose
        self._killed = {number: asyncio.Event() for number in self.replicas}

    def kill(self, number: int) -> None:
        """Let the calls of a replica end with ReplicaLost, like those of a process that was killed."""
        del self.replicas[number]
        self._killed[number].set()

    async def generate(self, call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        number = self._take(self._choose(call) if self._choose else None)
        async for deltas in self._read(number, self.replicas[number].generate(_sent(call))):
            yield _sent(deltas)

    async def infer(self, request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        number = self._take(None)
        async for item in self._read(number, self.replicas[number].infer(_sent(request))):
            yield _sent(item)

    async def broadcast(self, method: Broadcast) -> list[Any]:
        return [_sent(await getattr(replica, method)()) for replica in self.replicas.values()]

    def _take(self, number: int | None) -> int:
        if not self.replicas:
            raise ReplicaLost("no replica is left")
        if number is None:
            number = list(self.replicas)[len(self.calls) % len(self.replicas)]
        self.calls.append(number)
        return number

    async def _read(self, number: int, items: AsyncIterator[T]) -> AsyncIterator[T]:
        async with aclosing(items) as open_items:  # type: ignore[type-var]
            while True:
                item = await self._unless_killed(number, anext(open_items))
                if item is None:
                    return
                yield item

    async def _unless_killed(self, number: int, arrival: Awaitable[T]) -> T | None:
        """Wait for an item; None: there is none left."""
        arriving = asyncio.ensure_future(arrival)
        killed = asyncio.ensure_future(self._killed[number].wait())
        try:
            await asyncio.wait({arriving, killed}, return_when=asyncio.FIRST_COMPLETED)
            if killed.done():
                raise ReplicaLost(f"replica {number} died")
            return arriving.result()
        except StopAsyncIteration:
            return None
        finally:
            for task in (arriving, killed):
                task.cancel()
            await asyncio.wait({arriving, killed})


def _sent(message: T) -> T:
    """Return what arrives of a message in another process."""
    arrived: T = pickle.loads(pickle.dumps(message))
    return arrived


class LossyReplicas(LocalReplicas):
    """Local replicas of which one is lost in each call: at a delta that varies, and before each response.

    With `also_resumed`, calls that are resumed lose theirs too.
    """

    def __init__(self, *replicas: ModelReplica, also_resumed: bool = False) -> None:
        super().__init__(*replicas)
        self.num_lost = 0
        self._also_resumed = also_resumed
        self._num_inferences = 0

    async def generate(self, call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        left = 1 if self._also_resumed else 1 + self.num_lost % 4
        async with aclosing(super().generate(call)) as items:
            async for deltas in items:
                yield deltas
                left -= 1
                if not left and (self._also_resumed or not any(call.resumed_token_ids)):
                    self._lose()

    async def infer(self, request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        self._num_inferences += 1
        if self._num_inferences % 2:
            self._lose()
        async for item in super().infer(request):
            yield item

    def _lose(self) -> None:
        self.num_lost += 1
        raise ReplicaLost("the replica died")
