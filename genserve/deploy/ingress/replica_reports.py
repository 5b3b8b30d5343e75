"""Replica reports: what the replicas of a deployment have done so far, those that have ended included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genserve.deploy.ingress.deployment_metrics import merged
from genserve.deploy.replica.description import ReplicaReport

# Replicas that do not answer and may still come back; the counts of earlier ones are kept as one sum.
_MAX_ABSENT = 32
_COUNTED = frozenset(("counter", "histogram"))


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
