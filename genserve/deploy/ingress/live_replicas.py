"""Live replicas: the replicas of one model, how many live, what they have to do and what they did."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genserve.deploy.ingress.deployment_metrics import merged
from genserve.deploy.replica.description import EngineSizes, ReplicaReport, ReplicaStatus
from genserve.deploy.replica.replica_load import ReplicaLoad, total_load
from genserve.deploy.replica_messages import Broadcast, ReplicaSet
from genserve.errors import GenserveError

logger = logging.getLogger(__name__)

# Replicas that do not answer and may still come back; the counts of earlier ones are kept as one sum.
_MAX_ABSENT = 32
_COUNTED = frozenset(("counter", "histogram"))


class LiveReplicas:
    """The replicas that were deployed for one model.

    Attributes:
        name: the name of the model.
        replicas: the replicas to call.
        load: the load of all living replicas together.
        names: the names of the models that they serve.
        identity: stands for what is served; empty: nothing is.
        failed: the identity that could not be served; empty: there is none.
    """

    def __init__(self, name: str, replicas: ReplicaSet) -> None:
        self.name = name
        self.replicas = replicas
        self.load = ReplicaLoad()
        self.names: frozenset[str] = frozenset()
        self.identity = self.failed = ""
        self._alive: list[ReplicaStatus] = []
        self._sizes: dict[tuple[str, str], list[EngineSizes]] = {}  # by identity and text model
        self._reports = ReplicaReports()

    @property
    def num_alive(self) -> int:
        """How many replicas live that take the calls of what is served, and go on with them."""
        return sum(status.is_ready and status.identity == self.identity for status in self._alive)

    def sizes(self, identity: str, name: str) -> Sequence[EngineSizes]:
        """Return the sizes of the engines of a text model in the replicas that had an identity last."""
        return self._sizes[identity, name]

    async def look(self) -> str:
        """Ask for the load; return the identity that most replicas have; empty: none lives.

        Replicas that stop or hang count only if all do. If several identities have as many replicas, the
        one that is served comes first.
        """
        self._alive = alive = await self.ask("status")
        sizes: dict[tuple[str, str], list[EngineSizes]] = {}
        for status in alive:
            for name, of_engine in status.sizes.items():
                sizes.setdefault((status.identity, name), []).append(of_engine)
        self._sizes.update(sizes)
        self.load = total_load([status.load for status in alive])
        staying = [status for status in alive if status.is_ready and not status.is_stopping]
        counts = Counter(status.identity for status in staying or alive)
        return max(counts, key=lambda one: (counts[one], one == self.identity), default="")

    async def report(self) -> tuple[list[ReplicaReport], list[ReplicaReport]]:
        """Ask for the replicas' reports; return them, and them with the counts of ended replicas."""
        living: list[ReplicaReport] = await self.ask("report")
        return living, self._reports.update(living)

    async def ask(self, method: Broadcast) -> list[Any]:
        """Return the answers of the living replicas; none if they cannot be asked."""
        try:
            return await self.replicas.broadcast(method)
        except Exception as error:  # Serve's errors too: the caller goes on, and asks again
            unexpected = not isinstance(error, GenserveError)
            logger.warning("the replicas of %s do not answer: %s", self.name, error, exc_info=unexpected)
            return []


class ReplicaReports:
    """The last report of each replica of a deployment, so that no sum of counts ever decreases."""

    def __init__(self) -> None:
        self._last: dict[str, ReplicaReport] = {}  # by replica, in the order of the answers
        self._ended = ReplicaReport(replica="", versions={}, metrics=())

    def update(self, answers: Sequence[ReplicaReport]) -> list[ReplicaReport]:
        """Return the answers of the living replicas, and the last counts of all other replicas.

        A replica that does not answer has ended, or is late; its next answer replaces its last one.
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
    """Add the counts of one report to the counts of another, whose statistics change."""
    versions = dict(whole.versions)
    for key, version in one.versions.items():
        if key in versions:
            versions[key].statistics.add(version.statistics)
        else:
            versions[key] = version
    return replace(whole, versions=versions, metrics=list(merged((whole.metrics, one.metrics))))
