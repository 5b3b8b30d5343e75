"""How all replicas of a Serve deployment are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from genserve.deploy.ray import serve_replicas
from genserve.deploy.ray.serve_replicas import ServeReplicas
from genserve.errors import ModelNotReady

PAUSE = object()


class Handle:
    """A deployment handle whose `broadcast` returns these answers."""

    def __init__(self, answers: Sequence[object]) -> None:
        self._answers = answers

    def broadcast(self, _method: str) -> DeploymentBroadcastResponse:
        async def asked() -> list[Answer]:
            for one in self._answers:
                if isinstance(one, DeploymentUnavailableError):
                    raise one
            return [Answer(one) for one in self._answers]

        return DeploymentBroadcastResponse(asked(), asyncio.get_running_loop())


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


async def asked(*answers: object) -> list[object]:
    return sorted(await ServeReplicas(Handle(answers)).broadcast("status"))


async def test_all_replicas_that_answer_in_time_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await asked("a", "b", ActorDiedError()) == ["a", "b"]
    assert await asked() == []
    monkeypatch.setattr(serve_replicas, "ANSWER_S", 0.05)
    assert await asked("a", PAUSE, "b") == ["a", "b"]


async def test_a_deployment_that_cannot_be_asked_is_not_ready() -> None:
    with pytest.raises(ModelNotReady, match="no replica can be asked"):
        await asked(DeploymentUnavailableError("m"))
