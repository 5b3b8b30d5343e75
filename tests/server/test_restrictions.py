"""Parts of the protocols that need a header, over HTTP and gRPC."""

from __future__ import annotations

import grpc
import httpx2
import pytest
import tritonclient.grpc as client
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.errors import GenserveError
from genserve.server.access_control import parse_restrictions
from genserve.server.routes.kserve import route_table
from tests.support.live_server import LiveServer
from tests.support.python_models import write_model

PARTS = {
    "health": ["GET /v2/health/ready", "GET /v2/models/one/ready", "GET /health"],
    "metadata": ["GET /v2", "GET /v2/models/one", "GET /v1/models", "GET /info", "GET /api/tags"],
    "inference": [
        "POST /v2/models/one/infer", "POST /v2/models/one/generate", "POST /v1/chat/completions",
        "POST /v1/completions", "POST /v1/responses", "GET /v1/responses/resp_1",
        "POST /generate", "POST /generate_stream", "POST /",
    ],
    "shared-memory": ["GET /v2/systemsharedmemory/status", "POST /v2/systemsharedmemory/unregister"],
    "model-config": ["GET /v2/models/one/config"],
    "model-repository": ["POST /v2/repository/index", "POST /v2/repository/models/one/load"],
    "statistics": ["GET /v2/models/stats", "GET /v2/models/one/versions/1/stats"],
    "trace": ["GET /v2/trace/setting", "GET /v2/models/one/trace/setting"],
    "logging": ["GET /v2/logging", "POST /v2/logging"],
}  # fmt: skip
CALLS = {
    "health": ["is_server_live", "is_server_ready"],
    "metadata": ["get_server_metadata"],
    "model-repository": ["get_model_repository_index"],
    "statistics": ["get_inference_statistics"],
    "shared-memory": ["get_system_shared_memory_status"],
    "trace": ["get_trace_settings"],
    "logging": ["get_log_settings"],
}
OPEN = ["GET /metrics", "GET /docs"]


@pytest.mark.parametrize("part", PARTS)
def test_only_restricted_parts_of_http_need_the_header(tmp_path, part):
    write_model(tmp_path, "one")
    words = (f"{part}:Admin-Key=secret",)
    with (
        LiveServer(tmp_path, http_restricted_api=words) as server,
        httpx2.Client(base_url=server.url) as http,
    ):
        for other, routes in {**PARTS, "": OPEN}.items():
            for method, path in map(str.split, routes):
                rejected = http.request(method, path)
                assert (rejected.status_code == 403) == (other == part), (method, path)
                assert http.request(method, path, headers={"admin-key": "secret"}).status_code != 403
                if other == part:
                    assert "This API is restricted, expecting header 'admin-key'" in rejected.text
                    assert http.request(method, path, headers={"admin-key": "secre"}).status_code == 403


@pytest.mark.parametrize("part", CALLS)
def test_only_restricted_parts_of_grpc_need_the_metadata(tmp_path, part):
    write_model(tmp_path, "one")
    with (
        LiveServer(tmp_path, grpc_restricted_protocol=(f"{part}:admin-key=secret",)) as server,
        client.InferenceServerClient(server.grpc_url) as triton,
    ):
        for other, calls in CALLS.items():
            for call in calls:
                getattr(triton, call)(headers={"triton-grpc-protocol-admin-key": "secret"})
                if other != part:
                    getattr(triton, call)()
                    continue
                with pytest.raises(client.InferenceServerException) as raised:
                    getattr(triton, call)()
                assert raised.value.status() == "StatusCode.UNAVAILABLE"
                assert raised.value.message() == (
                    "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
                )


def test_restricted_calls_and_streams_of_grpc_are_rejected(tmp_path):
    write_model(tmp_path, "one")
    words = ("inference,health,model-config:key=secret",)
    with (
        LiveServer(tmp_path, grpc_restricted_protocol=words) as server,
        grpc.insecure_channel(server.grpc_url) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        stub = client.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for rejected in (
            lambda: health.Check(health_pb2.HealthCheckRequest()),
            lambda: list(health.Watch(health_pb2.HealthCheckRequest())),
            lambda: stub.ModelInfer(client.service_pb2.ModelInferRequest(model_name="one")),
            lambda: list(stub.ModelStreamInfer(iter(()))),
            lambda: stub.ModelConfig(client.service_pb2.ModelConfigRequest(name="one")),
        ):
            with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
                rejected()


def test_every_route_of_kserve_belongs_to_a_part(tmp_path):
    write_model(tmp_path, "one")
    every = (f"{','.join(PARTS)}:key=secret",)
    with (
        LiveServer(tmp_path, http_restricted_api=every) as server,
        httpx2.Client(base_url=server.url) as http,
    ):
        for route in route_table():
            path = route.path.partition("[")[0].replace("{model}", "one")
            if route.path.startswith("/v2/repository"):
                path = "/v2/repository" + route.path.rpartition("]")[2].replace("{model}", "one")
            elif "]/" in route.path:
                path += route.path.rpartition("]")[2]
            assert http.request(route.method, path).status_code == 403, path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["health"], "must have the form"),
        (["health:key"], "must have the form"),
        (["health:=secret"], "must have the form"),
        (["health:key=schlüssel"], "in printable ASCII"),
        (["helth:key=secret"], "'helth' is not a part of the protocol that can be restricted"),
        (["trace:bad header=secret"], "must have the form"),
        (["trace:admin-key =secret"], "must have the form"),
        (["health,trace:key=secret", "trace:other=secret"], "'trace' is restricted twice"),
    ],
)
def test_an_invalid_restriction_is_rejected_without_its_secret(words, message):
    with pytest.raises(GenserveError, match=message) as raised:
        parse_restrictions(words)
    assert "secret" not in str(raised.value)
    assert "schl" not in str(raised.value)
