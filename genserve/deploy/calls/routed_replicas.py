"""Routed replicas: the replicas of a model, each call of which goes to the best one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from genserve.completion import Delta
from genserve.deploy.calls.call_channel import CallChannel
from genserve.deploy.calls.call_protocol import CallPort
from genserve.deploy.calls.engine_progress import EngineProgress
from genserve.deploy.replica.description import ReplicaStatus
from genserve.deploy.replica.replica_load import ReplicaLoad, total_load
from genserve.deploy.replica_messages import Broadcast, Call, InferenceItem
from genserve.deploy.routing.request_ranking import RequestRanking
from genserve.engine.admission_control import RejectionReason
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import ModelNotReady, Overloaded, VersionReplaced
from genserve.inference import InferenceRequest

logger = logging.getLogger(__name__)

# A replica without a connection is forgotten when so many answers of the other replicas came without its own:
# it may have been late, and its connection may come back.
_MAX_MISSED = 3
# How long a call waits while no replica takes calls: all of them may be starting.
MAX_WAIT_S = 120.0
# How many calls wait: as many as the queue of one replica holds by default, since the first one gets them.
MAX_WAITING = 256
_RETRY_S = 1.0
# How long an answer with the statuses waits for new connections: a machine that cannot be reached must not
# make the loads of all other replicas old.
_CONNECTING_S = 0.5


class RoutedReplicas:
    """A `ReplicaSet` that has a connection to each replica, and ranks them by `RequestRanking`.

    It learns of replicas, and of their loads, by asking all of them for their status, which the ingress does
    once a second. A replica lives as long as its connection, whether it answers in time or not. Belongs to
    one event loop.
    """

    def __init__(
        self, broadcast: Callable[[Broadcast], Awaitable[list[Any]]], weights: Mapping[str, float]
    ) -> None:
        """Begin with no replica known.

        Args:
            broadcast: returns what a method of `ModelReplica` returns at each replica that answers.
            weights: the weights of `PrefixRouter`.
        """
        self._broadcast = broadcast
        self._ranking: RequestRanking[str] = RequestRanking(**weights)
        self._channels: dict[str, CallChannel] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}     # why a replica that is known cannot be called
        self._statuses: dict[str, ReplicaStatus] = {}   # the last one of each replica that is not forgotten
        self._num_missed: dict[str, int] = {}           # answers of other replicas since then
        self._progress = EngineProgress(time.monotonic)
        self._num_waiting = 0   # calls that wait for a replica
        self._changed = asyncio.Event()     # a replica can be called, or none can be any more

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        """See `ReplicaSet.generate`."""
        async with aclosing(self._call("generate", call)) as items:     # type: ignore[type-var]
            async for deltas in items:
                yield deltas

    async def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        """See `ReplicaSet.infer`."""
        async with aclosing(self._call("infer", call)) as items:    # type: ignore[type-var]
            async for item in items:
                yield item

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """See `ReplicaSet.broadcast`; the status is the last one of each replica that has a connection."""
        if method != "status":
            return await self._broadcast(method)
        try:
            answers = await self._broadcast(method)
        except ModelNotReady:
            if not self._channels:  # replicas with connections can be called, though nobody can be asked
                raise
            answers = []
        self._observe(answers)
        if self._connecting:
            await asyncio.wait(self._connecting.values(), timeout=_CONNECTING_S)
        return [
            replace(self._statuses[name], is_stopping=one.is_stopping)
            for name, one in self._channels.items()
            if not one.is_closing
        ]

    def load(self, identity: str) -> ReplicaLoad:
        """See `ReplicaSet.load`."""
        return total_load([self._ranking.load(replica) for replica in self._staying(identity)])

    def close(self) -> None:
        """Close the connections; calls that run fail."""
        for opening in self._connecting.values():
            opening.cancel()
        for channel in tuple(self._channels.values()):
            channel.close()

    async def _call(
        self, method: Literal["generate", "infer"], call: Call[Any]
    ) -> AsyncIterator[Any]:
        """Yield the items of a call of the best replica, or of the next one if the best has no room."""
        await self._wait_for_replica(call.identity)
        request = object()
        full: Overloaded | None = None
        for replica in self._ranked(call):
            channel = self._channels.get(replica)
            if channel is None or channel.is_closing:      # meanwhile
                continue
            self._ranking.sent(request, call.request, replica)
            running = self._progress.begin(replica) if method == "generate" else None
            num_items = 0
            try:
                async with aclosing(channel.call(method, call)) as items:   # type: ignore[type-var]
                    async for item in items:
                        num_items += 1
                        if running is not None:
                            self._progress.heard(running)
                        yield item
            except Overloaded as error:
                if num_items or error.reason == RejectionReason.QUEUE_TIMEOUT:  # another wait would add to it
                    raise
                full = error
            else:
                return
            finally:
                self._ranking.ended(request, replica)
                if running is not None:
                    self._progress.end(running)
            self._ranking.rejected(call.request, replica, reason=full.reason)
        raise full or ModelNotReady(
            "the replica that holds the sequence cannot be reached at the moment"
            if _is_of_sequence(call)
            else "no replica of the model can be reached at the moment",
            remedy="send the request again",
            retry_after_s=_retry_after_s(),
        )

    def _ranked(self, call: Call[Any]) -> list[str]:
        """Return the replicas to ask; a sequence stays with its replica even while that cannot be called."""
        known = [name for name, status in self._statuses.items() if status.identity == call.identity]
        candidates = self._staying(call.identity)
        # Several ingresses that see no difference between replicas should not all prefer the same one.
        candidates = random.sample(candidates, len(candidates))
        return self._ranking.rank(call.request, candidates, holding=known)

    def _staying(self, identity: str) -> list[str]:
        """Return the replicas that can be called; replicas that stop or hang only if there is no other."""
        callable_ones = self._callable(identity)
        ready = [name for name in callable_ones if self._statuses[name].is_ready]
        return [name for name in ready if not self._channels[name].is_stopping] or ready or callable_ones

    def _callable(self, identity: str) -> list[str]:
        # A connection is lost a moment before its channel learns it, and a lost call is tried again at once.
        return [
            name
            for name, one in self._channels.items()
            if self._statuses[name].identity == identity and not one.is_closing
        ]

    async def _wait_for_replica(self, identity: str) -> None:
        """Wait until a replica of an identity can be called; VersionReplaced if all have another identity."""
        if self._callable(identity):
            return
        if self._num_waiting >= MAX_WAITING:
            raise ModelNotReady(
                f"no replica of the model is ready, and {self._num_waiting} requests wait for one",
                remedy="try again later",
                retry_after_s=_retry_after_s(),
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                while not self._callable(identity):
                    identities = {status.identity for status in self._statuses.values()}
                    if identities and identity not in identities:
                        raise _replaced()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise _not_ready() from None
        finally:
            self._num_waiting -= 1

    def _observe(self, answers: Sequence[ReplicaStatus]) -> None:
        """Connect to new replicas, and take over the loads; without an answer everything stays as it was."""
        answered = {one.port.replica: one for one in answers if one.port is not None}
        if not answered:
            return
        known = frozenset(self._statuses)
        for name, status in answered.items():
            if self._progress.observe(name, status.num_turns):
                status = replace(status, is_ready=False)
            if status.is_ready and name not in self._channels and name not in self._connecting:
                assert status.port is not None
                self._connecting[name] = asyncio.create_task(self._connect(status.port))
            self._statuses[name] = status
            self._ranking.observe(name, status.load)
        for name in answered:
            self._leave_if_it_hangs(name)
        self._num_missed = {
            name: 0 if name in answered else self._num_missed.get(name, 0) + 1 for name in self._statuses
        }
        gone = [
            name
            for name, num_missed in self._num_missed.items()
            if num_missed >= _MAX_MISSED and name not in self._channels and name not in self._connecting
        ]
        for name in gone:
            del self._statuses[name]
            self._progress.forget(name)
        if self._statuses.keys() != known:
            self._ranking.keep_only(self._statuses)
            self._failures = {name: one for name, one in self._failures.items() if name in self._statuses}
            self._changed.set()

    def _leave_if_it_hangs(self, name: str) -> None:
        """Move the calls of a replica that hangs to other replicas; without any, it may go on itself."""
        status, channel = self._statuses[name], self._channels.get(name)
        if status.is_ready or channel is None:
            return
        others = [other for other in self._staying(status.identity) if self._statuses[other].is_ready]
        if others:
            logger.error("the replica %s hangs, and its calls go on at others", name)
            channel.close()

    def _ended(self, name: str) -> None:
        """Record that a replica stops, or that its connection is lost."""
        channel = self._channels.get(name)
        if channel is not None and channel.is_closing:
            del self._channels[name]
        self._changed.set()

    async def _connect(self, port: CallPort) -> None:
        name = port.replica
        try:
            channel = await CallChannel.open(port, on_end=lambda: self._ended(name))
            self._failures.pop(name, None)
            if not channel.is_closing:
                self._channels[name] = channel
        except OSError as error:    # the connection is tried again with the replica's next status
            reason = str(error) or type(error).__name__
            if self._failures.get(name) != reason:
                self._failures[name] = reason
                logger.warning("the replica at %s:%d cannot be called: %s", port.host, port.port, reason)
        finally:
            del self._connecting[name]
            self._changed.set()


def _is_of_sequence(call: Call[Any]) -> bool:
    return isinstance(call.request, InferenceRequest) and bool(call.request.correlation_id)


def _replaced() -> VersionReplaced:
    return VersionReplaced(
        "another version has replaced the one that the request was prepared for",
        remedy="send the request again",
        retry_after_s=_RETRY_S,
    )


def _not_ready() -> ModelNotReady:
    return ModelNotReady(
        f"no replica of the model was ready within {MAX_WAIT_S:g} s",
        remedy="try again later",
        retry_after_s=_retry_after_s(),
    )


def _retry_after_s() -> float:
    """Return a time that is not the same for all clients, or else they would come back together."""
    return random.uniform(_RETRY_S, 2 * _RETRY_S)
