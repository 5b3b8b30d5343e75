"""Every request ends exactly once, on every face: finished, failed, or by its deadline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from benchmarks.text_faces import FACES
from genserve.client import Client
from genserve.completion import Completion, FinishReason
from genserve.errors import DeadlineExceeded, ModelFailed
from genserve.server.http import sse_response
from genserve.server.kserve import inference as kserve_inference
from tests.faults.one_place import FAILING, STATES, grpc_message, hold_place, leave, one_place, reach, send
from tests.support.live_server import LiveServer, wait_until
from tests.support.request_ledger import RequestLedger
from tests.support.step_gate import StepGate

FAILED_STATUS = {"tgi": 424, "kserve": 400}  # as those servers have it; the others 500
# Where the deadline of a request is in its body.
DEADLINE = {"max_time_ms": 60_000}
DEADLINES: dict[str, dict[str, Any]] = dict.fromkeys(FACES, DEADLINE) | {
    "ollama": {"options": {"num_predict": 100, "ignore_eos": True, **DEADLINE}},
    "gemini": {"generationConfig": {"maxOutputTokens": 100, "ignoreEos": True, **DEADLINE}},
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
    assert "error" not in ledger.ends()


@pytest.mark.parametrize("face", FACES)
def test_a_failed_request_ends_once_with_the_message_of_the_loop_and_nothing_internal(
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
    for text in (events, answer):
        assert b"the decoding loop failed: ValueError: no place left, see places.toml" in text
    assert ledger.ends() == {"error": 2}


# What a stream sends while it waits: Ollama's clients parse each line, and Codex does not count comments.
PINGS = dict.fromkeys(FACES, rb"^: ping\n\n") | {
    "responses": rb'^event: keepalive\ndata: \{"type": "keepalive", "sequence_number": \d+\}\n\n',
    "messages": rb'^event: ping\ndata: \{"type": "ping"\}\n\n',
    "ollama": rb'^\{"model":"tiny",[^\n]+"content":""\},"done":false\}\n',
}


@pytest.mark.parametrize("face", FACES)
def test_a_stream_that_waits_shows_that_it_lives(
    live: LiveServer, ledger: RequestLedger, gate: StepGate, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sse_response, kserve_inference):
        monkeypatch.setattr(module, "PING_S", 0.01)
    holder = hold_place(live, gate)
    with send(live, face, stream=True, tokens=20) as connection:
        response = HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        begun = b""
        while len(re.findall(PINGS[face], begun, re.MULTILINE)) < 2:
            begun += response.read1()
        leave(holder, reset=False)
        gate.open()
        answer = begun + response.read()
    assert not FACES[face].failure.search(answer)
    assert FACES[face].num_ends(answer) == 1
    if face == "ollama":
        assert all(json.loads(line) for line in answer.splitlines())
    if face == "responses":
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: ")]
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
        assert kinds.count("response.created") == 1
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert ledger.ends() == {"length": 1, "abort": 1}


def test_requests_over_grpc_end_once(live: LiveServer, ledger: RequestLedger) -> None:
    with grpc.insecure_channel(live.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages = [grpc_message(tokens=5), grpc_message(tokens=FAILING)]
        answers = list(stub.ModelStreamInfer(iter(messages)))
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
    assert finals.count(True) == 2
    assert [bool(answer.error_message) for answer in answers].count(True) == 1
    ends = ledger.ends()
    assert ends.pop("error") == 1
    assert sum(ends.values()) == 1


def test_requests_of_the_sdk_end_once(live: LiveServer, ledger: RequestLedger) -> None:
    with Client(live.url) as client:
        deltas = list(client.stream("tell me", max_tokens=5, ignore_eos=True))
        assert [delta.finish_reason is not None for delta in deltas].count(True) == 1
        with pytest.raises(ModelFailed, match="ValueError: no place left"):
            list(client.stream("tell me", max_tokens=FAILING, ignore_eos=True))
        with pytest.raises(ModelFailed, match="ValueError: no place left"):
            client.generate("tell me", max_tokens=FAILING, ignore_eos=True)
    assert ledger.ends() == {"length": 1, "error": 2}


def pass_deadline(live: LiveServer, gate: StepGate) -> None:
    """Let the deadline of the newest request pass, and the engine notice it."""
    engine: Any = live.model.engine
    with engine._queue._changed:  # a request counts as accepted just before it is among the arrivals
        sequences = [*engine._open, *engine._queue._arrivals.sequences]
    [sequence] = (sequence for sequence in sequences if sequence.deadline_s is not None)
    sequence.deadline_s = engine._engine._next_deadline_s = engine.now_s
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
            assert stream or response.status == 400  # generate's status for any error, as in Triton
        elif state != "waiting":
            assert response.status == 200
            assert not stream or FACES[face].num_ends(answer) == 1
            # TGI says why a whole answer ended only if it is asked for details.
            assert re.search(rb'"(length|incomplete|max_tokens|MAX_TOKENS|generated_text)"', answer)
            assert b'"deadline"' in answer or (face == "tgi" and not stream)
        else:
            assert response.status == 504
            assert response.headers["x-should-retry"] == "false"
            assert b"the request's deadline passed before its first token" in answer
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    ends = ledger.ends()
    assert ends.pop("length") == 1
    assert ends == ({"abort": 1} if holder is not None else {})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", STATES)
def test_a_deadline_ends_a_request_of_the_sdk(
    live: LiveServer, ledger: RequestLedger, gate: StepGate, state: str, stream: bool
) -> None:
    holder = hold_place(live, gate) if state == "waiting" else gate.shut()
    asked = {"max_tokens": 100, "ignore_eos": True, **DEADLINE}

    def ask(client: Client) -> Completion:
        return client.stream("tell me", **asked).final() if stream else client.generate("tell me", **asked)

    with Client(live.url) as client, ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, client)
        reach(live, gate, state)
        pass_deadline(live, gate)
        if state != "waiting":
            answer = asking.result()
            assert (answer.finish_reason, answer.stop_reason) == (FinishReason.LENGTH, "deadline")
            assert answer.token_ids
        else:
            with pytest.raises(DeadlineExceeded):
                asking.result()
    if holder is not None:
        leave(holder, reset=False)
        gate.open()
    assert ledger.ends().pop("length") == 1


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
        wait_until(lambda: live.model.engine._queue._arrivals.cancelled)
        gate.allow(2)
        wait_until(lambda: live.model.engine.num_accepted == 1)
    leave(holder, reset=False)
    gate.open()
    assert ledger.ends() == {"abort": 2}
