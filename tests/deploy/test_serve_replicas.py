"""The items of a call between a replica and the ingress, and how a replica is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from genserve.deploy.ray import serve_replicas
from genserve.deploy.ray.serve_replicas import ServeReplicas, packed
from genserve.deploy.replica_messages import GenerationCall
from genserve.errors import (
    Closed,
    ContextLengthExceeded,
    GenserveError,
    ModelNotReady,
    Overloaded,
    ReplicaLost,
)
from genserve.sampling.sampling_params import SamplingParams

CALL = GenerationCall(model="m", prompt=(5,), prompt_token_ids=(5,), params=SamplingParams(), seeds=(1,))


METADATA = grpc.aio.Metadata()
PAUSE = object()


class Script:
    """The items of a call, endless pauses, and an error at last; stands in for replica and response."""

    def __init__(self, *items: object) -> None:
        self.items = [*items]
        self.is_cancelled = False
        self.is_closed = False

    async def replica(self) -> AsyncIterator[object]:
        try:
            for item in self.items:
                if isinstance(item, BaseException):
                    raise item
                if item is PAUSE:
                    await asyncio.Event().wait()
                yield item
        finally:
            self.is_closed = True

    def __aiter__(self):
        return self

    async def __anext__(self) -> object:
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        if item is PAUSE:
            await asyncio.Event().wait()
        return item

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A deployment handle whose `generate` returns a response, and whose `broadcast` returns `answers`."""

    def __init__(self, response: Script, *, answers: Sequence[object] = ()) -> None:
        self.generate = self
        self._response = response
        self._answers = answers

    def broadcast(self, _method: str) -> DeploymentBroadcastResponse:
        async def asked() -> list[Answer]:
            return [Answer(one) for one in self._answers]

        return DeploymentBroadcastResponse(asked(), asyncio.get_running_loop())

    def options(self, **_options: object) -> Handle:
        return self

    def remote(self, _call: object) -> Script:
        return self._response


class Answer:
    """What a replica answers that was asked: a value, an error, or nothing for ever."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def get_async(self) -> object:
        if self._answer is PAUSE:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def sent(script: Script) -> list[object]:
    return [item async for item in packed(script.replica())]


async def received(response: Script) -> Sequence[object]:
    return [item async for item in ServeReplicas(Handle(response)).generate(CALL)]


def test_items_and_errors_cross():
    async def cross(*items):
        return await received(Script(*await sent(Script(*items))))

    assert asyncio.run(cross(["a"], ["b"])) == [["a"], ["b"]]
    with pytest.raises(ContextLengthExceeded, match="too long") as raised:
        asyncio.run(cross(["a"], ContextLengthExceeded("too long", field="prompt")))
    assert raised.value.field == "prompt"


def test_an_unexpected_error_of_a_replica_is_raised_there():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(sent(Script(["a"], ZeroDivisionError())))


def test_a_call_that_a_replica_cancels_ends() -> None:
    [items, error] = asyncio.run(sent(Script(["a"], asyncio.CancelledError())))
    assert items == ["a"]
    assert isinstance(error, Closed)


def test_a_silent_replica_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr(serve_replicas, "SIGN_OF_LIFE_S", 0.001)
    script = Script(["a"], PAUSE)

    async def listen() -> list[object]:
        async with aclosing(packed(script.replica())) as items:
            while await anext(items) is None:       # signs of a busy machine
                pass
            return [await anext(items) for _ in range(2)]

    assert asyncio.run(listen()) == [None, None]
    assert script.is_closed
    assert asyncio.run(received(Script(None, ["a"], None))) == [["a"]]


def test_a_replica_that_vanishes_is_lost(monkeypatch):
    """Nothing comes, not even an error."""
    monkeypatch.setattr(serve_replicas, "SILENCE_S", 0.001)
    response = Script(["a"], PAUSE)
    with pytest.raises(ReplicaLost, match="nothing for too long"):
        asyncio.run(received(response))
    assert response.is_cancelled


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([ActorDiedError()], ModelNotReady),
        (["status"], Overloaded),
    ],
)
def test_a_call_that_no_replica_takes_is_rejected(monkeypatch, answers, error):
    """All are full, or none has started."""
    monkeypatch.setattr(serve_replicas, "MAX_WAIT_S", 0.001)
    response = Script(PAUSE)
    replicas = ServeReplicas(Handle(response, answers=answers))

    async def call() -> None:
        await replicas.broadcast("status")
        await anext(replicas.generate(CALL))

    with pytest.raises(error, match="no replica"):
        asyncio.run(call())
    assert response.is_cancelled


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("gone", None), ReplicaLost),
        (grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, METADATA, METADATA), ReplicaLost),
        (ReplicaUnavailableError("gone"), ReplicaLost),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
        (Closed("stops"), Closed),
        (asyncio.CancelledError(), ReplicaLost),    # of the call, and not of who reads it
    ],
)
def test_errors_of_ray_become_ours(error: Exception, ours: type[GenserveError]):
    with pytest.raises(ours):
        asyncio.run(received(Script(["a"], error)))


def test_all_replicas_that_answer_in_time_are_heard(monkeypatch):
    async def asked(*answers: object) -> list[object]:
        return sorted(await ServeReplicas(Handle(Script(), answers=answers)).broadcast("status"))

    assert asyncio.run(asked("a", "b", ActorDiedError())) == ["a", "b"]
    monkeypatch.setattr(serve_replicas, "ANSWER_S", 0.05)
    assert asyncio.run(asked("a", PAUSE, "b")) == ["a", "b"]


def test_a_closed_call_is_cancelled():
    response = Script(["a"], PAUSE)

    async def leave() -> None:
        async with aclosing(ServeReplicas(Handle(response)).generate(CALL)) as items:
            await anext(items)

    asyncio.run(leave())
    assert response.is_cancelled
