"""Serve replicas: asks all replicas of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from genserve.deploy.replica_messages import Broadcast
from genserve.errors import ModelNotReady

# How long all replicas are waited for when they are asked; Prometheus gives a scrape 10 s.
ANSWER_S = 5.0


class ServeReplicas:
    """The replicas of a deployment, whose class has the methods of `Broadcast`."""

    def __init__(self, handle: Any) -> None:
        """Ask the replicas of a `DeploymentHandle`."""
        self._handle = handle

    async def broadcast(self, method: Broadcast) -> list[Any]:
        """Return what a method returns at each replica that answers in time.

        Raises:
            ModelNotReady: the deployment has no replica that can be asked.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                # The timeout of `results_async` drops all answers: a machine that has vanished would hide the
                # answers of the other replicas until Ray notices, which takes about a minute.
                asked = await self._handle.broadcast(method)._fetch_replica_results_async()
        except (RayError, DeploymentUnavailableError, ReplicaUnavailableError, TimeoutError) as error:
            raise ModelNotReady(f"no replica can be asked: {error}", remedy="try again later") from error
        return await _answers(asked)


async def _answers(asked: Iterable[Any]) -> list[Any]:
    """Return the answers that arrive in time without an error, of the `ReplicaResult`s of a broadcast."""
    arriving = [asyncio.ensure_future(one.get_async()) for one in asked]
    if not arriving:
        return []
    try:
        answered, _ = await asyncio.wait(arriving, timeout=ANSWER_S)
    finally:
        for answer in arriving:
            answer.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)
    return [answer.result() for answer in answered if not answer.cancelled() and not answer.exception()]
