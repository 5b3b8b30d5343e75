"""Live replicas: the replicas of one model, how many live, what they have to do and what they did."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genserve.deploy.ingress.deployment_metrics import merged
from genserve.deploy.replica.description import ReplicaReport, ReplicaStatus
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Broadcast, ReplicaSet
from genserve.errors import GenserveError

logger = logging.getLogger(__name__)

# Replicas that do not answer and may still come back; the counts of earlier ones are kept as one sum.
_MAX_ABSENT = 32
_COUNTED = frozenset(("counter", "histogram"))


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


class ReplicaReports:
    """The last report of each replica of a deployment, so that no sum of counts ever decreases."""

    def __init__(self) -> None:
        self._last: dict[str, ReplicaReport] = {}  # by replica, the one that answered last at the end
        self._ended = ReplicaReport(replica="", versions={}, metrics=())

    def update(self, answers: Sequence[ReplicaReport]) -> list[ReplicaReport]:
        """Return the answers of the living replicas, and what the others had counted when they answered last.

        A replica that does not answer has ended, or is late: with its next answer it is not counted twice.
        """
        for report in answers:
            self._last.pop(report.replica, None)
            self._last[report.replica] = report
        absent = list(self._last)[: len(self._last) - len(answers)]
        for replica in absent[:-_MAX_ABSENT]:
            self._ended = _added(self._ended, _counts(self._last.pop(replica)))
        return [*answers, *(_counts(self._last[replica]) for replica in absent[-_MAX_ABSENT:]), self._ended]


def _counts(report: ReplicaReport) -> ReplicaReport:
    """Return a report without what was true at its time only."""
    return replace(
        report,
        versions={key: replace(version, num_waiting=0) for key, version in report.versions.items()},
        metrics=[family for family in report.metrics if family.type in _COUNTED],
    )


def _added(whole: ReplicaReport, one: ReplicaReport) -> ReplicaReport:
    """Add the counts of one report to those of another, whose statistics change."""
    versions = dict(whole.versions)
    for key, version in one.versions.items():
        if key in versions:
            versions[key].statistics.add(version.statistics)
        else:
            versions[key] = version
    return replace(whole, versions=versions, metrics=list(merged((whole.metrics, one.metrics))))
