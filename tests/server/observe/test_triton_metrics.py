"""Triton's metrics of real instances, parsed by Prometheus' own parser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from genserve.errors import GenserveError
from genserve.inference import Inference, InferenceRequest
from genserve.server.observe.triton_metrics import CpuCollector, InferenceCollector, read_metrics_config
from genserve.tensor import Tensor
from tests.fakes.inference_server import FakeInferenceServer, fake_model
from tests.server.live_kserve import copy_models
from tests.support.live_server import LiveServer


def broken(inference: Inference) -> None:
    raise ValueError("boom")


@pytest.fixture
def inference_server() -> Iterator[FakeInferenceServer]:
    inference_server = FakeInferenceServer(
        [
            fake_model("tagged", max_batch_size=8, metric_tags={"team": "a"}),
            fake_model("broken", broken),
            fake_model("cached", response_cache=True),
        ]
    )
    yield inference_server
    inference_server.close()


def run(inference_server: FakeInferenceServer, model: str, *, batch: int = 1) -> None:
    ended = threading.Event()
    request = InferenceRequest(model_name=model, inputs={"X": Tensor("X", np.zeros((batch, 2), np.float32))})
    inference = Inference(request=request, on_response=lambda _response, final: final and ended.set())
    inference.batch_size = batch
    counted = threading.Event()
    inference.when_ended(lambda _: counted.set())
    inference_server.submit(inference)
    assert ended.wait(10)
    assert counted.wait(10)


def text(inference_server: FakeInferenceServer) -> str:
    return generate(InferenceCollector(inference_server))


def generate(collector: InferenceCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def value(page: str, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.removesuffix("_total") == name and sample.labels == labels
    ]
    return found


def test_requests_are_counted_by_model_version_and_tags(inference_server):
    run(inference_server, "tagged", batch=3)
    inference_server.close()  # the execution is counted after its requests are answered
    labels = {"_team": "a", "model": "tagged", "version": "1"}
    page = text(inference_server)
    assert value(page, "nv_inference_request_success", **labels) == 1
    assert value(page, "nv_inference_count", **labels) == 3
    assert value(page, "nv_inference_exec_count", **labels) == 1
    assert value(page, "nv_inference_pending_request_count", **labels) == 0
    assert value(page, "nv_model_load_duration_secs", **labels) == 0.25


def test_failures_are_counted_by_reason_with_every_reason_present_at_zero(inference_server):
    run(inference_server, "broken")
    page = text(inference_server)
    for reason, count in (("BACKEND", 1), ("REJECTED", 0), ("CANCELED", 0), ("OTHER", 0)):
        labels = {"model": "broken", "version": "1", "reason": reason}
        assert value(page, "nv_inference_request_failure", **labels) == count


def test_only_models_with_a_response_cache_have_cache_metrics(inference_server):
    families = {f.name: f for f in text_string_to_metric_families(text(inference_server))}
    hits = families["nv_cache_num_hits_per_model"].samples
    assert [sample.labels["model"] for sample in hits] == ["cached"]


def test_counters_have_tritons_names_and_help(inference_server):
    assert (
        "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes\n"
        "# TYPE nv_inference_request_success counter\n"
    ) in text(inference_server)
    assert "_total" not in text(inference_server)


def test_cpu_and_memory_of_the_machine_are_measured():
    registry = CollectorRegistry()
    registry.register(CpuCollector())
    page = generate_latest(registry).decode()
    assert 0 <= value(page, "nv_cpu_utilization") <= 1
    assert 0 < value(page, "nv_cpu_memory_used_bytes") < value(page, "nv_cpu_memory_total_bytes")


def test_cpu_use_is_measured_once_per_interval():
    collector = CpuCollector(interval_s=3600)
    first, second = ([metric.samples for metric in collector.collect()] for _ in range(2))
    assert first == second


def test_without_latency_counters_requests_are_still_counted(inference_server):
    run(inference_server, "tagged")
    page = generate(InferenceCollector(inference_server, latency_counters=False))
    assert value(page, "nv_inference_request_success", _team="a", model="tagged", version="1") == 1
    assert "_duration_us" not in page
    assert "nv_inference_queue_duration_us" in text(inference_server)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("summary_latencies=true", "histogram_latencies=true"),
        ("summary_quantiles=0.5:0.05", "histogram_latencies=true"),
        ("gauge_latencies=true", "counter_latencies=true|false or histogram_latencies=true|false"),
        ("counter_latencies=no", "counter_latencies=true|false"),
        ("counter_latencies", "counter_latencies=true|false"),
    ],
)
def test_unsupported_metrics_settings_are_rejected_by_name(word, remedy):
    with pytest.raises(GenserveError) as caught:
        read_metrics_config((word,))
    assert word in caught.value.message
    assert remedy in caught.value.remedy


def test_metrics_config_accepts_the_defaults():
    words = ("summary_latencies=false", "counter_latencies=true", "histogram_latencies=false")
    assert read_metrics_config(words) == read_metrics_config(())


HISTOGRAM = "nv_inference_first_response_histogram_ms"


def test_the_time_to_the_first_response_is_a_histogram_with_the_configs_buckets(tmp_path):
    copy_models(("fails", "pass", "repeat"), tmp_path)
    with (tmp_path / "repeat" / "config.pbtxt").open("a") as config:
        config.write(
            "model_metrics { metric_control { "
            f'metric_identifier {{ family: "{HISTOGRAM}" }} '
            "histogram_options { buckets: [ 0.0001, 60000 ] } } }"
        )
    words = ("histogram_latencies=true", "counter_latencies=false")
    with LiveServer(tmp_path, metrics_config=words, allow_cpu_metrics=False) as server:
        models = f"{server.url}/v2/models"
        assert httpx2.post(f"{models}/repeat/generate_stream", json={"N": 3}).status_code == 200
        assert httpx2.post(f"{models}/fails/generate", json={"MODE": "raise"}).status_code == 400
        page = httpx2.get(server.info.metrics_url).text
    labels = {"model": "repeat", "version": "1"}
    bounds = ("0.0001", "60000", "+Inf")
    counts = [value(page, f"{HISTOGRAM}_bucket", **labels, le=bound) for bound in bounds]
    assert counts == [0, 1, 1]      # counts the first of three responses
    assert value(page, f"{HISTOGRAM}_count", **labels) == 1
    assert value(page, f"{HISTOGRAM}_sum", **labels) > 0
    assert value(page, f"{HISTOGRAM}_count", model="fails", version="1") == 1
    assert value(page, f"{HISTOGRAM}_bucket", model="pass", version="1", le="5000") == 0
    assert "# TYPE nv_inference_first_response_histogram_ms histogram" in page
    assert "nv_cpu" not in page
    assert "_duration_us" not in page


FAILED = {"BACKEND": 0, "CANCELED": 0, "OTHER": 0, "REJECTED": 0}


def failures(page: str, model: str) -> dict[str, float]:
    name = "nv_inference_request_failure"
    return {reason: value(page, name, model=model, version="1", reason=reason) for reason in FAILED}


def test_each_failed_request_is_counted_once_by_its_reason(tmp_path):
    copy_models(("ensemble_fails", "fails", "identity_string", "queue_timed"), tmp_path)

    def infer(model: str, **tensors: Any) -> int:
        [(name, data)] = tensors.items()
        kind, shape = ("BYTES", [1]) if isinstance(data[0], str) else ("INT32", [1, 1])
        body = {"inputs": [{"name": name, "datatype": kind, "shape": shape, "data": data}]}
        return httpx2.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=30).status_code

    with LiveServer(tmp_path) as server:
        assert infer("fails", MODE=["INTERNAL"]) == 500
        assert infer("fails", MODE=["CANCELLED"]) == 400
        assert infer("ensemble_fails", MODE=["raise"]) == 500
        assert infer("fails", WRONG=["INTERNAL"]) == 400     # is not a request to the model yet
        assert infer("nobody", MODE=["INTERNAL"]) == 404
        with ThreadPoolExecutor() as pool:      # one runs, the other is too late when it could
            statuses = list(pool.map(lambda _: infer("queue_timed", SLEEP_MS=[900]), range(2)))
        assert sorted(statuses) == [200, 503]
        page = httpx2.get(server.info.metrics_url).text
    assert failures(page, "fails") == FAILED | {"BACKEND": 2, "CANCELED": 1}
    assert failures(page, "ensemble_fails") == FAILED | {"OTHER": 1}
    assert failures(page, "queue_timed") == FAILED | {"REJECTED": 1}
    assert "nobody" not in page     # only models that are served are labels
