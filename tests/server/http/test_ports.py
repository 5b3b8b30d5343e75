"""The ports of one server: HTTP, gRPC and metrics over the same models, opened and closed together."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc as client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnx import TensorProto

from genserve.errors import GenserveError, InferenceError
from genserve.server.api_server import Server
from genserve.settings import ServerSettings
from tests.backends.networks import save_onnx
from tests.support.live_server import LiveServer, wait_until

CONFIG = """
backend: "python"
input [{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }]
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * array)]) for array in tensors]
"""

WAITING = """
from pathlib import Path
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not Path(__file__).parents[2].joinpath("go").exists():
            time.sleep(0.001)
        return [pb_utils.InferenceResponse([]) for request in requests]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return with_model(tmp_path, "double", MODEL)


def with_model(repository: Path, name: str, code: str) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(code)
    return repository


def doubled(address: str) -> list[float]:
    x = client.InferInput("X", [2], "FP32")
    x.set_data_from_numpy(np.array([1, 2], np.float32))
    with client.InferenceServerClient(address) as triton:
        return triton.infer("double", [x]).as_numpy("Y").tolist()


def test_the_same_model_answers_over_grpc_and_is_counted_on_both_pages_of_metrics(repository):
    with LiveServer(repository) as server:
        assert doubled(server.info.grpc_address) == [2, 4]
        for page in (f"{server.url}/metrics", server.info.metrics_url):
            assert 'nv_inference_request_success{model="double",version="1"} 1.0' in httpx2.get(page).text
        addresses = (server.info.grpc_address, server.info.metrics_url.split("/")[2])
    for address in addresses:
        host, _, port = address.partition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


def test_ports_can_be_disabled(repository):
    with LiveServer(repository, allow_grpc=False, allow_metrics=False) as server:
        assert (server.info.grpc_address, server.info.metrics_url) == ("", "")


@pytest.mark.parametrize("setting", ["grpc_port", "metrics_port"])
def test_a_taken_port_ends_startup_with_a_remedy(repository, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, setting: taken.getsockname()[1]}
        with pytest.raises(GenserveError) as caught:
            Server(ServerSettings(model_repository=(repository,), **ports)).serve_until_stopped()
    assert f"--{setting.replace('_', '-')}" in caught.value.remedy


