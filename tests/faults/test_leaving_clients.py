"""When a client leaves, its request is dropped within two steps, whatever the request was doing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from benchmarks.text_faces import FACES
from tests.faults.one_place import (
    STATES,
    connect,
    grpc_message,
    hold_place,
    leave,
    one_place,
    reach,
    send,
)
from tests.support.live_server import LiveServer, wait_until
from tests.support.python_models import write_model
from tests.support.request_ledger import RequestLedger
from tests.support.step_gate import StepGate

# A model that calls the text model by BLS, in process and not.
CALLERS = {"caller": "", "caller_stub": 'parameters { key: "EXECUTION" value { string_value: "process" } }'}
_CALLER = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            [request] = requests
            sender = request.get_response_sender()
            call = pb_utils.InferenceRequest(
                model_name="tiny", requested_output_names=["text_output"], inputs=request.inputs())
            for response in call.exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                if response.output_tensors():
                    sender.send(pb_utils.InferenceResponse(response.output_tensors()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CALLER_CONFIG = """
    backend: "python"
    model_transaction_policy { decoupled: true }
    input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1, 1 ] },
            { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1, 1 ] },
            { name: "stream" data_type: TYPE_BOOL dims: [ 1, 1 ] } ]
    output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


@pytest.fixture(scope="module")
def live(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("leaving") / "repository"
    one_place(tiny_repository, root)
    for name, execution in CALLERS.items():
        write_model(root, name, code=_CALLER, config=_CALLER_CONFIG + execution)
    with LiveServer(root) as server:
        yield server


def check_released(live: LiveServer, gate: StepGate, *, num_left: int) -> None:
    """Check that the server notices it without a step, and that two steps free the place."""
    engine = live.model.engine
    wait_until(lambda: engine._queue._arrivals.cancelled)
    gate.allow(2)
    wait_until(lambda: engine.num_accepted == num_left)
    assert engine.num_running == num_left


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("face", FACES)
def test_a_client_that_leaves_frees_its_place(
    live: LiveServer, gate: StepGate, face: str, stream: bool, state: str
) -> None:
    ledger, ends = RequestLedger(live), {"abort": 1}
    if state == "waiting":
        holder = hold_place(live, gate)
    else:
        gate.shut()
    connection = send(live, face, stream=stream)
    reach(live, gate, state)
    leave(connection, reset=stream)
    check_released(live, gate, num_left=1 if state == "waiting" else 0)
    if state == "waiting":
        leave(holder, reset=False)
        gate.open()
        ends = {"abort": 2}
    assert ledger.ends() == ends


@pytest.mark.parametrize("state", STATES)
def test_a_grpc_stream_that_is_cancelled_frees_its_place(
    live: LiveServer, gate: StepGate, state: str
) -> None:
    ledger = RequestLedger(live)
    holder = hold_place(live, gate) if state == "waiting" else gate.shut()
    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([grpc_message()]))
        reach(live, gate, state)
        call.cancel()
        check_released(live, gate, num_left=1 if state == "waiting" else 0)
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    assert ledger.ends() == {"abort": 2 if state == "waiting" else 1}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_client_of_a_model_that_calls_the_text_model_frees_the_place(
    live: LiveServer, gate: StepGate, caller: str, state: str
) -> None:
    holder = hold_place(live, gate) if state == "waiting" else gate.shut()
    asked = {"text_input": "tell me", "max_tokens": 100, "stream": True}
    connection = connect(live, f"/v2/models/{caller}/generate_stream", asked)
    reach(live, gate, state)
    leave(connection, reset=True)
    check_released(live, gate, num_left=1 if state == "waiting" else 0)
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    version = live.server.services.repository.find(caller)
    wait_until(lambda: not version.num_pending)


def test_a_client_that_leaves_during_the_preparation_frees_its_reservation(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = live.model.prepare
    engine = live.model.engine

    def slow(*args, **options):
        while engine.num_preparing:  # until the reservation is free
            time.sleep(0.001)
        return prepare(*args, **options)

    monkeypatch.setattr(live.model, "prepare", slow)
    ledger = RequestLedger(live)
    for face in FACES:
        connection = send(live, face, stream=True)
        wait_until(lambda: engine.num_preparing == 1)
        leave(connection, reset=False)
        wait_until(lambda: not engine.num_preparing)
    # KServe's routes submit it, and cancel it at once.
    assert set(ledger.ends()) <= {"abort"}
