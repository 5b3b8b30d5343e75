"""Routed replicas: the replicas of a model, each call of which goes to the best one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from genserve.completion import Delta
from genserve.deploy.calls.call_channel import CallChannel
from genserve.deploy.calls.call_protocol import CallPort
from genserve.deploy.replica.description import ReplicaStatus
from genserve.deploy.replica_messages import Broadcast, GenerationCall, InferenceItem
from genserve.deploy.routing.request_ranking import RequestRanking
from genserve.errors import ModelNotReady, Overloaded
from genserve.inference import InferenceRequest

logger = logging.getLogger(__name__)

# How long a call waits while no replica takes calls: all of them may be starting.
MAX_WAIT_S = 120.0
_RETRY_S = 1.0


class RoutedReplicas:
    """A `ReplicaSet` that has a connection to each replica, and ranks them by `RequestRanking`.

    It learns of replicas, and of their loads, by asking all of them for their status, which the ingress does
    once a second. Belongs to one event loop.
    """

    def __init__(
        self, broadcast: Callable[[Broadcast], Awaitable[list[Any]]], weights: Mapping[str, float]
    ) -> None:
        """Begin with no replica known.

        Args:
            broadcast: returns what a method of `ModelReplica` returns at each replica that answers.
            weights: of `PrefixRouter`.
        """
        self._broadcast = broadcast
        self._ranking: RequestRanking[str] = RequestRanking(**weights)
        self._channels: dict[str, CallChannel] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._listed: frozenset[str] = frozenset()      # those that have answered last
        self._changed = asyncio.Event()     # a replica can be called, or none can be any more

    async def generate(self, call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        """See `ReplicaSet.generate`."""
        async with aclosing(self._call("generate", call)) as items:     # type: ignore[type-var]
            async for deltas in items:
                yield deltas

    async def infer(self, request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        """See `ReplicaSet.infer`."""
        async with aclosing(self._call("infer", request)) as items:     # type: ignore[type-var]
            async for item in items:
                yield item

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """See `ReplicaSet.broadcast`."""
        answers = await self._broadcast(method)
        if method == "status":
            self._observe(answers)
        return answers

    def close(self) -> None:
        """Close the connections; calls that run fail."""
        for channel in tuple(self._channels.values()):
            channel.close()

    async def _call(self, method: Literal["generate", "infer"], argument: Any) -> AsyncIterator[Any]:
        """Yield the items of a call of the best replica, or of the next one if that has no room for it."""
        await self._wait_for_replica()
        request = object()
        full: Overloaded | None = None
        for replica in self._ranked(argument):
            channel = self._channels.get(replica)
            if channel is None or channel.is_lost:      # meanwhile
                continue
            self._ranking.sent(request, argument, replica)
            num_items = 0
            try:
                async with aclosing(channel.call(method, argument)) as items:   # type: ignore[type-var]
                    async for item in items:
                        num_items += 1
                        yield item
            except Overloaded as error:
                if num_items:
                    raise
                full = error
            else:
                return
            finally:
                self._ranking.ended(request, replica)
        raise full or _not_ready()

    def _ranked(self, argument: object) -> list[str]:
        callable_ones = self._callable()
        # Several ingresses that see no difference between replicas should not all prefer the same one.
        return self._ranking.rank(argument, random.sample(callable_ones, len(callable_ones)))

    def _callable(self) -> list[str]:
        # A connection is lost a moment before its channel learns it, and a lost call is tried again at once.
        return [
            name for name, one in self._channels.items() if name in self._listed and not one.is_lost
        ]

    async def _wait_for_replica(self) -> None:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                while not self._callable():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise _not_ready() from None

    def _observe(self, statuses: Sequence[ReplicaStatus]) -> None:
        """Connect to new replicas, and take over the loads; without an answer everything stays as it was."""
        answered = {one.port.replica: one for one in statuses if one.port is not None}
        if not answered:
            return
        for name, status in answered.items():
            if name not in self._channels and name not in self._connecting:
                assert status.port is not None
                self._connecting[name] = asyncio.create_task(self._connect(status.port))
            self._ranking.observe(name, status.load)
        if answered.keys() != self._listed:
            self._listed = frozenset(answered)
            self._ranking.keep_only(self._listed)
            self._changed.set()

    async def _connect(self, port: CallPort) -> None:
        name = port.replica
        try:
            channel = await CallChannel.open(port, on_end=lambda: self._channels.pop(name, None))
            if not channel.is_lost:
                self._channels[name] = channel
        except OSError as error:    # it is tried again with its next status
            logger.warning("the replica at %s:%d cannot be reached: %s", port.host, port.port, error)
        finally:
            del self._connecting[name]
            self._changed.set()


def _not_ready() -> ModelNotReady:
    return ModelNotReady(
        f"no replica of the model was ready within {MAX_WAIT_S:g} s",
        remedy="try again later",
        retry_after_s=_RETRY_S,
    )
