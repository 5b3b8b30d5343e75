"""Model control that is hostile, or at a bad time: names, reloads under load, storms, half-copied files."""

from __future__ import annotations

import builtins
import gc
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import helper

from genserve.errors import InferenceError
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from tests.faults.broken_repository import (
    BrokenRepository,
    adds,
    graph,
    serving_beside_good,
    write_model,
)
from tests.support.live_server import wait_until
from tests.support.python_models import ask, value
from tests.support.python_models import write_model as write_python_model


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that this process opens or lists."""
    paths: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(path: Any = ".", *arguments: Any, **keywords: Any) -> Any:
            paths.append(str(path))
            return function(path, *arguments, **keywords)

        return note

    for module, name in ((builtins, "open"), (io, "open"), (os, "listdir"), (os, "scandir")):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    return paths


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenRepository]:
    root = tmp_path_factory.mktemp("control") / "models"
    write_model(root.parent / "outside")
    explicit = {"model_control_mode": "explicit", "load_model": ("good", "changing")}
    with serving_beside_good(root, {"changing": write_model}, **explicit) as served:
        gc.freeze()     # as the command does: an unload collects garbage
        yield served
        gc.unfreeze()


NAMES = {
    "two-dots": "..", "two-dots-first": "../outside", "two-dots-after-a-model": "good/../../outside",
    "two-dots-last": "good/..", "absolute": "/etc/passwd", "slash-last": "good/", "backslash": "..\\outside",
    "blank-first": " ..", "blank-last": ".. ", "blank": " ", "tab": "\t", "line-feed": "good\n",
    "zero-byte": "good\0", "percent-encoded": "%2e%2e/outside", "encoded-twice": "%252e%252e%252foutside",
    "300-characters": "a" * 300, "three-dots": "...", "dots-before-a-word": "..my_model",
    "dots-inside": "model..1", "full-width-dots": "\uff0e\uff0e/outside",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_name_in_a_load_call_leads_out_of_the_repository(
    repository: BrokenRepository, opened: list[str], name: str
) -> None:
    path = f"/v2/repository/models/{quote(NAMES[name], safe='')}/load"
    answer = repository.http.post(repository.http.base_url.copy_with(raw_path=path.encode()))
    assert answer.status_code in (400, 404) or "failed to poll" in answer.json()["error"]   # Triton's 500
    with (
        triton.InferenceServerClient(repository.server.grpc_url) as client,
        pytest.raises(triton.InferenceServerException),
    ):
        client.load_model(NAMES[name])
    assert set(repository.index()) == {"good", "changing"}
    repository.http.post("/v2/repository/models/changing/load").raise_for_status()
    assert any(path.startswith(str(repository.root)) for path in opened)
    outside = str(repository.root.parent / "outside")
    assert not [path for path in opened if path.startswith((outside, "/etc/passwd"))]
    repository.check_good()


class _Requests:
    """Requests to the changing model without a pause, in a thread for each of several clients."""

    def __init__(self, repository: BrokenRepository) -> None:
        self.answers: list[tuple[float, float]] = []    # the least and the most that were right, the answer
        self.failures: list[BaseException] = []
        self.current = (1.0, 1.0)
        self._repository = repository
        self._ending = threading.Event()
        clients = (self._http, self._http, self._grpc)
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in clients]

    def __enter__(self) -> _Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: Callable[[], float]) -> None:
        try:
            while not self._ending.is_set():
                oldest = self.current[0]
                answer = client()
                assert oldest <= answer <= self.current[1]
                self.answers.append((oldest, answer))
        except BaseException as error:
            self.failures.append(error)

    def _http(self) -> float:
        answer = self._repository.infer("changing", 0).raise_for_status().json()
        return answer["outputs"][0]["data"][0]

    def _grpc(self) -> float:
        with triton.InferenceServerClient(self._repository.server.grpc_url) as client:
            x = triton.InferInput("X", [1, 2], "FP32")
            x.set_data_from_numpy(np.zeros((1, 2), np.float32))
            return float(client.infer("changing", [x]).as_numpy("Y")[0, 0])


def test_reloads_of_which_half_fail_lose_no_request(repository: BrokenRepository) -> None:
    file = repository.root / "changing" / "1" / "model.onnx"
    load = "/v2/repository/models/changing/load"
    with _Requests(repository) as requests:
        for number in range(2, 12):
            served = len(requests.answers)
            file.with_name("new").write_bytes(adds(number)[: None if number % 2 else -20])
            file.with_name("new").replace(file)
            if number % 2:
                requests.current = (requests.current[0], number)
                assert repository.http.post(load).status_code == 200
                requests.current = (number, number)
            else:
                assert repository.http.post(load).status_code >= 400
            while len(requests.answers) < served + 3 and not requests.failures:
                repository.check_good()
        # Requests that began before the last load may end after it.
        wait_until(lambda: requests.failures or requests.answers[-1][1] == 11)
    assert not requests.failures


@pytest.mark.parametrize(
    ("num_clients", "num_calls"),
    [(12, 2), pytest.param(32, 32, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_storm_of_loads_and_unloads_ends_consistent(
    repository: BrokenRepository, num_clients: int, num_calls: int
) -> None:
    if not (repository.root / "stormy").exists():
        write_model(repository.root / "stormy", adds(5))

    def storm(seed: int) -> set[int]:
        random, statuses = Random(seed), set()
        for _ in range(num_calls):
            call = random.choice(["load", "unload"])
            statuses.add(repository.http.post(f"/v2/repository/models/stormy/{call}").status_code)
            statuses.add(repository.infer("stormy", 0).status_code)
        return statuses

    with ThreadPoolExecutor(num_clients) as pool:
        statuses = set().union(*pool.map(storm, range(num_clients)))
    assert statuses <= {200, 400, 404, 503}
    for call, state in (("load", "READY"), ("unload", "UNAVAILABLE"), ("load", "READY")):
        assert repository.http.post(f"/v2/repository/models/stormy/{call}").status_code == 200
        while (line := repository.index()["stormy"])["state"] == "UNLOADING":
            pass
        assert line["state"] == state
        assert repository.infer("stormy", 0).is_success == (state == "READY")
    assert repository.infer("stormy", 0).json()["outputs"][0]["data"] == [5.0, 5.0]
    repository.check_good()


def test_identical_loads_at_once_are_one_load(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"""
        import time
        class TritonPythonModel:
            def initialize(self, args):
                with open({str(note)!r}, "a") as file:
                    file.write("load\\n")
                time.sleep(0.2)     # the others have arrived
                raise ValueError("no")
    """
    write_python_model(tmp_path / "models", "bad", code=code)
    models = Repository([tmp_path / "models"], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    models.start([])

    def load(_: int) -> str:
        with pytest.raises(InferenceError) as caught:
            models.load("bad")
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        [error] = set(pool.map(load, range(8)))
    assert "ValueError: no" in error
    assert len(note.read_text().splitlines()) < 8
    num_loads = len(note.read_text().splitlines())
    load(0)     # a later one tries again
    assert len(note.read_text().splitlines()) == num_loads + 1
    models.close()


def test_loads_that_wait_take_no_thread_from_large_requests(tmp_path: Path) -> None:
    root, go = tmp_path / "models", tmp_path / "go"
    code = f"""
        import pathlib, time
        class TritonPythonModel:
            def initialize(self, args):
                while not pathlib.Path({str(go)!r}).exists():
                    time.sleep(0.001)
            def execute(self, requests):
                return []
    """
    explicit = {"model_control_mode": "explicit", "load_model": ("good",)}
    with serving_beside_good(root, {}, **explicit) as served, ThreadPoolExecutor(48) as pool:
        write_python_model(root, "slow", code=code)
        load = "/v2/repository/models/slow/load"
        loads = [pool.submit(served.http.post, load) for _ in range(48)]
        try:
            wait_until(lambda: len(served.server.server.server_state.tasks) == len(loads))
            large = served.http.post("/v1/completions", json={"prompt": [1] * 200_000})
            assert large.status_code == 404     # there is no text model
        finally:
            go.touch()
        assert {future.result().status_code for future in loads} == {200}


def test_a_stopping_server_loads_nothing(tmp_path: Path) -> None:
    explicit = {"model_control_mode": "explicit", "load_model": ("good",)}
    with serving_beside_good(tmp_path, {}, **explicit) as served:
        write_model(tmp_path / "late")
        served.server.server.services.repository.reject_loads()
        answer = served.http.post("/v2/repository/models/late/load")
        assert (answer.status_code, "stopping" in answer.text) == (503, True)
        served.check_good()


def _polled(root: Path) -> tuple[Repository, Callable[[], bool]]:
    """A repository that polls when it is told to."""
    options = RepositoryOptions(control_mode=ControlMode.POLL, poll_s=3600)
    models = Repository([root], options=options)
    models.start()
    return models, models.lifecycle.follow_folders


def _answer(models: Repository) -> list[float]:
    return value(ask(models, "m", X=[[0, 0]]))[0]


def test_polling_waits_for_a_version_that_is_being_copied(tmp_path: Path, caplog: Any) -> None:
    write_model(tmp_path / "m", adds(1))
    models, poll = _polled(tmp_path)
    content = adds(2)
    new = tmp_path / "m" / "2"
    new.mkdir()
    assert poll()
    for end in (0, 10, len(content) // 2, len(content)):
        (new / "model.onnx").write_bytes(content[:end])
        assert poll()
        assert _answer(models) == [1, 1]
    assert not poll()       # it has not changed since
    assert _answer(models) == [2, 2]
    assert not poll()
    assert not models.errors
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    models.close()


def test_polling_tries_a_broken_model_again_when_its_files_change(tmp_path: Path) -> None:
    version = write_model(tmp_path / "m", adds(1)[:-20])
    models, poll = _polled(tmp_path)
    assert "m" in models.errors
    (version / "model.onnx").write_bytes(adds(3))
    assert poll()
    assert not poll()
    assert not models.errors
    assert _answer(models) == [3, 3]
    models.close()


def test_weights_that_are_overwritten_in_place_do_not_change_a_polled_model(tmp_path: Path) -> None:
    version = write_model(tmp_path / "m", None)
    # Gather reads its weights in place: ONNX Runtime would map the file.
    nodes = [
        helper.make_node("Cast", ["X"], ["index"], to=onnx.TensorProto.INT64),
        helper.make_node("Gather", ["W", "index"], ["Y"]),
    ]
    weights = np.full(1 << 20, 7, np.float32)
    content = graph(*nodes, weights=[onnx.numpy_helper.from_array(weights, "W")])
    onnx.save(
        onnx.load_from_string(content),
        version / "model.onnx",
        save_as_external_data=True,
        location="weights",
        size_threshold=0,
    )
    models, poll = _polled(tmp_path)
    assert _answer(models) == [7, 7]
    if sys.platform == "linux":     # or the next line would end this process
        assert str(version / "weights") not in Path("/proc/self/maps").read_text()
    (version / "weights").write_bytes(b"")
    assert value(ask(models, "m", X=[[900_000, 1_000_000]]))[0] == [7, 7]
    assert poll()
    poll()
    assert "m" in models.errors
    assert _answer(models) == [7, 7]    # a failed load leaves the old version
    models.close()
