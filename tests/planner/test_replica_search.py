from __future__ import annotations

import math
from dataclasses import replace

import pytest

from genserve.planner.loads import Lengths
from genserve.planner.plan import FleetMetrics, FleetTarget, search, simulate
from genserve.planner.simulated_replica import ReplicaKind
from tests.planner.test_fleet import load

BUSY = load(rate=60.0, num_requests=200)
TARGETS = [
    FleetTarget(metric="ttft", rank=90.0, limit=300.0),
    FleetTarget(metric="rejected", rank=None, limit=0.0),
]


def found(kind: ReplicaKind, targets: list[FleetTarget], **options: int) -> list[FleetMetrics]:
    settings = {"max_replicas": 64, "num_processes": 1, **options}
    return search(kind, BUSY, targets, on_fleet=lambda _fleet: None, **settings)


def test_the_smallest_fleet_is_found_and_the_one_below_misses(kind: ReplicaKind) -> None:
    fleets = found(kind, TARGETS)
    smallest = next(fleet for fleet in fleets if not fleet.missed)
    below = next(fleet for fleet in fleets if fleet.num_replicas == smallest.num_replicas - 1)
    assert smallest.num_replicas > 2
    assert below.missed == ["ttft_p90"]
    assert below.ttft_ms[90.0] > 300 >= smallest.ttft_ms[90.0]
    assert [fleet.num_replicas for fleet in fleets] == sorted({fleet.num_replicas for fleet in fleets})


def test_several_processes_find_the_same(kind: ReplicaKind) -> None:
    def simulated(num_processes: int) -> list[FleetMetrics]:
        fleets = simulate(
            kind, BUSY, TARGETS, counts=[4, 6], num_processes=num_processes, on_fleet=lambda _fleet: None
        )
        return [replace(fleet, cpu_s=0.0) for fleet in fleets]

    assert simulated(2) == simulated(1)


@pytest.mark.parametrize("max_replicas", [1, 3])
def test_a_search_ends_at_its_most_replicas(kind: ReplicaKind, max_replicas: int) -> None:
    impossible = FleetTarget(metric="itl", rank=50.0, limit=0.001)
    fleets = found(kind, [impossible], max_replicas=max_replicas)
    assert fleets[-1].num_replicas == max_replicas
    assert all(fleet.missed == ["itl_p50"] for fleet in fleets)


def test_a_fleet_that_can_answer_nothing_misses_its_targets(kind: ReplicaKind) -> None:
    too_long = replace(BUSY, input_len=Lengths(mean=10_000))
    [fleet] = simulate(kind, too_long, TARGETS, counts=[1], num_processes=1, on_fleet=lambda _fleet: None)
    assert (fleet.too_long, fleet.missed) == (1.0, ["ttft_p90", "rejected"])


def test_figures_have_the_names_of_bench_reports(kind: ReplicaKind) -> None:
    [fleet] = simulate(kind, BUSY, TARGETS, counts=[8], num_processes=1, on_fleet=lambda _fleet: None)
    document = fleet.as_json()
    assert document["num_replicas"] == 8
    assert document["meets_targets"] is True
    assert {name for name in document if name.endswith("_ms")} == {
        "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms",
    }  # fmt: skip
    assert document["output_rate"] * document["simulated_s"] == pytest.approx(
        sum(len(request.answer) for request in BUSY.requests())
    )
    assert 0 < document["utilisation"] <= 1
    assert not math.isnan(document["p99_ttft_ms"])
