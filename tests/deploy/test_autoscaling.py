"""How many replicas a load needs."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.deploy.ray.autoscaling import (
    USAGE,
    WAITING_TOKENS,
    ScalingTargets,
    TokenLoadPolicy,
    num_replicas_for,
)

TARGETS = ScalingTargets(usage=0.8, waiting_tokens=1000)
usages = st.lists(st.floats(0, 1), min_size=1, max_size=8)
tokens = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("usages", "waiting", "needed"),
    [
        ([0.0], [0], 0),
        ([0.8], [0], 1),
        ([0.8, 0.8, 0.8], [0, 0, 0], 3),
        ([0.4, 0.0, 0.4], [0, 0, 0], 1),
        ([0.8], [2000], 3),
        ([0.0], [1500], 1.5),
    ],
)
def test_what_runs_needs_places_and_what_waits_needs_replicas_on_top(usages, waiting, needed):
    assert num_replicas_for(usages, waiting, targets=TARGETS) == pytest.approx(needed)


@given(usages, tokens, st.floats(0.01, 1), st.floats(1, 1e5))
def test_more_load_never_needs_fewer_replicas(usages, waiting, more_usage, more_tokens):
    least = num_replicas_for(usages, waiting, targets=TARGETS)
    assert num_replicas_for([*usages, more_usage], waiting, targets=TARGETS) > least
    assert num_replicas_for(usages, [*waiting, more_tokens], targets=TARGETS) >= least


@given(st.integers(1, 8))
def test_replicas_at_their_target_are_as_many_as_needed(count):
    assert num_replicas_for([0.8] * count, [0.0] * count, targets=TARGETS) == pytest.approx(count)


@pytest.mark.parametrize("targets", [{"usage": 0}, {"usage": 1.2}, {"waiting_tokens": 0}])
def test_targets_out_of_range_are_rejected(targets):
    with pytest.raises(ValueError, match="target_"):
        ScalingTargets(**targets)


def deployment(metrics, *, target: int = 2):
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)


def test_the_policy_reads_the_statistics_of_all_replicas():
    policy = TokenLoadPolicy(target_usage=0.5, target_waiting_tokens=100)
    metrics = {USAGE: {"a": 0.5, "b": 0.25}, WAITING_TOKENS: {"a": 50.0, "b": 0.0}}
    assert policy(deployment(metrics)) == (2.0, {})


@pytest.mark.parametrize("metrics", [None, {}, {USAGE: {}}])
def test_before_the_first_statistics_the_number_of_replicas_stays(metrics):
    assert TokenLoadPolicy()(deployment(metrics, target=2)) == (2, {})


def test_the_policy_is_a_module_that_serve_copies_without_the_rest_of_genserve():
    program = (
        "import sys\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "spec = spec_from_file_location('copied', sys.argv[1])\n"
        "module = module_from_spec(spec); sys.modules['copied'] = module; spec.loader.exec_module(module)\n"
        "assert not [name for name in sys.modules if name.startswith('genserve')]\n"
        "print(module.num_replicas_for([1.0], [], targets=module.ScalingTargets(usage=0.5)))"
    )
    path = sys.modules[TokenLoadPolicy.__module__].__file__
    command = [sys.executable, "-c", program, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2.0\n"
