"""Simulated servers with their faults: no violation in any seed, and equal runs of equal seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.runner import failure_line, summary_of

NUM_SEEDS = 1000
PART = 100


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PART))
def test_no_seed_violates_an_invariant(first):
    summary = summary_of(range(first, first + PART))
    assert [failure_line(outcome) for outcome in summary.failed] == []
    assert summary.num_requests > 2 * PART
    assert summary.faults.total() > PART


def test_a_seed_replays_exactly_in_another_process():
    code = "from tests.simulation.runner import fingerprints; print(fingerprints(range(40)))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert len(set(runs[0].stdout.split())) > 30