def test_a_failed_load_ends_startup_unless_exit_on_error_is_off(repository):
    with_model(repository, "broken", "class TritonPythonModel:\n    def initialize(self, args): 1 / 0\n")
    settings = ServerSettings(model_repository=(repository,), http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(InferenceError, match="ZeroDivisionError"):
        Server(settings).serve_until_stopped()
    with LiveServer(repository, exit_on_error=False, strict_readiness=False) as server:
        assert doubled(server.info.grpc_address) == [2, 4]
        with client.InferenceServerClient(server.info.grpc_address) as triton:
            assert triton.is_server_ready()
        states = {line.name: line.state for line in server.info.versions}
        assert states == {"broken": "UNAVAILABLE", "double": "READY"}


SLOW = """
import threading
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])

    def is_ready(self):
        (self.folder / "asked").touch()
        while not (self.folder / "go").exists():
            threading.Event().wait(0.01)
        return True
"""


@pytest.mark.parametrize("route", ["/v2/health/ready", "/health", "/v2/models/slow/ready"])
def test_a_slow_readiness_check_blocks_no_other_request(repository, route):
    folder = with_model(repository, "slow", SLOW) / "slow"
    with LiveServer(repository) as server, ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(httpx2.get, server.url + route), None
        wait_until((folder / "asked").exists)
        second = pool.submit(_health, server.info.grpc_address)
        assert httpx2.get(f"{server.url}/v2/health/live").status_code == 200
        assert not first.done()
        (folder / "go").touch()
        assert first.result().status_code == 200
        assert second.result() == health_pb2.HealthCheckResponse.SERVING


def test_a_hanging_readiness_check_means_not_ready(repository, monkeypatch):
    monkeypatch.setattr("genserve.server.services._READINESS_TIMEOUT_S", 0.05)
    folder = with_model(repository, "slow", SLOW) / "slow"
    with LiveServer(repository) as server:
        assert httpx2.get(f"{server.url}/v2/health/ready").status_code == 400
        assert httpx2.get(f"{server.url}/v2/models/slow/ready").status_code == 400
        assert httpx2.get(f"{server.url}/v2/models/double/ready").status_code == 200
        assert _health(server.info.grpc_address) == health_pb2.HealthCheckResponse.NOT_SERVING
        (folder / "go").touch()


def _health(address):
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status


def test_with_explicit_control_only_requested_models_are_loaded(repository):
    with (
        LiveServer(repository, model_control_mode="explicit") as server,
        client.InferenceServerClient(server.info.grpc_address) as triton,
    ):
        assert not triton.is_model_ready("double")
        triton.load_model("double")
        assert triton.is_model_ready("double")
    with LiveServer(repository, model_control_mode="explicit", load_model=("*",)) as server:
        assert doubled(server.info.grpc_address) == [2, 4]


@pytest.mark.parametrize(("words", "size"), [((), 4), (("onnxruntime,default-max-batch-size=8",), 8)])
def test_default_max_batch_size_applies_to_graphs_that_can_batch(tmp_path, words, size):
    tensor = (TensorProto.FLOAT, ["batch", 3])
    graph = tmp_path / "same" / "1" / "model.onnx"
    save_onnx(graph, [("Identity", ["x"], ["y"], {})], inputs={"x": tensor}, outputs={"y": tensor})
    with LiveServer(tmp_path, backend_config=words) as server:
        config = httpx2.get(f"{server.url}/v2/models/same/config").json()
    assert config["max_batch_size"] == size


def test_servers_can_share_ports(repository):
    settings = {"reuse_http_port": True, "reuse_grpc_port": True}
    with LiveServer(repository, **settings) as first:
        grpc_port = int(first.grpc_url.partition(":")[2])
        with LiveServer(repository, http_port=first.port, grpc_port=grpc_port, **settings) as second:
            assert (second.url, second.grpc_url) == (first.url, first.grpc_url)
        assert doubled(first.grpc_url) == [2, 4]
        with pytest.raises(GenserveError, match="--http-port"):
            Server(
                ServerSettings(model_repository=(repository,), http_port=first.port)
            ).serve_until_stopped()


def test_a_grpc_connection_ends_at_its_maximum_age(tmp_path):
    with_model(tmp_path, "double", WAITING)
    ages = {"grpc_max_connection_age": 50, "grpc_max_connection_age_grace": 50}
    with LiveServer(tmp_path, **ages) as server:
        with pytest.raises(client.InferenceServerException) as raised:
            doubled(server.grpc_url)
        (tmp_path / "go").touch()
    assert raised.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")


class Relay:
    """Passes one connection on to a server, and counts the bytes that come back."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.num_received = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = (host, int(port))
        self._pool = ThreadPoolExecutor(2)
        self._passed = self._pool.submit(self._accept)

    def _accept(self) -> None:
        here, _ = self._listener.accept()
        with here, socket.create_connection(self._target) as there:
            back = self._pool.submit(self._pass_on, here, there)
            self.num_received = self._pass_on(there, here)
            back.result()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> int:
        num_bytes = 0
        with suppress(OSError):     # either end may be closed first
            while data := source.recv(65536):
                num_bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        return num_bytes

    def close(self) -> None:
        self._passed.result()
        self._pool.shutdown()
        self._listener.close()


@pytest.mark.parametrize(("level", "is_small"), [("none", False), ("medium", True)])
def test_grpc_responses_are_compressed_at_the_given_level(repository, level, is_small):
    with LiveServer(repository, grpc_infer_response_compression_level=level) as server:
        relay = Relay(server.grpc_url)
        x = client.InferInput("X", [100_000], "FP32")
        x.set_data_from_numpy(np.zeros(100_000, np.float32))
        with client.InferenceServerClient(relay.address) as triton:
            assert triton.infer("double", [x]).as_numpy("Y").sum() == 0
        relay.close()
    assert (relay.num_received < 40_000) == is_small
