"""The sums of what replicas have counted do not decrease when replicas end."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.deploy.ingress.deployment_metrics import merged
from genserve.deploy.ingress.live_replicas import ReplicaReports
from genserve.deploy.replica.description import ReplicaReport, VersionReport
from genserve.generation_metrics import Metrics
from genserve.histogram import Histogram
from genserve.inference_statistics import ModelStatistics

KEY = ("m", 1)


def report(replica: str, *, count: int) -> ReplicaReport:
    """The report of a replica that has answered so many requests, each with one step, and has one waiting."""
    metrics = Metrics()
    metrics.prompt_tokens.labels("m").inc(count)
    metrics.running.labels("m").set(1)
    metrics.step_tokens.labels("m").observe(1, count=count)
    statistics = ModelStatistics()
    statistics.inference_count = count
    return ReplicaReport(
        replica=replica,
        versions={KEY: VersionReport(statistics=statistics, num_waiting=1)},
        metrics=list(metrics.registry.collect()),
    )


def counted(reports: Sequence[ReplicaReport]) -> dict[str, float]:
    names = {
        "genserve_prompt_tokens_total", "genserve_iteration_tokens_count", "genserve_num_requests_running"
    }  # fmt: skip
    samples = {
        sample.name: sample.value
        for family in merged(report.metrics for report in reports)
        for sample in family.samples
        if sample.name in names
    }
    versions = [report.versions[KEY] for report in reports if KEY in report.versions]
    return samples | {
        "inferences": sum(version.statistics.inference_count for version in versions),
        "waiting": sum(version.num_waiting for version in versions),
    }


def expected(count: int, *, num_alive: int) -> dict[str, float]:
    sums = dict.fromkeys(
        ("genserve_prompt_tokens_total", "genserve_iteration_tokens_count", "inferences"), count
    )
    return sums | dict.fromkeys(("genserve_num_requests_running", "waiting"), num_alive)


def test_an_ended_replica_leaves_its_counts_and_no_gauges() -> None:
    reports = ReplicaReports()
    assert counted(reports.update([report("a", count=3), report("b", count=4)])) == expected(7, num_alive=2)
    assert counted(reports.update([report("b", count=5)])) == expected(8, num_alive=1)
    assert counted(reports.update([report("b", count=6), report("c", count=1)])) == expected(10, num_alive=2)


def test_a_replica_that_was_late_is_not_counted_twice() -> None:
    reports = ReplicaReports()
    reports.update([report("a", count=3), report("b", count=4)])
    reports.update([report("b", count=4)])
    assert counted(reports.update([report("a", count=5), report("b", count=4)])) == expected(9, num_alive=2)


def test_many_replicas_that_have_ended_are_one_sum() -> None:
    reports = ReplicaReports()
    for number in range(100):
        answers = reports.update([report(str(number), count=2)])
    assert counted(answers) == expected(200, num_alive=1)
    assert len(answers) < 40


def test_a_histogram_with_other_buckets_is_left_out() -> None:
    before, after = ModelStatistics(), ModelStatistics()
    before.first_response, after.first_response = Histogram([1, 2]), Histogram([5])
    before.first_response.observe(1)
    after.first_response.observe(1)
    after.add(before)
    assert after.first_response.read() == ([(5, 1), (float("inf"), 1)], 1.0)
