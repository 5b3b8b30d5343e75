"""Traces of requests over real sockets, in the files that Triton's own tool reads."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from genserve.tensor import DataType, Tensor
from genserve.tracing import Trace, TraceFile
from tests.server.live_kserve import copy_models
from tests.support.live_server import LiveServer

NAMES = ("add_sub", "ensemble_linear", "fails", "identity_string", "repeat")
ALL = ("level=TIMESTAMPS", "level=TENSORS", "rate=1")
CALLER_CONFIG = """
backend: "python"
input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
# Calls twice, and passes the trace on in the first call only.
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()[None]
        tensors = [pb_utils.Tensor(name, a) for name in "AB"]
        for trace in ({"trace": request.trace()}, {}):
            asked = pb_utils.InferenceRequest(
                model_name="add_sub", requested_output_names=["SUM"], inputs=tensors, **trace
            )
            answer = asked.exec()
        y = pb_utils.get_output_tensor_by_name(answer, "SUM").as_numpy()[0]
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    copy_models(NAMES, folder)
    return folder


def serving(repository: Path, file: Path, *settings: str) -> LiveServer:
    return LiveServer(repository, trace_config=(f"triton,file={file}", *settings))


def add(server: LiveServer, model: str = "add_sub", *, request_id: str = "") -> None:
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    client.infer(model, numbers(triton), request_id=request_id)
    client.close()


def numbers(module: Any) -> list[Any]:
    inputs = [module.InferInput(name, [1, 2], "FP32") for name in "AB"]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.array([[1.5, 2]], np.float32))
    return inputs


def traces(file: Path) -> dict[int, Traced]:
    """Return the records of a file by id; it is JSON, and each id has one head."""
    found: dict[int, Traced] = {}
    for event in json.loads(file.read_text()):
        found.setdefault(event["id"], Traced()).add(event)
    return found


class Traced:
    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.times: list[tuple[str, int]] = []
        self.tensors: list[tuple[str, str, str, str, str]] = []

    def add(self, event: dict[str, Any]) -> None:
        if "model_name" in event:
            assert not self.head
            self.head = event
        for stamp in event.get("timestamps", ()):
            self.times.append((stamp["name"], stamp["ns"]))
        if "tensor" in event:
            tensor = event["tensor"]
            fields = (tensor[field] for field in ("name", "data", "shape", "dtype"))
            self.tensors.append((event["activity"], *fields))

    @property
    def names(self) -> list[str]:
        """In the order of their times."""
        return [name for name, _ in sorted(self.times, key=lambda time: time[1])]


COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END"]


def in_order(names: list[str], *wanted: str) -> bool:
    rest = iter(names)
    return all(name in rest for name in wanted)


