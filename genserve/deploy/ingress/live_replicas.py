"""Live replicas: the replicas of one model, how many of them live, and what they have to do."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from genserve.deploy.ingress.replica_reports import ReplicaReports
from genserve.deploy.replica.description import ReplicaReport, ReplicaStatus
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Broadcast, ReplicaSet
from genserve.errors import GenserveError

logger = logging.getLogger(__name__)


class LiveReplicas:
    """The replicas that were deployed for one model.

    Attributes:
        name: of the model.
        replicas: to be called.
        load: of those that answered when they were last asked, together.
        num_alive: how many these are.
        names: of the models that are served by them.
        digest: of what is served; empty: nothing.
        failed: of what could not be served; empty: nothing.
    """

    def __init__(self, name: str, replicas: ReplicaSet) -> None:
        self.name = name
        self.replicas = replicas
        self.load = ReplicaLoad()
        self.num_alive = 0
        self.names: frozenset[str] = frozenset()
        self.digest = self.failed = ""
        self._reports = ReplicaReports()

    async def look(self) -> list[str]:
        """Ask for the load; return the digests of what the replicas serve, the most common first."""
        answers: list[ReplicaStatus] = await self.ask("status")
        self.num_alive = len(answers)
        loads = [answer.load for answer in answers]
        self.load = ReplicaLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            waiting_tokens=sum(load.waiting_tokens for load in loads),
            kv_usage=sum(load.kv_usage for load in loads) / max(1, len(loads)),
        )
        return [digest for digest, _ in Counter(answer.digest for answer in answers).most_common()]

    async def report(self) -> list[ReplicaReport]:
        """Ask for what the replicas have done; return it with what ended ones had done."""
        return self._reports.update(await self.ask("report"))

    async def ask(self, method: Broadcast) -> list[Any]:
        """Return the answers of the living replicas; none if they cannot be asked."""
        try:
            return await self.replicas.broadcast(method)
        except Exception as error:  # of Serve too: who asks goes on, and asks again
            unexpected = not isinstance(error, GenserveError)
            logger.warning("the replicas of %s do not answer: %s", self.name, error, exc_info=unexpected)
            return []
