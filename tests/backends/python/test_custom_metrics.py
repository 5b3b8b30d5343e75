from __future__ import annotations

import gc
import json

from prometheus_client import generate_latest

from tests.backends.python.models import floats

HOLDS = """
    class TritonPythonModel:
        def initialize(self, args):
            self.held = []
        def execute(self, requests):
            M = pb_utils.MetricFamily
            results = []
            def record(act):
                try:
                    return results.append(act())
                except pb_utils.TritonModelException as error:
                    results.append(str(error))
"""
BY = "Failed to process the request for model 'm_0', message: "


def run(models, body, name="m"):
    lines = "".join(f"\n            {line}" for line in body.splitlines())
    tail = "\n            return [answer(np.array([json.dumps(results)], dtype=object))]"
    models.add(name, HOLDS + lines + tail)
    return json.loads(models.infer(name, floats(1)).array[0])


def page(models, word):
    text = generate_latest(models.metrics.registry).decode()
    return [line for line in text.splitlines() if word in line]


def test_a_metric_name_of_the_server_is_rejected(models):
    models.metrics.prompt_tokens.labels("m").inc()
    results = run(
        models,
        """
record(lambda: M("genserve_requests", "", M.GAUGE) and None)
record(lambda: M("genserve_prompt_tokens_total", "", M.COUNTER) and None)
record(lambda: M("vllm:prompt_tokens_total", "", M.COUNTER) and None)
record(lambda: self.held.append(M("requests", "", M.GAUGE)))
record(lambda: self.held.append(M("requests", "", M.GAUGE)))""",
    )
    rejected = f"Error when creating MetricFamily: {BY}Family name already exists with different type"
    assert results == [rejected, rejected, rejected, None, None]


def test_a_counter_keeps_its_name(models):
    results = run(
        models,
        "c = M(name='c1', description='d', kind=M.COUNTER).Metric(labels={'a': '1'})\n"
        "self.held.append(c)\n"
        "for act in [lambda: c.increment(2), c.value, lambda: c.set(3), lambda: c.observe(3),"
        " lambda: c.increment(-1)]: record(act)",
    )
    assert results == [
        None,
        2.0,
        f"Failed to set metric value: {BY}TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
        f"Failed to observe metric value: {BY}TRITONSERVER_METRIC_KIND_COUNTER does not support Observe",
        f"Failed to increment metric value: {BY}TRITONSERVER_METRIC_KIND_COUNTER can only be incremented "
        "monotonically by non-negative values.",
    ]
    assert page(models, "c1") == ["# HELP c1 d", "# TYPE c1 counter", 'c1{a="1"} 2.0']


def test_a_gauge_increases_and_decreases(models):
    results = run(
        models,
        "g = M(name='g1', description='d', kind=M.GAUGE).Metric()\n"
        "self.held.append(g)\n"
        "for act in [lambda: g.set(3), lambda: g.increment(-1), g.value, lambda: g.observe(1)]: record(act)",
    )
    assert results[:3] == [None, None, 2.0]
    assert results[3].endswith("TRITONSERVER_METRIC_KIND_GAUGE does not support Observe")
    assert page(models, "g1") == ["# HELP g1 d", "# TYPE g1 gauge", "g1 2.0"]


def test_a_histogram_counts_in_buckets(models):
    results = run(
        models,
        "h = M(name='h1', description='d', kind=M.HISTOGRAM).Metric(labels={'a': '1'}, buckets=[1.0, 2.0])\n"
        "self.held.append(h)\n"
        "for act in [lambda: h.observe(1.5), lambda: h.observe(2), h.value, lambda: h.increment(1),"
        " lambda: h.set(1)]: record(act)",
    )
    assert (
        results[2]
        == f"Failed to get metric value: {BY}TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"
    )
    assert page(models, "h1") == [
        "# HELP h1 d",
        "# TYPE h1 histogram",
        'h1_count{a="1"} 2.0',
        'h1_sum{a="1"} 3.5',
        'h1_bucket{a="1",le="1.0"} 0.0',
        'h1_bucket{a="1",le="2.0"} 2.0',
        'h1_bucket{a="1",le="+Inf"} 2.0',
    ]


def test_an_invalid_metric_is_rejected_in_tritons_words(models):
    results = run(
        models,
        "c = M('c2', 'd', M.COUNTER)\n"
        "h = M('h2', 'd', M.HISTOGRAM)\n"
        "for act in [\n"
        "    lambda: M('c2', 'd', M.GAUGE), lambda: M('0 bad', 'd', M.GAUGE), lambda: M('', 'd', M.GAUGE),\n"
        "    lambda: c.Metric(labels=[1]), lambda: c.Metric(labels={'a': 1}),\n"
        "    lambda: c.Metric(labels={'a b': 'x'}),\n"
        "    lambda: c.Metric(buckets=[1.0]), lambda: h.Metric(), lambda: h.Metric(buckets=(1.0,)),\n"
        "    lambda: h.Metric(buckets=[2.0, 1.0]),\n"
        "]: record(act)",
    )
    family, metric = f"Error when creating MetricFamily: {BY}", f"Error when creating Metric: {BY}"
    assert results == [
        f"{family}Family name already exists with different type",
        f"{family}Invalid metric name",
        f"{family}Invalid metric name",
        "Failed to create metric. Labels must be a dictionary.",
        f"{metric}attempt to access JSON non-string as string",
        f"{metric}Invalid label name",
        "Failed to create metric. Unexpected buckets found.",
        "Failed to create metric. Missing required buckets.",
        "Failed to create metric. Buckets must be a list.",
        f"{metric}Bucket Boundaries must be strictly sorted",
    ]


def test_two_models_share_a_family_and_a_metric(models):
    body = (
        "c = M('c3', 'd', M.COUNTER).Metric(labels={'a': '1', 'b': '2'})\n"
        "self.held.append(c)\n"
        "c.increment(1)\n"
        "results.append(c.value())"
    )
    assert [run(models, body, "m"), run(models, body, "n")] == [[1.0], [2.0]]
    assert page(models, "c3{") == ['c3{a="1",b="2"} 2.0']


def test_metrics_are_removed_with_their_model(models):
    run(models, "c = M('c4', 'd', M.COUNTER).Metric()\nself.held.append(c)")
    assert page(models, "c4")
    models.stop("m")
    gc.collect()
    assert not page(models, "c4")
