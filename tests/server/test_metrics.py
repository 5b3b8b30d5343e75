"""Triton's families: over real instances, parsed by Prometheus' own parser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from genserve.errors import GenserveError
from genserve.inference import Inference, InferenceRequest
from genserve.server.access import AccessControl
from genserve.server.metrics import CpuCollector, InferenceCollector
from genserve.server.metrics_port import MetricsPort, _Handler
from genserve.settings import ServerSettings
from genserve.tensor import Tensor
from tests.fakes.door import FakeDoor, fake_model


def broken(inference: Inference) -> None:
    raise ValueError("boom")


@pytest.fixture
def door() -> Iterator[FakeDoor]:
    door = FakeDoor(
        [
            fake_model("tagged", max_batch_size=8, metric_tags={"team": "a"}),
            fake_model("broken", broken),
            fake_model("cached", response_cache=True),
        ]
    )
    yield door
    door.close()


def run(door: FakeDoor, model: str, *, batch: int = 1) -> None:
    ended = threading.Event()
    request = InferenceRequest(model_name=model, inputs={"X": Tensor("X", np.zeros((batch, 2), np.float32))})
    inference = Inference(request=request, on_response=lambda _response, final: final and ended.set())
    inference.batch_size = batch
    counted = threading.Event()
    inference.when_ended(lambda _: counted.set())
    door.submit(inference)
    assert ended.wait(10)
    assert counted.wait(10)


def text(door: FakeDoor) -> str:
    registry = CollectorRegistry()
    registry.register(InferenceCollector(door))
    return generate_latest(registry).decode()


def value(page: str, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.removesuffix("_total") == name and sample.labels == labels
    ]
    return found


def test_requests_are_counted_by_model_version_and_tags(door):
    run(door, "tagged", batch=3)
    door.close()  # the execution is counted after its requests are answered
    labels = {"_team": "a", "model": "tagged", "version": "1"}
    page = text(door)
    assert value(page, "nv_inference_request_success", **labels) == 1
    assert value(page, "nv_inference_count", **labels) == 3
    assert value(page, "nv_inference_exec_count", **labels) == 1
    assert value(page, "nv_inference_pending_request_count", **labels) == 0
    assert value(page, "nv_model_load_duration_secs", **labels) == 0.25


def test_failures_are_counted_by_reason_and_every_reason_is_there_from_the_start(door):
    run(door, "broken")
    page = text(door)
    for reason, count in (("BACKEND", 1), ("REJECTED", 0), ("CANCELED", 0), ("OTHER", 0)):
        labels = {"model": "broken", "version": "1", "reason": reason}
        assert value(page, "nv_inference_request_failure", **labels) == count


def test_only_models_with_a_response_cache_have_its_families(door):
    families = {f.name: f for f in text_string_to_metric_families(text(door))}
    hits = families["nv_cache_num_hits_per_model"].samples
    assert [sample.labels["model"] for sample in hits] == ["cached"]


def test_counters_have_tritons_names_and_help(door):
    assert (
        "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes\n"
        "# TYPE nv_inference_request_success counter\n"
    ) in text(door)
    assert "_total" not in text(door)


def test_the_machine_is_measured():
    registry = CollectorRegistry()
    registry.register(CpuCollector())
    page = generate_latest(registry).decode()
    assert 0 <= value(page, "nv_cpu_utilization") <= 1
    assert 0 < value(page, "nv_cpu_memory_used_bytes") < value(page, "nv_cpu_memory_total_bytes")


def open_port(render: Callable[[], bytes], *, port: int = 0) -> MetricsPort:
    host = "127.0.0.1"
    return MetricsPort(render, host=host, port=port, access=AccessControl(ServerSettings(), host=host))


def test_the_metrics_port_answers_metrics_and_nothing_else():
    import httpx2

    port = open_port(lambda: b"a 1\n")
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port.port}") as http:
            answer = http.get("/metrics")
            assert (answer.text, answer.headers["content-type"].split(";")[0]) == ("a 1\n", "text/plain")
            assert (http.get("/other").status_code, http.get("/other").text) == (200, "")
        with pytest.raises(GenserveError, match="for metrics") as caught:
            open_port(lambda: b"", port=port.port)
        assert "--metrics-port" in caught.value.remedy
    finally:
        port.close()


def test_whoever_keeps_connections_of_the_metrics_port_open_takes_no_more_threads(monkeypatch):
    monkeypatch.setattr("genserve.server.metrics_port._MAX_CONNECTIONS", 2)
    port = open_port(lambda: b"x 1\n")
    try:
        idle = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", port.port)) as one_too_many:
            assert one_too_many.recv(1) == b""
        for connection in idle:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert connection.makefile("rb").read().endswith(b"x 1\n")
            connection.close()
    finally:
        port.close()


def test_the_metrics_port_closes_a_connection_that_asks_nothing(monkeypatch):
    monkeypatch.setattr(_Handler, "timeout", _Handler.timeout / 200)
    port = open_port(lambda: b"")
    try:
        with socket.create_connection(("127.0.0.1", port.port)) as idle:
            assert idle.recv(1) == b""
    finally:
        port.close()
