"""OpenTelemetry spans of a live server, received by real collectors."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import httpx2
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from genserve.errors import GenserveError, MissingDependency
from genserve.server.observe.request_spans import RequestSpans
from tests.server.otlp_collectors import Collector, GrpcCollector, HttpCollector, attributes_of
from tests.support.live_server import LiveServer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER_KIND, ERROR = 2, 2       # opentelemetry.proto.trace.v1.Span.SpanKind, Status.StatusCode


@dataclass
class Traced:
    server: LiveServer
    collector: Collector
    http: httpx2.Client

    def post(self, path: str, body: dict, request_id: str, **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body, headers={"x-request-id": request_id, **headers})


@pytest.fixture(scope="module", params=[GrpcCollector, HttpCollector])
def traced(request, tiny_repository) -> Iterator[Traced]:
    with request.param() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")   # milliseconds
        with (
            LiveServer(tiny_repository, otlp_traces_endpoint=collector.endpoint) as server,
            httpx2.Client(base_url=server.url, timeout=60) as http,
        ):
            yield Traced(server, collector, http)


def test_a_request_is_one_span_with_the_conventions_of_generative_ai(traced):
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "swordfish"}], "max_tokens": 4, "n": 2,
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["never"], "ignore_eos": True,
    }  # fmt: skip
    usage = traced.post("/v1/chat/completions", body, "whole").json()["usage"]
    span = traced.collector.span("whole")
    attributes = attributes_of(span)
    latencies = {key: value for key, value in attributes.items() if key.startswith("gen_ai.latency.")}
    assert {key: value for key, value in attributes.items() if key not in latencies} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "genserve",
        "gen_ai.request.id": "whole",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["never"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    assert (span.name, span.kind, span.parent_span_id) == ("chat tiny", SERVER_KIND, b"")
    times = {key.removeprefix("gen_ai.latency."): value for key, value in latencies.items()}
    assert times["time_in_model_inference"] == pytest.approx(
        times["time_in_model_prefill"] + times["time_in_model_decode"]
    )
    assert times["time_to_first_token"] == pytest.approx(
        times["time_in_queue"] + times["time_in_model_prefill"]
    )
    assert 0 < times["time_to_first_token"] < times["e2e"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(times["e2e"], abs=0.05)
    assert "swordfish" not in str(traced.collector.spans)
    assert traced.collector.resources[0]["service.name"] == "genserve"


def test_a_span_continues_the_trace_of_the_client(traced):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    body = {"prompt": "a b c", "max_tokens": 3, "stream": True}
    assert traced.post("/v1/completions", body, "streamed", **headers).status_code == 200
    span = traced.collector.span("streamed")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    attributes = attributes_of(span)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.stream"] is True
    first_s = attributes["gen_ai.latency.time_to_first_token"]
    assert attributes["gen_ai.response.time_to_first_chunk"] == first_s


def test_a_client_that_does_not_sample_gets_no_span(traced):
    body = {"prompt": "a b c", "max_tokens": 1}
    traced.post("/v1/completions", body, "unsampled", traceparent=f"00-{TRACE}-{PARENT}-00")
    traced.post("/v1/completions", body, "sampled", traceparent="nonsense")
    assert len(traced.collector.span("sampled").trace_id) == 16
    assert "unsampled" not in {attributes_of(span)["gen_ai.request.id"] for span in traced.collector.spans}


@pytest.mark.parametrize("model", ["nobody", "x" * 1000])
def test_a_rejected_request_is_a_span_with_an_error(traced, model):
    request_id = f"rejected-{len(model)}"
    answer = traced.post("/v1/completions", {"model": model, "prompt": "a"}, request_id)
    assert answer.status_code == 404
    span = traced.collector.span(request_id)
    assert (span.status.code, attributes_of(span)["error.type"]) == (ERROR, "model_not_found")
    assert len(span.name) < 300


def test_only_requests_for_text_have_spans(traced):
    traced.http.get("/v1/models", headers={"x-request-id": "models"})
    body = {"text_input": "a b", "max_tokens": 2, "random_seed": 2**64 - 1}
    traced.post("/v2/models/tiny/generate", body, "kserve")
    assert attributes_of(traced.collector.span("kserve"))["gen_ai.usage.output_tokens"] in (1, 2)
    assert "models" not in {attributes_of(span)["gen_ai.request.id"] for span in traced.collector.spans}


def test_a_request_over_grpc_is_a_span_too(traced):
    text = service_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"a b c")
    request = service_pb2.ModelInferRequest(model_name="tiny", id="grpc", inputs=[text])
    metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
    with grpc.insecure_channel(traced.server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert [*stub.ModelStreamInfer(iter([request]), metadata=metadata)]
    span = traced.collector.span("grpc")
    assert (span.name, span.parent_span_id.hex()) == ("text_completion tiny", PARENT)


def test_spans_are_sent_before_the_server_stops(tiny_repository):
    with GrpcCollector() as collector:
        with LiveServer(tiny_repository, otlp_traces_endpoint=collector.endpoint) as server:
            body = {"prompt": "a", "max_tokens": 1}
            httpx2.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "last"})
        assert [attributes_of(span)["gen_ai.request.id"] for span in collector.spans] == ["last"]


def test_a_collector_that_does_not_answer_hurts_no_request(tiny_repository, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")    # seconds
    monkeypatch.setattr("genserve.server.api_server._LAST_SPANS_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:      # connects, and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with LiveServer(tiny_repository, otlp_traces_endpoint=endpoint) as server:
            for _ in range(3):
                body = {"prompt": "a", "max_tokens": 2}
                assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert not server.thread.is_alive()


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://localhost:4317", "http://", "4317"])
def test_an_impossible_endpoint_is_rejected(endpoint):
    with pytest.raises(GenserveError, match=f"--otlp-traces-endpoint '{endpoint}'"):
        RequestSpans(endpoint)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingDependency) as caught:
        RequestSpans("http://localhost:4317")
    assert caught.value.remedy == "pip install 'genserve[otel]'"
