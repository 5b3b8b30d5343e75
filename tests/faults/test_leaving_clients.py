"""A client that leaves gives its place back within two steps, whatever its request was doing."""

from __future__ import annotations

import shutil
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.text_faces import FACES, request_of
from tests.support.live_server import LiveServer, wait_until
from tests.support.request_ledger import RequestLedger
from tests.support.step_gate import StepGate

STATES = ("waiting", "prefilling", "decoding")


@pytest.fixture(scope="module")
def live(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model has one place and no prefix cache."""
    repository = tmp_path_factory.mktemp("leaving") / "repository"
    shutil.copytree(tiny_repository, repository)
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text().replace("max_batch_size: 32", "max_batch_size: 1")
        config.write_text(text.replace("max_candidate_sequences: 32", "max_candidate_sequences: 1"))
    with (repository / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write('parameters [ { key: "prefix_cache" value: { string_value: "false" } } ]\n')
    with LiveServer(repository) as server:
        yield server


@pytest.fixture
def gate(live: LiveServer) -> Iterator[StepGate]:
    gate = StepGate(live.model)
    yield gate
    gate.remove()
    wait_until(lambda: not live.model.engine.num_accepted)


def send(live: LiveServer, face: str, prompt: str, *, stream: bool) -> socket.socket:
    path, body = request_of(FACES[face], "tiny", prompt, tokens=100, stream=stream)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def leave(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def hold_place(live: LiveServer, gate: StepGate) -> socket.socket:
    """Take the only place with an answer that stays in its second step."""
    gate.shut()
    holder = send(live, "tgi", "hold", stream=True)
    gate.allow(1)
    wait_until(lambda: gate.num_begun == 2)
    return holder


def reach(live: LiveServer, gate: StepGate, state: str) -> None:
    """Wait until the request that was just sent is in this state, while the engine is in a forward."""
    if state == "waiting":
        wait_until(lambda: live.model.engine.num_accepted == 2)
        return
    wait_until(lambda: gate.num_begun == 1)
    if state == "decoding":
        gate.allow(1)
        wait_until(lambda: gate.num_begun == 2)


def check_released(live: LiveServer, gate: StepGate, *, num_left: int) -> None:
    """Check that the server notices it without a step, and that two steps free the place."""
    engine = live.model.engine
    wait_until(lambda: engine._arrivals.cancelled)
    gate.allow(2)
    wait_until(lambda: engine.num_accepted == num_left)
    assert engine.num_running == num_left


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("face", FACES)
def test_a_client_that_leaves_frees_its_place(
    live: LiveServer, gate: StepGate, face: str, stream: bool, state: str
) -> None:
    ledger, ends = RequestLedger(live), {"cancelled": 1}
    if state == "waiting":
        holder = hold_place(live, gate)
    else:
        gate.shut()
    connection = send(live, face, "tell me", stream=stream)
    reach(live, gate, state)
    leave(connection, reset=stream)
    check_released(live, gate, num_left=1 if state == "waiting" else 0)
    if state == "waiting":
        leave(holder, reset=False)
        gate.open()
        ends = {"cancelled": 2}
    assert ledger.ends() == ends


def message(prompt: str) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="tiny")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(prompt.encode())
    tokens = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
    tokens.contents.int_contents.append(100)
    return request


@pytest.mark.parametrize("state", STATES)
def test_a_grpc_stream_that_is_cancelled_frees_its_place(
    live: LiveServer, gate: StepGate, state: str
) -> None:
    ledger = RequestLedger(live)
    holder = hold_place(live, gate) if state == "waiting" else gate.shut()
    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([message("tell me")]))
        reach(live, gate, state)
        call.cancel()
        check_released(live, gate, num_left=1 if state == "waiting" else 0)
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    assert ledger.ends() == {"cancelled": 2 if state == "waiting" else 1}


def test_a_client_that_leaves_during_the_preparation_frees_its_reservation(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = live.model.prepare_choices
    engine = live.model.engine

    def slow(*args, **options):
        while engine.num_preparing:     # until the reservation is free
            time.sleep(0.001)
        return prepare(*args, **options)

    monkeypatch.setattr(live.model, "prepare_choices", slow)
    ledger = RequestLedger(live)
    for face in FACES:
        connection = send(live, face, "tell me", stream=True)
        wait_until(lambda: engine.num_preparing == 1)
        leave(connection, reset=False)
        wait_until(lambda: not engine.num_preparing)
    # KServe's routes submit it, and cancel it at once.
    assert set(ledger.ends()) <= {"cancelled"}
