"""Python models that misbehave, in the server's process and in their own: only their own calls fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.live_server import LiveServer, wait_until
from tests.support.python_models import CONFIG, write_model
from tests.support.representatives import with_extended

PROCESS = 'parameters { key: "EXECUTION" value { string_value: "process" } }'
# Each fault is a line of `execute`, which a request selects by its place.
FAULTS = {
    "raises": 'raise ValueError("boom")',
    "raises-an-exception-without-text": "raise Wordless()",
    "raises-an-endless-text": 'raise ValueError("x" * 10_000_000)',
    "raises-control-characters": r'raise ValueError("a\r\nERROR forged: \x1b[31m")',
    "raises-a-lone-surrogate": r'raise ValueError("\ud800")',
    "raises-a-base-exception": 'raise Base("boom")',
    "is-interrupted": "raise KeyboardInterrupt",
    "exits": "raise SystemExit(3)",
    "closes-a-generator": "raise GeneratorExit",
    "recurses-for-ever": "recurse()",
    "needs-petabytes": "np.zeros(10**15)",
    "returns-nothing": "return None",
    "returns-junk": 'return ["junk"]',
    "returns-no-list": "return 5",
    "returns-too-few": "return []",
    "returns-too-many": "return [answer(x), answer(x)]",
    "raises-in-a-coroutine": "return fail_later()",
    "exits-in-a-coroutine": "return exit_later()",
    "answers-with-a-surrogate": r'return [failure("\ud800\r\n")]',
}
CODE = """
import os
import signal
import subprocess

import numpy as np
import triton_python_backend_utils as pb_utils


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError


class Base(BaseException):
    pass


def recurse():
    recurse()


async def fail_later():
    raise ValueError("boom")


async def exit_later():
    raise SystemExit(3)


def answer(x):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + 1)])


def failure(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))


class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
        fault = int(x[0])
        {faults}
        return [answer(x)]
"""
# Crashes of the stub process itself, which the server survives.
CRASHES = {
    "is-killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "has-a-segmentation-fault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "ends-its-process": 'subprocess.Popen(["sleep", "86123"]); os._exit(3)',
}
NO_FAULT = 1000
# `make test` tries these faults.
REPRESENTATIVES = {
    "raises", "raises-a-lone-surrogate", "raises-a-base-exception", "exits", "recurses-for-ever",
    "returns-junk", "returns-too-few", "raises-in-a-coroutine", "exits-in-a-coroutine",
}  # fmt: skip


def code(faults: dict[str, str]) -> str:
    lines = [f"if fault == {number}: {line}" for number, line in enumerate(faults.values())]
    return CODE.replace("{faults}", "\n        ".join(lines))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("misbehaving")
    write_model(root, "server", code=code(FAULTS))
    write_model(root, "process", code=code(FAULTS | CRASHES), config=CONFIG + PROCESS)
    write_model(root, "add")
    with LiveServer(root) as server:
        yield server.url


def infer(http: httpx2.Client, model: str, number: float) -> httpx2.Response:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1], "data": [number]}
    return http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})


def is_right(answer: httpx2.Response, number: float) -> bool:
    return answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [number + 1]


@pytest.mark.parametrize("model", ["server", "process"])
@pytest.mark.parametrize("fault", with_extended(FAULTS, always=REPRESENTATIVES))
def test_a_fault_fails_its_own_call(url: str, model: str, fault: str) -> None:
    with httpx2.Client(base_url=url) as http:
        failed = infer(http, model, list(FAULTS).index(fault))
        assert failed.status_code == 500
        assert failed.json()["error"]
        assert len(failed.content) < 10_000
        assert is_right(infer(http, model, NO_FAULT), NO_FAULT)
        assert http.get(f"/v2/models/{model}/ready").status_code == 200


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_under_load_fails_its_own_call_and_the_process_comes_back(url: str, crash: str) -> None:
    wrong: list[str] = []
    counts = {"process": 0, "add": 0}
    stopping = threading.Event()

    def load(model: str) -> None:
        with httpx2.Client(base_url=url) as http:
            while not stopping.is_set():
                answer = infer(http, model, NO_FAULT)
                counts[model] += 1
                if not is_right(answer, NO_FAULT):
                    wrong.append(f"{model}: {answer.text}")

    threads = [threading.Thread(target=load, args=[model]) for model in ("process", "process", "add")]
    for thread in threads:
        thread.start()
    with httpx2.Client(base_url=url) as http:
        number = list(FAULTS | CRASHES).index(crash)
        failed = infer(http, "process", number)
        before = dict(counts)
        assert http.get("/v2/models/process/ready").status_code == 400
        assert http.get("/v2/models/add/ready").status_code == 200
        wait_until(lambda: http.get("/v2/models/process/ready").status_code == 200)
        wait_until(lambda: all(counts[model] > before[model] + 2 for model in counts))
    stopping.set()
    for thread in threads:
        thread.join()
    assert failed.status_code == 500
    assert failed.json()["error"] == "Stub process 'process_0' is not healthy."
    assert not wrong
    wait_until(lambda: not running("sleep\x0086123"), every_s=0.05)  # what it had started


def running(command: str) -> bool:
    """Whether a process has a command line that begins like this."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_text().startswith(command):
                return True
        except OSError:  # it has ended meanwhile
            continue
    return False


# Calls the models that its request names, one after the other, with the calls that these are to make.
CALLING = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            for model, calls in json.loads(json.loads(request.parameters())["calls"]):
                called = pb_utils.InferenceRequest(
                    model_name=model,
                    requested_output_names=["Y"],
                    inputs=[x],
                    parameters={"calls": json.dumps(calls)},
                ).exec()
                if called.has_error():
                    raise pb_utils.TritonModelException(called.error().message())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy() + 1)]))
        return responses
"""
CALLERS = ("one", "two", "three", "apart")
calls = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(CALLERS), inner), min_size=1, max_size=2),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("callers")
    for name in CALLERS:
        more = PROCESS if name == "apart" else "instance_group { count: 2 }" if name == "two" else ""
        write_model(root, name, code=CALLING, config=CONFIG + more)
    with LiveServer(root) as server:
        yield server.url


@settings(max_examples=15)
@given(graphs=st.lists(st.tuples(st.sampled_from(CALLERS), calls), min_size=1, max_size=3))
def test_calls_between_models_never_hang(callers: str, graphs: list[Any]) -> None:
    """Each ends with the right answer, or with an error if all instances wait for each other."""

    def ask(graph: tuple[str, Any]) -> httpx2.Response:
        model, calls = graph
        tensor = {"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}
        body = {"inputs": [tensor], "parameters": {"calls": json.dumps(calls)}}
        return httpx2.post(f"{callers}/v2/models/{model}/infer", json=body, timeout=30)

    with ThreadPoolExecutor(len(graphs)) as pool:
        for answer in pool.map(ask, graphs):
            if answer.status_code == 200:
                assert is_right(answer, 1)
            else:
                assert "deadlock" in answer.json()["error"], answer.text
    for model in CALLERS:
        assert is_right(ask((model, [])), 1)
