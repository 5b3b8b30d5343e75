"""Every request ends exactly once, on every face: finished, failed, or by its deadline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from benchmarks.text_faces import FACES
from genserve.client import Client
from genserve.errors import GenserveError
from tests.faults.one_place import FAILING, STATES, grpc_message, hold_place, leave, one_place, reach, send
from tests.support.live_server import LiveServer, wait_until
from tests.support.request_ledger import RequestLedger
from tests.support.step_gate import StepGate

FAILED_STATUS = {"tgi": 424, "kserve": 400}     # as those servers have it; the others 500
# Where the deadline of a request is in its body.
DEADLINE = {"max_time_ms": 60_000}
DEADLINES: dict[str, dict[str, Any]] = dict.fromkeys(FACES, DEADLINE) | {
    "ollama": {"options": {"num_predict": 100, **DEADLINE}},
    "tgi": {"parameters": {"max_new_tokens": 100, "ignore_eos": True, **DEADLINE}},
    "kserve": {"timeout": 60_000_000},
}
EXPIRED = "Request timeout expired"


@pytest.fixture(scope="module")
def live(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("ends") / "repository"
    with LiveServer(one_place(tiny_repository, root)) as server:
        yield server


@pytest.fixture
def ledger(live: LiveServer) -> RequestLedger:
    return RequestLedger(live)


def answer_of(live: LiveServer, face: str, **request: Any) -> tuple[int, bytes]:
    with send(live, face, **request) as connection:
        response = HTTPResponse(connection)
        response.begin()
        return response.status, response.read()


@pytest.mark.parametrize("face", FACES)
def test_a_finished_request_ends_once(live: LiveServer, ledger: RequestLedger, face: str) -> None:
    status, events = answer_of(live, face, stream=True, tokens=20)
    assert status == 200
    assert FACES[face].num_ends(events) == 1
    assert not FACES[face].failure.search(events)
    status, answer = answer_of(live, face, stream=False, tokens=20)
    assert status == 200
    assert json.loads(answer)
    assert sum(ledger.ends().values()) == 2
    assert "failed" not in ledger.ends()


@pytest.mark.parametrize("face", FACES)
def test_a_failed_request_ends_once_and_shows_nothing_internal(
    live: LiveServer, ledger: RequestLedger, face: str
) -> None:
    status, events = answer_of(live, face, stream=True, tokens=FAILING)
    assert status == 200
    assert FACES[face].num_ends(events) == 1
    assert FACES[face].failure.search(events)
    assert (b"data: [DONE]" in events) == (face in ("chat", "completions"))
    status, answer = answer_of(live, face, stream=False, tokens=FAILING)
    assert status == FAILED_STATUS.get(face, 500)
    assert b"secret" not in events + answer
    assert b"the decoding loop failed" in answer
    assert ledger.ends() == {"failed": 2}


def test_requests_over_grpc_end_once(live: LiveServer, ledger: RequestLedger) -> None:
    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages = [grpc_message(tokens=5), grpc_message(tokens=FAILING)]
        answers = list(stub.ModelStreamInfer(iter(messages)))
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
    assert finals.count(True) == 2
    assert [bool(answer.error_message) for answer in answers].count(True) == 1
    ends = ledger.ends()
    assert ends.pop("failed") == 1
    assert sum(ends.values()) == 1


def test_requests_of_the_sdk_end_once(live: LiveServer, ledger: RequestLedger) -> None:
    with Client(live.url) as client:
        deltas = list(client.stream("tell me", max_tokens=5, ignore_eos=True))
        assert [delta.finish_reason is not None for delta in deltas].count(True) == 1
        with pytest.raises(GenserveError, match="the decoding loop failed"):
            list(client.stream("tell me", max_tokens=FAILING, ignore_eos=True))
        with pytest.raises(GenserveError, match="the decoding loop failed"):
            client.generate("tell me", max_tokens=FAILING, ignore_eos=True)
    assert ledger.ends() == {"length": 1, "failed": 2}


def pass_deadline(live: LiveServer, gate: StepGate) -> None:
    """Let the deadline of the newest request pass, and the engine notice it."""
    engine: Any = live.model.engine
    sequences = {**engine._open.sequences, **engine._waiting._states}
    [sequence] = (sequence for sequence in sequences if sequence.deadline_s is not None)
    sequence.deadline_s = engine.now_s
    gate.allow(2)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("face", FACES)
def test_a_deadline_ends_a_request(
    live: LiveServer, ledger: RequestLedger, gate: StepGate, face: str, stream: bool, state: str
) -> None:
    holder = hold_place(live, gate) if state == "waiting" else gate.shut()
    with send(live, face, stream=stream, **DEADLINES[face]) as connection:
        reach(live, gate, state)
        pass_deadline(live, gate)
        response = HTTPResponse(connection)
        response.begin()
        answer = response.read()
        if face == "kserve":
            assert EXPIRED in answer.decode()
            assert stream or response.status == 400  # of generate, for any error, as in Triton
        else:
            assert response.status == 200
            assert not stream or FACES[face].num_ends(answer) == 1
            # TGI says why a whole answer ended only if it is asked for details.
            assert re.search(rb'"(length|incomplete|max_tokens|generated_text)"', answer)
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    ends = ledger.ends()
    assert ends.pop("length") == 1
    assert ends == ({"cancelled": 1} if holder is not None else {})


@pytest.mark.parametrize("state", STATES)
def test_a_timeout_ends_a_request_over_grpc(
    live: LiveServer, ledger: RequestLedger, gate: StepGate, state: str
) -> None:
    holder = hold_place(live, gate) if state == "waiting" else gate.shut()
    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([grpc_message(timeout=60_000_000)]))
        reach(live, gate, state)
        pass_deadline(live, gate)
        assert EXPIRED in [answer.error_message for answer in answers][-1]
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    assert ledger.ends().pop("length") == 1


def test_a_deadline_of_grpc_frees_the_place(live: LiveServer, ledger: RequestLedger, gate: StepGate) -> None:
    holder = hold_place(live, gate)
    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([grpc_message()]), timeout=1)
        reach(live, gate, "waiting")
        with pytest.raises(grpc.RpcError) as late:
            list(answers)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: live.model.engine._arrivals.cancelled)
        gate.allow(2)
        wait_until(lambda: live.model.engine.num_accepted == 1)
    leave(holder, reset=False)
    gate.open()
    assert ledger.ends() == {"cancelled": 2}
