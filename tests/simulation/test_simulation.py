"""Simulated servers with their faults: no violation in any seed, and equal runs of equal seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.runner import failure_line, fingerprints, summary_of
from tests.support.representatives import with_extended

NUM_SEEDS = 1000
PART = 100
ALWAYS = 100  # seeds of every run of the tests


@pytest.mark.parametrize("first", with_extended(range(0, NUM_SEEDS, PART), always=range(ALWAYS)))
def test_no_seed_violates_an_invariant(first):
    summary = summary_of(range(first, first + PART))
    assert [failure_line(outcome) for outcome in summary.failed] == []
    assert summary.num_requests > 2 * PART
    assert summary.faults.total() > PART


def test_a_seed_replays_exactly_in_another_process():
    code = "from tests.simulation.runner import fingerprints; print(fingerprints(range(15)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    found = str(fingerprints(range(15)))
    assert run.stdout == f"{found}\n"
    assert len(set(found.split())) > 10
