"""Models of other kinds behind an ingress answer KServe's requests as in a single server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_inference import RemoteInference
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import InferenceItem
from genserve.inference import InferenceRequest, InferenceResponse
from genserve.server.kserve.running_inference import ResponseDispatcher, RunningInference
from tests.deploy.test_ingress import shown
from tests.fakes.local_replicas import LocalReplicas
from tests.support.live_ingress import LiveIngress
from tests.support.live_server import LiveServer, wait_until
from tests.support.python_models import write_model

RESHAPING = """
    backend: "python"
    max_batch_size: 4
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] reshape: { shape: [ 1, 2 ] } } ]
    output [ {
        name: "Y" data_type: TYPE_FP32 dims: [ 2 ] reshape: { shape: [ 1, 2 ] } label_filename: "labels.txt"
    } ]
"""
DECOUPLED = """
    backend: "python"
    model_transaction_policy { decoupled: true }
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
COUNTING = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                for number in range(int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])):
                    y = pb_utils.Tensor("Y", np.array([number], dtype=np.float32))
                    sender.send(pb_utils.InferenceResponse([y]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILING = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            raise pb_utils.TritonModelException("out of luck")
"""
OF_ITS_OWN = """
    import triton_python_backend_utils as pb_utils
    from genserve.errors import InferenceError

    class OutOfLuck(InferenceError):
        pass

    class TritonPythonModel:
        def execute(self, requests):
            error = OutOfLuck("out of luck")
            error.tool = OutOfLuck
            raise error
"""
WAITING = """
    import time
    from pathlib import Path
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            folder = Path(__file__).parent
            (folder / "begun").touch()
            while not requests[0].is_cancelled():
                time.sleep(0.01)
            (folder / "cancelled").touch()
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError("cancelled"))]
"""
CALLING = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            x = pb_utils.get_input_tensor_by_name(requests[0], "X")
            called = pb_utils.InferenceRequest(model_name="add", requested_output_names=["Y"], inputs=[x])
            return [pb_utils.InferenceResponse(called.exec().output_tensors())]
"""
CHAIN = """
    platform: "ensemble"
    input [ { name: "A" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "C" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [
        { model_name: "first" model_version: -1
          input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" } },
        { model_name: "add" model_version: -1
          input_map { key: "X" value: "B" } output_map { key: "Y" value: "C" } }
    ] }
"""
# The top-level models, with the models that their code calls.
DEPLOYED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "reshaping", "counting", "failing", "of_its_own", "waiting", "chain"), ()),
    "calling": ("add",),
}  # fmt: skip


def of(name: str, *values: float) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "FP32", "shape": [len(values)], "data": [*values]}]}


def batched(*values: float, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [*values]}], **more}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "add")
    write_model(root, "first", number=10)
    (write_model(root, "reshaping", config=RESHAPING) / "labels.txt").write_text("cat\ndog\n")
    write_model(root, "counting", code=COUNTING, config=DECOUPLED)
    write_model(root, "failing", code=FAILING)
    write_model(root, "of_its_own", code=OF_ITS_OWN)
    write_model(root, "waiting", code=WAITING)
    write_model(root, "calling", code=CALLING)
    (root / "chain" / "1").mkdir(parents=True)
    (root / "chain" / "config.pbtxt").write_text(CHAIN)
    return root


@pytest.fixture(scope="module")
def clients(repository: Path) -> Iterator[tuple[httpx2.Client, httpx2.Client]]:
    """A client of a single server, and one of an ingress over two replicas of each model."""
    with ExitStack() as stack:
        replicas = {}
        for name, needed in DEPLOYED.items():
            made = [ModelReplica([repository], name, needed=needed) for _ in range(2)]
            for replica in made:
                stack.callback(replica.close)
            replicas[name] = LocalReplicas(*made)
        servers = stack.enter_context(LiveServer(repository)), LiveIngress(repository, replicas)
        stack.enter_context(servers[1])
        single, ingress = (
            stack.enter_context(httpx2.Client(base_url=server.url, timeout=60)) for server in servers
        )
        yield single, ingress


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/add/infer", of("X", 1, 2)),
        ("/v2/models/add/versions/1/infer", of("X", 1, 2) | {"id": "mine"}),
        ("/v2/models/add/versions/7/infer", of("X", 1, 2)),
        ("/v2/models/add/infer", of("Z", 1, 2)),
        ("/v2/models/reshaping/infer", batched(3, 4)),
        ("/v2/models/reshaping/infer", batched(
            3, 4, outputs=[{"name": "Y", "parameters": {"classification": 2}}]
        )),
        ("/v2/models/reshaping/infer", of("X", 1, 2)),
        ("/v2/models/counting/infer", of("X", 3)),
        ("/v2/models/counting/generate_stream", {"X": 3}),
        ("/v2/models/counting/generate", {"X": 1}),
        ("/v2/models/counting/generate", {"X": 2}),
        ("/v2/models/failing/infer", of("X", 1)),
        ("/v2/models/of_its_own/infer", of("X", 1)),
        ("/v2/models/calling/infer", of("X", 1)),
        ("/v2/models/chain/infer", of("A", 1)),
        ("/v2/models/first/infer", of("X", 1)),
        ("/v2/repository/index", {}),
    ],
    ids=str,
)  # fmt: skip
def test_answers_as_a_single_server(
    clients: tuple[httpx2.Client, httpx2.Client], path: str, body: Any
) -> None:
    expected, answered = (client.post(path, json=body) for client in clients)
    assert shown(answered) == shown(expected)


@pytest.mark.parametrize("name", ["add", "reshaping", "counting", "chain", "first"])
def test_describes_a_model_as_a_single_server(
    clients: tuple[httpx2.Client, httpx2.Client], name: str
) -> None:
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/config", f"/v2/models/{name}/ready"):
        expected, answered = (client.get(path) for client in clients)
        assert shown(answered) == shown(expected)


def test_a_client_that_leaves_cancels_the_inference_in_the_replica(
    clients: tuple[httpx2.Client, httpx2.Client], repository: Path
) -> None:
    folder = repository / "waiting" / "1"
    with socket.create_connection(("127.0.0.1", clients[1].base_url.port)) as client:
        body = json.dumps(of("X", 1)).encode()
        head = f"Host: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(f"POST /v2/models/waiting/infer HTTP/1.1\r\n{head}".encode() + body)
        wait_until((folder / "begun").exists, "the begin of the inference")
    wait_until((folder / "cancelled").exists, "its cancellation")


class Endless:
    """A `ReplicaSet` each inference of which has responses without end."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def infer(self, _request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        while True:
            self.num_sent += 1
            yield InferenceResponse(), False


async def test_responses_wait_in_the_replica_for_a_client_that_reads_slowly() -> None:
    event_loop, endless = asyncio.get_running_loop(), Endless()
    models: Any = RemoteInference(
        LiveReplicas("m", endless), identity="", event_loop=event_loop  # type: ignore[arg-type]
    )
    request = InferenceRequest(model_name="m", inputs={})
    dispatcher = ResponseDispatcher(event_loop)
    with RunningInference(request, server=models, dispatcher=dispatcher) as running:
        for number in range(3):
            await running.responses.next()
            for _ in range(20):
                await asyncio.sleep(0)
            assert endless.num_sent == number + 2
    while not running.inference.ended:
        await asyncio.sleep(0)
