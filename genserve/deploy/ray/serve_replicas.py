"""Serve replicas: the replicas of a model as a Ray Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from genserve.completion import Delta
from genserve.deploy.replica_messages import Broadcast, GenerationCall, InferenceItem
from genserve.errors import Closed, GenserveError, ModelNotReady, Overloaded, ReplicaLost
from genserve.inference import InferenceRequest

T = TypeVar("T")

_BACK_PRESSURE_S = 1.0  # to retry after; Serve says nothing about it
_MORE_REPLICAS = "try again later, or let the deployment have more replicas"
# How often a replica sends something while it has a call, and after which time without anything it is lost.
SIGN_OF_LIFE_S = 5.0
SILENCE_S = 30.0
# How long a call waits until a replica takes it, which then gives the first sign of life. It waits while all
# replicas are full or start, and also if it was sent to a machine that has vanished, until Ray notices that.
MAX_WAIT_S = 120.0
# How long all replicas are waited for when they are asked; Prometheus gives a scrape 10 s.
ANSWER_S = 5.0


async def packed(items: AsyncIterator[T]) -> AsyncIterator[T | GenserveError | None]:
    """Yield the items of a call as a replica sends them: an error is the last, instead of being raised.

    Serve would log it with a traceback, which is not for a request that is rejected. While there is no item,
    None is a sign of life, since Serve's channels do not notice that a machine has vanished.
    """
    arrived: asyncio.Queue[T | GenserveError | _End] = asyncio.Queue(maxsize=1)
    reading = asyncio.create_task(_read(items, arrived))
    try:
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    item = await arrived.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, _End):
                break
            yield item
        if item.error is not None:
            raise item.error
    finally:
        reading.cancel()
        await asyncio.wait({reading})


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the items, and the unexpected exception that it came with."""

    error: Exception | None


_END = _End(None)


async def _read(items: AsyncIterator[T], arrived: asyncio.Queue[T | GenserveError | _End]) -> None:
    failure: Exception | None = None
    try:
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                await arrived.put(item)
    except GenserveError as error:
        await arrived.put(error)
    except asyncio.CancelledError:
        if _is_cancelled_by_others():
            raise
        await arrived.put(Closed("the replica was stopped before the answer was complete"))
    except Exception as error:  # the reader raises it
        failure = error
    await arrived.put(_End(failure))


class ServeReplicas:
    """A `ReplicaSet` over the handle of a deployment, whose class has the methods of `ModelReplica`.

    Its `generate` and `infer` yield items that are `packed`.
    """

    def __init__(self, handle: Any) -> None:
        """Call the deployment of a `DeploymentHandle`, by gRPC.

        By object references an item costs twice the processor time at both ends.
        """
        self._handle = handle
        self._streams = handle.options(
            stream=True,
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )
        self._num_alive = 0     # replicas that answered when all were asked the last time

    async def generate(self, call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        """Yield the deltas of a call; see `ReplicaSet.generate`."""
        async for deltas in self._unpacked(self._streams.generate.remote(call)):
            yield deltas

    async def infer(self, request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        """Yield the responses to a request; see `ReplicaSet.infer`."""
        async for item in self._unpacked(self._streams.infer.remote(request)):
            yield item

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """Return what a method returns at each replica that answers in time; see `ReplicaSet.broadcast`."""
        answers: list[Any] = []
        try:
            with _as_ours():
                async with asyncio.timeout(ANSWER_S):
                    # The timeout of `results_async` drops all answers: a machine that has vanished would hide
                    # the others until Ray notices, which takes about a minute.
                    asked = await self._handle.broadcast(method)._fetch_replica_results_async()
            answers = await _answers(asked)
        finally:
            self._num_alive = len(answers)
        return answers

    async def _unpacked(self, response: Any) -> AsyncIterator[Any]:
        """Yield the items of a call; cancels it if it is closed before its end."""
        taken = ended = False
        try:
            with _as_ours():
                while True:
                    try:
                        async with asyncio.timeout(SILENCE_S if taken else MAX_WAIT_S):
                            item = await anext(response, _END)
                    except TimeoutError:
                        if taken:
                            raise
                        raise self._not_taken() from None
                    taken = True
                    ended = item is _END or isinstance(item, GenserveError)
                    if item is _END:
                        return
                    if isinstance(item, GenserveError):
                        raise item
                    if item is not None:
                        yield item
        finally:
            if not ended:
                response.cancel()

    def _not_taken(self) -> GenserveError:
        """Return the error of a call that no replica has taken: that of a server which is full, or loads."""
        if not self._num_alive:
            return ModelNotReady(
                f"no replica of the model was ready within {MAX_WAIT_S:g} s",
                remedy="try again later",
                retry_after_s=_BACK_PRESSURE_S,
            )
        return Overloaded(
            f"no replica had room for the request within {MAX_WAIT_S:g} s",
            retry_after_s=_BACK_PRESSURE_S,
            remedy=_MORE_REPLICAS,
        )


async def _answers(asked: Iterable[Any]) -> list[Any]:
    """Return the answers that arrive in time without an error, of the `ReplicaResult`s of a broadcast."""
    arriving = [asyncio.ensure_future(one.get_async()) for one in asked]
    try:
        answered, _ = await asyncio.wait(arriving, timeout=ANSWER_S)
    finally:
        for answer in arriving:
            answer.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)
    return [answer.result() for answer in answered if not answer.cancelled() and not answer.exception()]


@contextmanager
def _as_ours() -> Iterator[None]:
    """Turn the errors of Ray into ours."""
    try:
        yield
    except BackPressureError:
        raise Overloaded(
            "all replicas have as many requests as they may",
            retry_after_s=_BACK_PRESSURE_S,
            remedy=_MORE_REPLICAS,
        ) from None
    except DeploymentUnavailableError as error:
        raise ModelNotReady(f"no replica can be called: {error}", remedy="try again later") from None
    except TimeoutError as error:
        raise ReplicaLost("the replica has sent nothing for too long", remedy="try again") from error
    except (RayError, ReplicaUnavailableError, grpc.aio.AioRpcError) as error:
        raise ReplicaLost("the replica died before it had answered", remedy="try again") from error
    except asyncio.CancelledError as error:  # Serve raises it too where the replica or its channel was closed
        if _is_cancelled_by_others():
            raise
        raise ReplicaLost("the replica was stopped before it had answered", remedy="try again") from error


def _is_cancelled_by_others() -> bool:
    """Return whether somebody has cancelled the running task, rather than what it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
