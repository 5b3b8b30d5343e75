"""Local replicas: real replicas of a model in this process, which a test can kill."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from genserve.completion import Delta
from genserve.deploy.calls.message_codec import decoded, encoded
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica.replica_load import ReplicaLoad, total_load
from genserve.deploy.replica_messages import Broadcast, Call, InferenceItem
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import ReplicaLost, VersionReplaced
from genserve.inference import InferenceRequest

T = TypeVar("T")


class LocalReplicas:
    """A `ReplicaSet` of replicas in this process; by default the replicas of a call's identity take turns.

    Attributes:
        replicas: the living replicas, by number.
        calls: the number of the replica that got each call so far.
    """

    def __init__(
        self, *replicas: ModelReplica, choose: Callable[[Call[GenerationRequest]], int] | None = None
    ) -> None:
        self.replicas = dict(enumerate(replicas))
        self.calls: list[int] = []
        self._choose = choose
        self._killed = {number: asyncio.Event() for number in self.replicas}

    def add(self, replica: ModelReplica) -> int:
        """Add a replica that gets calls; return its number."""
        number = len(self._killed)
        self._killed[number] = asyncio.Event()
        self.replicas[number] = replica
        return number

    def retire(self, number: int) -> None:
        """Send a replica no more calls; its running calls go on."""
        del self.replicas[number]

    def kill(self, number: int) -> None:
        """End the calls of a replica with ReplicaLost, as if its process was killed."""
        del self.replicas[number]
        self._killed[number].set()

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        number = self._take(call, self._choose(call) if self._choose else None)
        async for deltas in self._read(number, self.replicas[number].generate(_sent(call))):
            yield _sent(deltas)

    async def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        number = self._take(call, None)
        async for item in self._read(number, self.replicas[number].infer(_sent(call))):
            yield _sent(item)

    def load(self, identity: str) -> ReplicaLoad:
        return total_load([one.load() for one in self.replicas.values() if one.identity == identity])

    async def broadcast(self, method: Broadcast) -> list[Any]:
        answers = [await getattr(replica, method)() for replica in self.replicas.values()]
        return [pickle.loads(pickle.dumps(answer)) for answer in answers]   # Ray pickles answers

    def _take(self, call: Call[Any], number: int | None) -> int:
        if not self.replicas:
            raise ReplicaLost("no replica is left")
        if number is None:
            alike = [number for number, one in self.replicas.items() if one.identity == call.identity]
            if not alike:
                raise VersionReplaced("all replicas have another version", retry_after_s=1.0)
            number = alike[len(self.calls) % len(alike)]
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
        """Wait for an item; None: no item is left."""
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
    """Return a message as another process would receive it."""
    arrived: T = decoded(bytearray(b"".join(map(bytes, encoded(message)))))
    return arrived


class LossyReplicas(LocalReplicas):
    """Local replicas that lose one replica in each call, at a varying delta or before each response.

    With `also_resumed`, resumed calls lose their replica too.
    """

    def __init__(self, *replicas: ModelReplica, also_resumed: bool = False) -> None:
        super().__init__(*replicas)
        self.num_lost = 0
        self._also_resumed = also_resumed
        self._num_inferences = 0

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        left = 1 if self._also_resumed else 1 + self.num_lost % 4
        async with aclosing(super().generate(call)) as items:
            async for deltas in items:
                yield deltas
                left -= 1
                if not left and (self._also_resumed or not call.request.is_resumed):
                    self._lose()

    async def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        self._num_inferences += 1
        if self._num_inferences % 2:
            self._lose()
        async for item in super().infer(call):
            yield item

    def _lose(self) -> None:
        self.num_lost += 1
        raise ReplicaLost("the replica died")