def test_a_request_over_http_is_traced_with_timestamps_and_tensors(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", *ALL) as server:
        add(server, request_id="one")
    [trace] = traces(tmp_path / "t.json").values()
    named = {"model_name": "add_sub", "model_version": 1, "request_id": "one"}
    assert trace.head == {"id": trace.head["id"], **named}
    begun = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START"]
    assert in_order(trace.names, *begun, *COMPUTED)
    assert in_order(trace.names, *begun, "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END")
    assert trace.tensors == [
        ("TENSOR_QUEUE_INPUT", "A", "1.5,2.0", "1,2", "FP32"),
        ("TENSOR_QUEUE_INPUT", "B", "1.5,2.0", "1,2", "FP32"),
        ("TENSOR_BACKEND_OUTPUT", "SUM", "3.0,4.0", "1,2", "FP32"),
        ("TENSOR_BACKEND_OUTPUT", "DIFFERENCE", "0.0,0.0", "1,2", "FP32"),
    ]


def test_a_request_over_grpc_is_traced_with_the_timestamps_of_grpc(repository, tmp_path):
    with (
        serving(repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server,
        triton_grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        client.infer("add_sub", numbers(triton_grpc))
    [trace] = traces(tmp_path / "t.json").values()
    begun = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START", "QUEUE_START"]
    assert in_order(trace.names, *begun, *COMPUTED)
    assert in_order(trace.names, *begun, "GRPC_SEND_START", "GRPC_SEND_END")
    assert trace.tensors == []


def test_each_response_of_a_stream_is_traced(repository, tmp_path):
    answers: queue.Queue[Any] = queue.Queue()
    with serving(repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        with triton_grpc.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            count = triton_grpc.InferInput("N", [1], "INT32")
            count.set_data_from_numpy(np.array([3], np.int32))
            client.async_stream_infer("repeat", [count])
            assert [answers.get(timeout=30)[1] for _ in range(3)] == [None] * 3
            client.stop_stream()
        events = httpx2.post(f"{server.url}/v2/models/repeat/generate_stream", json={"N": 2}).text
        assert events.count("data:") == 2
    by_grpc, by_http = traces(tmp_path / "t.json").values()
    assert by_grpc.names.count("INFER_RESPONSE_COMPLETE") == by_grpc.names.count("GRPC_SEND_END") == 3
    assert by_http.names.count("INFER_RESPONSE_COMPLETE") == 2
    assert by_http.names[-1] == "HTTP_SEND_END"


def test_the_steps_of_an_ensemble_have_its_span_as_parent(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        add(server, "ensemble_linear", request_id="e")
    whole, *steps = traces(tmp_path / "t.json").values()
    assert "COMPUTE_START" not in whole.names
    for step in steps:
        assert step.head["parent_id"] == whole.head["id"]
        assert (step.head["model_name"], step.head["request_id"]) == ("add_sub", "e")
        assert in_order(step.names, "REQUEST_START", "QUEUE_START", *COMPUTED)
    assert len(steps) == 2


@pytest.mark.parametrize("parameters", ["", IN_PROCESS], ids=["in the server", "in a process of its own"])
def test_a_bls_call_with_a_trace_is_part_of_it(tmp_path, parameters):
    copy_models(("add_sub",), tmp_path / "models")
    version = tmp_path / "models" / "caller" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CALLER_CONFIG + parameters)
    (version / "model.py").write_text(CALLER)
    with serving(tmp_path / "models", tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        asked = {"inputs": [{"name": "A", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}
        answer = httpx2.post(f"{server.url}/v2/models/caller/infer", json=asked, timeout=60)
        assert answer.json()["outputs"][0]["data"] == [2, 4]
    whole, part = traces(tmp_path / "t.json").values()
    assert (whole.head["model_name"], part.head["model_name"]) == ("caller", "add_sub")
    assert part.head["parent_id"] == whole.head["id"]


def test_an_invalid_request_id_stops_neither_traces_nor_the_server(tmp_path):
    copy_models(("add_sub",), tmp_path / "models")
    version = tmp_path / "models" / "caller" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CALLER_CONFIG)
    (version / "model.py").write_text(CALLER.replace("**trace", r'request_id="\ud800", **trace'))
    with serving(tmp_path / "models", tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        asked = {"inputs": [{"name": "A", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}
        assert httpx2.post(f"{server.url}/v2/models/caller/infer", json=asked, timeout=60).is_success
        add(server, request_id="next")
    heads = [trace.head for trace in traces(tmp_path / "t.json").values()]
    assert [head.get("request_id") for head in heads] == [None, "?", "next"]


def test_a_failure_is_traced_unless_no_model_has_accepted_the_request(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", *ALL) as server:
        for tensor in ("MODE", "NONE"):
            asked = {"inputs": [{"name": tensor, "shape": [1], "datatype": "BYTES", "data": ['a "b"']}]}
            httpx2.post(f"{server.url}/v2/models/identity_string/infer", json=asked)
            httpx2.post(f"{server.url}/v2/models/nobody/infer", json=asked)
        asked["inputs"][0] |= {"name": "MODE", "data": ["INTERNAL"]}
        assert httpx2.post(f"{server.url}/v2/models/fails/infer", json=asked).status_code == 500
    [trace] = traces(tmp_path / "t.json").values()
    assert trace.head["model_name"] == "fails"
    assert in_order(trace.names, "HTTP_RECV_START", *COMPUTED, "HTTP_SEND_START", "HTTP_SEND_END")
    assert trace.tensors == [("TENSOR_QUEUE_INPUT", "MODE", '"INTERNAL"', "1", "BYTES")]


def test_strings_are_written_as_csv(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", "level=TENSORS", "rate=1") as server:
        asked = {"inputs": [{"name": "X", "shape": [2], "datatype": "BYTES", "data": ['a "b"', "ü,c"]}]}
        assert httpx2.post(f"{server.url}/v2/models/identity_string/infer", json=asked).status_code == 200
    [trace] = traces(tmp_path / "t.json").values()
    assert trace.times == []
    assert trace.tensors[0] == ("TENSOR_QUEUE_INPUT", "X", '"a ""b""","ü,c"', "2", "BYTES")


def test_every_nth_request_is_traced_up_to_the_count(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=2", "count=3") as server:
        client = triton.InferenceServerClient(server.url.removeprefix("http://"))
        for number in range(1, 11):
            client.infer("add_sub", numbers(triton), request_id=str(number))
        settings = client.get_trace_settings()
        assert (settings["trace_count"], settings["trace_file"]) == ("0", "t.json")
        client.close()
    assert not (tmp_path / "t.json").exists()  # traces with a count are in a numbered file, as with Triton
    assert [trace.head["request_id"] for trace in traces(tmp_path / "t.json.0").values()] == ["2", "4", "6"]


def test_a_rejected_request_does_not_use_the_count(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=1", "count=1") as server:
        for _ in range(3):
            assert httpx2.post(f"{server.url}/v2/models/nobody/infer", json={}).status_code == 404
        add(server, request_id="mine")
    assert [trace.head["request_id"] for trace in traces(tmp_path / "t.json.0").values()] == ["mine"]


def test_a_log_frequency_sets_the_traces_per_file(repository, tmp_path):
    words = ("level=TIMESTAMPS", "rate=1", "triton,log-frequency=2")
    with serving(repository, tmp_path / "t.json", *words) as server:
        for _ in range(5):
            add(server)
    assert [len(traces(tmp_path / f"t.json.{number}")) for number in range(3)] == [2, 2, 1]


@pytest.fixture(params=["http", "grpc"])
def settings(request: pytest.FixtureRequest) -> str:
    return request.param


def test_trace_settings_of_clients_take_effect_immediately(repository, tmp_path, settings):
    file = tmp_path / "t.json"
    with serving(repository, file, "rate=1") as server:
        module = {"http": triton, "grpc": triton_grpc}[settings]
        address = {"http": server.url.removeprefix("http://"), "grpc": server.grpc_url}[settings]
        client = module.InferenceServerClient(address)
        add(server)
        client.update_trace_settings("ensemble_linear", {"trace_level": ["TIMESTAMPS"]})
        add(server, request_id="untraced")
        add(server, "ensemble_linear", request_id="of the model")
        client.update_trace_settings("ensemble_linear", {"trace_level": None})
        add(server, "ensemble_linear", request_id="untraced")
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_count": "1"})
        add(server, request_id="counted")
        add(server, request_id="untraced")
        client.close()
    heads = [trace.head for trace in traces(file).values()]
    assert [head["request_id"] for head in heads if "parent_id" not in head] == ["of the model"]
    assert [trace.head["request_id"] for trace in traces(tmp_path / "t.json.0").values()] == ["counted"]


def test_the_first_token_of_a_text_is_traced(tiny_repository, tmp_path):
    with serving(tiny_repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        [name] = server.server.services.repository.text_model_names
        asked = {"text_input": "a b", "max_tokens": 4}
        assert httpx2.post(f"{server.url}/v2/models/{name}/generate", json=asked).status_code == 200
    [trace] = traces(tmp_path / "t.json").values()
    assert in_order(trace.names, "REQUEST_START", "COMPUTE_START", "FIRST_TOKEN", "COMPUTE_END")
    assert trace.names.count("FIRST_TOKEN") == 1


def test_a_removed_file_is_begun_again(repository, tmp_path):
    with serving(repository, tmp_path / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        add(server, request_id="old")
        wait_for(tmp_path / "t.json").rename(tmp_path / "old.json")
        add(server, request_id="new")
    for name, file in (("old", "old.json"), ("new", "t.json")):
        assert [trace.head["request_id"] for trace in traces(tmp_path / file).values()] == [name]


def test_the_file_of_a_running_server_is_valid(repository, tmp_path):
    """So is that of a server that is killed."""
    file = tmp_path / "t.json"
    asked = {"inputs": [{"name": "X", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
    with serving(repository, file, "level=TIMESTAMPS", "rate=1") as server:
        url = f"{server.url}/v2/models/identity_string/infer"
        assert httpx2.post(url, json=asked).status_code == 200
        assert len(traces(wait_for(file))) == 1


def wait_for(file: Path) -> Path:
    """Return its text once it is not empty; the test times out otherwise."""
    while not (file.exists() and file.stat().st_size):
        time.sleep(0.01)
    return file


def test_a_file_that_cannot_be_written_does_not_stop_answers(repository, tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    with serving(repository, folder / "t.json", "level=TIMESTAMPS", "rate=1") as server:
        folder.rmdir()
        add(server)
        add(server)
    failures = [record.message for record in caplog.records if "further failures" in record.message]
    what = f"a trace could not be written to {folder / 't.json'}: No such file or directory"
    assert failures == [f"{what}; further failures are not logged"]


def put(file: TraceFile, *, model: Any = "m", request_id: str = "", text: str = "") -> None:
    """Write a trace of one request with one input."""
    trace = Trace(has_timestamps=False, has_tensors=True, on_end=lambda trace: file.put(trace, file.path))
    span = trace.root.open(
        model=model,
        version=1,
        request_id=request_id,
        inputs=[Tensor("X", np.array([text], object), data_type=DataType.BYTES)],
        at_ns=1,
    )
    assert span is not None
    span.close(started_ns=0)
    trace.close()


@pytest.mark.parametrize("bad", [{"request_id": "\ud800"}, {"text": "\ud800"}])
def test_invalid_unicode_is_replaced(tmp_path, bad):
    file = TraceFile(tmp_path / "t.json")
    put(file, **bad)
    put(file, request_id="next")
    file.close()
    first, second = traces(file.path).values()
    assert second.head["request_id"] == "next"
    assert first.head.get("request_id") == "?" or first.tensors[0][2] == '"?"'


def test_a_trace_that_cannot_be_written_does_not_stop_the_next(tmp_path, caplog):
    file = TraceFile(tmp_path / "t.json")
    put(file, model=object())
    put(file, request_id="next")
    file.close()
    assert [trace.head["request_id"] for trace in traces(file.path).values()] == ["next"]
    assert "could not be written" in caplog.text


def test_nothing_is_written_after_the_context(tmp_path):
    file = TraceFile(tmp_path / "t.json")
    put(file, request_id="in time")
    file.close()
    put(file, request_id="late")
    file.close()
    assert [trace.head["request_id"] for trace in traces(file.path).values()] == ["in time"]


def test_the_size_of_queued_tensors_is_limited(tmp_path, caplog):
    file = TraceFile(tmp_path / "t.json")
    put(file, text="a" * (2**28 + 1))
    put(file, request_id="next")
    file.close()
    assert [trace.head["request_id"] for trace in traces(file.path).values()] == ["next"]
    assert "traces are lost" in caplog.text
