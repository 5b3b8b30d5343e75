"""Parts of the protocols that need a header, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import grpc
import httpx2
import pytest
import tritonclient.grpc as client
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.errors import GenserveError
from genserve.server.access.access_control import parse_restrictions
from genserve.server.kserve.routes import ROUTES
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


METADATA_OF = "triton-grpc-protocol-"


def key_of(part: str) -> dict[str, str]:
    return {f"key-{part}": f"secret-{part}"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("restricted")
    write_model(root, "one")
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[LiveServer]:
    """Every part needs a header of its own."""
    words = [f"{part}:Key-{part}=secret-{part}" for part in PARTS]
    with LiveServer(repository, http_restricted_api=words, grpc_restricted_protocol=words) as server:
        yield server


@pytest.mark.parametrize("part", PARTS)
def test_a_restricted_part_of_http_needs_its_header(server: LiveServer, part: str) -> None:
    others = {name: value for other in PARTS if other != part for name, value in key_of(other).items()}
    with httpx2.Client(base_url=server.url) as http:
        for method, path in map(str.split, PARTS[part]):
            rejected = http.request(method, path, headers=others)
            assert rejected.status_code == 403, path
            assert f"This API is restricted, expecting header 'key-{part}'" in rejected.text
            wrong = {f"key-{part}": f"secret-{part[:-1]}"}
            assert http.request(method, path, headers=wrong).status_code == 403, path
            assert http.request(method, path, headers=key_of(part)).status_code != 403, path


@pytest.mark.parametrize("part", CALLS)
def test_a_restricted_part_of_grpc_needs_its_metadata(server: LiveServer, part: str) -> None:
    others = {
        METADATA_OF + name: value for other in PARTS if other != part for name, value in key_of(other).items()
    }
    with client.InferenceServerClient(server.grpc_url) as triton:
        for call in CALLS[part]:
            getattr(triton, call)(headers={METADATA_OF + name: key for name, key in key_of(part).items()})
            with pytest.raises(client.InferenceServerException) as raised:
                getattr(triton, call)(headers=others)
            assert raised.value.status() == "StatusCode.UNAVAILABLE"
            assert raised.value.message() == (
                f"This protocol is restricted, expecting header '{METADATA_OF}key-{part}'"
            )


def test_parts_without_a_restriction_need_no_header(repository: Path) -> None:
    words = ("trace:admin-key=secret",)
    with (
        LiveServer(repository, http_restricted_api=words, grpc_restricted_protocol=words) as server,
        httpx2.Client(base_url=server.url) as http,
        client.InferenceServerClient(server.grpc_url) as triton,
    ):
        for part, routes in {**PARTS, "": OPEN}.items():
            for method, path in map(str.split, routes):
                assert (http.request(method, path).status_code == 403) == (part == "trace"), path
        for part, calls in CALLS.items():
            for call in calls:
                with pytest.raises(client.InferenceServerException) if part == "trace" else nullcontext():
                    getattr(triton, call)()


def test_restricted_calls_and_streams_of_grpc_are_rejected(server: LiveServer) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
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


def test_every_route_of_kserve_belongs_to_a_part(server: LiveServer) -> None:
    with httpx2.Client(base_url=server.url) as http:
        for route in ROUTES:
            path = route.path.partition("[")[0].replace("{model}", "one")
            if route.path.startswith("/v2/repository"):
                path = "/v2/repository" + route.path.rpartition("]")[2].replace("{model}", "one")
            elif "]/" in route.path:
                path += route.path.rpartition("]")[2]
            assert http.request(route.method, path).status_code == 403, path


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["health"], ""),
        (["health:key"], ""),
        (["health:=secret"], ""),
        (["health:key=schlüssel"], ""),
        (["helth:key=secret"], "'helth'"),
        (["trace:bad header=secret"], ""),
        (["trace:admin-key =secret"], ""),
        (["health,trace:key=secret", "trace:other=secret"], "'trace'"),
    ],
)
def test_an_invalid_restriction_is_rejected_without_its_secret(words, named):
    with pytest.raises(GenserveError) as raised:
        parse_restrictions(words)
    assert named in raised.value.message
    assert "secret" not in str(raised.value)
    assert "schl" not in str(raised.value)
