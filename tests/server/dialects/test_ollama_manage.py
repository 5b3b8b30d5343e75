"""Ollama's client pulls, creates, copies and deletes models of a running server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from genserve.errors import RepositoryError
from genserve.repository.options import RepositoryOptions
from genserve.server.dialects.ollama import blobs, manage
from tests.support.live_server import LiveServer, children, wait_until

TALK = [{"role": "user", "content": "hello"}]
OPTIONS = {"num_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("manage") / "models")
    with LiveServer(root, model_control_mode="on-demand") as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def names(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.list().models]


def test_a_copy_answers_as_its_source_and_survives_it(client: ollama.Client, server: LiveServer) -> None:
    answer = client.chat("tiny", TALK, options=OPTIONS).message.content
    client.copy("tiny", "second:v1")
    assert client.chat("second:v1", TALK, options=OPTIONS).message.content == answer
    assert client.show("Second:v1").modelfile == "FROM second-v1\n"
    client.copy("second:v1", "third")
    assert names(client) == ["second-v1:latest", "third:latest", "tiny:latest"]
    client.delete("second:v1")
    assert names(client) == ["third:latest", "tiny:latest"]
    assert client.chat("third", TALK, options=OPTIONS).message.content == answer
    client.delete("third")
    [root] = server.server.services.settings.model_repository
    assert {path.name for path in root.iterdir()} >= {"tiny", "tiny_logits"}
    assert not [path for path in root.iterdir() if path.name.startswith(("second", "third"))]
    with pytest.raises(ollama.ResponseError, match="'third'") as raised:
        client.chat("third", TALK)
    assert raised.value.status_code == 404


def test_a_model_with_other_defaults_and_another_template(client: ollama.Client) -> None:
    lines = client.create(
        "mario",
        from_="tiny",
        parameters={"temperature": 0, "num_ctx": 4096},
        template="{{ messages[0].content }}",
        stream=True,
    )
    statuses = [line.status for line in lines]
    assert statuses == ["copying tiny", "success"]
    shown = client.show("mario")
    assert shown.template == "{{ messages[0].content }}"
    assert "temperature" in (shown.parameters or "")
    assert client.create("luigi", from_="mario", stream=False).status == "success"
    for name in ("mario", "luigi"):
        client.delete(name)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"from": "tiny", "template": "{{ .Prompt }}"}, "template"),
        ({"from": "tiny", "system": "Be brief."}, "system"),
        ({"from": "tiny", "parameters": {"mirostat": 1}}, "parameters.mirostat"),
        ({"from": "tiny", "parameters": {"presence_penalty": 1}}, "parameters.presence_penalty"),
        ({"from": "tiny", "parameters": {"repeat_penalty": -5}}, "parameters.repeat_penalty must be"),
        ({"from": "tiny", "parameters": {"temperature": "hot"}}, "parameters.temperature must be"),
        ({"from": "tiny", "template": "{% if %}"}, "line 1 of the chat template"),
        ({"from": "tiny", "quantize": "q4_K_M"}, "quantize"),
        ({"from": "nobody"}, "nobody"),
        ({}, "from and files"),
        ({"files": {"a.gguf": "sha256:" + "0" * 64}}, "not here"),
        ({"files": {"..": "sha256:" + "0" * 64}}, "name of a file"),
        ({"files": {"a.gguf": "../../etc/passwd"}}, "not a digest"),
        ({"model": "a b", "from": "tiny"}, "name of a model"),
        ({"model": "tiny", "from": "tiny"}, "already"),
    ],
)
def test_what_cannot_be_created(http: httpx2.Client, fields: dict, problem: str) -> None:
    answer = http.post("/api/create", json={"model": "new", "stream": False, **fields})
    assert answer.status_code in (400, 404)
    assert problem in answer.text
    assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["tiny:latest"]


def test_a_model_whose_defaults_cannot_be_written_does_not_stay(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradict(*_: object) -> None:
        raise RepositoryError("its own defaults contradict them")

    monkeypatch.setattr(RepositoryOptions, "default_sampling_params", contradict)
    answer = http.post("/api/create", json={"model": "new", "from": "tiny", "stream": False})
    assert "contradict" in answer.json()["error"]
    assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["tiny:latest"]


def test_a_client_that_leaves_during_a_copy_leaves_a_whole_model(
    http: httpx2.Client, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, left, copy = threading.Event(), threading.Event(), manage.copy_text_model

    def slow(*names: Any, **to: Any) -> None:
        begun.set()
        left.wait(30)
        copy(*names, **to)

    monkeypatch.setattr(manage, "copy_text_model", slow)
    body = {"model": "whole", "from": "tiny", "template": "{{ messages[0].content }}", "stream": False}
    with ThreadPoolExecutor() as pool:
        creating = pool.submit(http.post, "/api/create", json=body, timeout=1)
        assert begun.wait(30)
        with pytest.raises(httpx2.TimeoutException):
            creating.result()
    time.sleep(0.2)     # the server notices it
    left.set()
    wait_until(lambda: "whole:latest" in names(client))
    wait_until(lambda: client.show("whole").template == "{{ messages[0].content }}")
    client.delete("whole")


def test_the_audit_log_names_what_was_deleted(
    client: ollama.Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.copy("tiny", "short")
    client.delete("short")
    wait_until(lambda: 'change="delete short"' in caplog.text)      # the line comes after the answer


def test_a_list_of_models_with_a_link_that_leads_nowhere(server: LiveServer, client: ollama.Client) -> None:
    [root] = server.server.services.settings.model_repository
    client.copy("tiny", "linked")
    (root / "linked_logits/1/link").symlink_to("nowhere")
    assert names(client) == ["linked:latest", "tiny:latest"]
    client.delete("linked")


def test_uploads_are_checked(http: httpx2.Client, client: ollama.Client, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"weights" * 100_000)
    digest = client.create_blob(file)
    assert digest == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert http.head(f"/api/blobs/{digest}").status_code == 200
    other = "sha256:" + "1" * 64
    assert http.head(f"/api/blobs/{other}").status_code == 404
    assert http.post(f"/api/blobs/{other}", content=b"something else").status_code == 400
    assert http.head(f"/api/blobs/{other}").status_code == 404


def test_an_upload_onto_a_full_disk(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(blobs.os, "replace", full)
    digest = hashlib.sha256(b"x").hexdigest()
    answer = http.post(f"/api/blobs/sha256:{digest}", content=b"x")
    assert "No space left" in answer.json()["error"]
    assert http.head(f"/api/blobs/sha256:{digest}").status_code == 404


def test_a_pull_of_what_is_there_and_of_what_is_unknown(client: ollama.Client, http: httpx2.Client) -> None:
    assert [line.status for line in client.pull("tiny:latest", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="'qwen-of-nobody'"):
        list(client.pull("qwen-of-nobody", stream=True))
    answer = http.post("/api/pull", json={"model": "qwen-of-nobody", "stream": False})
    assert "'qwen-of-nobody'" in answer.json()["error"]


SLOW = """
import json, sys, time
from pathlib import Path
from genserve.export import export_job
from genserve.files import staging_folder

def run(job, write):
    with staging_folder(Path(job["repository"]), "slow"):
        write({"status": "exporting"})
        time.sleep(60)

export_job.run = run
export_job.start()
"""


@pytest.mark.parametrize("streams", [True, False])
def test_a_pull_ends_with_its_client_and_leaves_nothing(
    server: LiveServer, http: httpx2.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    monkeypatch.setattr(manage, "EXPORT_JOB", (sys.executable, str(slow)))
    [root] = server.server.services.settings.model_repository

    def staging() -> list[Path]:
        return [path for path in root.iterdir() if path.name.startswith(".slow")]

    with httpx2.Client(base_url=server.url) as leaving, ThreadPoolExecutor() as pool:
        body = {"model": "qwen3:0.6b", "stream": streams}
        pulling = pool.submit(leaving.post, "/api/pull", json=body, timeout=3)
        wait_until(staging)
        with pytest.raises(httpx2.TimeoutException):
            pulling.result()
    wait_until(lambda: not staging())
    wait_until(lambda: not [pid for pid in children() if str(slow) in command_of(pid)])


def test_models_are_changed_by_who_may_control_the_server(tiny_repository: Path) -> None:
    settings = {"model_control_mode": "on-demand", "api_key": "user", "control_key": "admin"}
    with (
        LiveServer(tiny_repository, **settings) as server,
        httpx2.Client(base_url=server.url, headers={"Authorization": "Bearer user"}) as http,
    ):
        body = {"model": "tiny", "source": "tiny", "destination": "other", "from": "tiny"}
        digest = "sha256:" + "1" * 64
        for method, path in (
            *(("POST", one) for one in ("pull", "create", "copy", "push", f"blobs/{digest}")),
            ("DELETE", "delete"),
        ):
            assert http.request(method, f"/api/{path}", json=body).status_code == 403
        assert json.dumps(http.get("/api/tags").json()).count("tiny:latest") == 2


@pytest.mark.extended
def test_a_model_of_uploaded_files(client: ollama.Client, http: httpx2.Client, tmp_path: Path) -> None:
    from tests.export.adapters import write_adapter
    from tests.export.ggufs import write_gguf, write_gguf_adapter
    from tests.support.tiny_llama import tiny_llama_checkpoint

    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",))
    files = {
        "model.gguf": write_gguf(base, tmp_path / "base.gguf"),
        "adapter.gguf": write_gguf_adapter(adapter, base, tmp_path / "adapter.gguf"),
    }
    digests = {name: client.create_blob(file) for name, file in files.items()}
    lines = client.create(
        "merged",
        files={"model.gguf": digests["model.gguf"]},
        adapters={"adapter.gguf": digests["adapter.gguf"]},
        quantize="f32",
        stream=True,
    )
    statuses = [line.status for line in lines]
    assert "reading the checkpoint" in statuses
    assert statuses[-1] == "success"
    assert client.chat("merged", TALK, options=OPTIONS).message.content
    assert http.head(f"/api/blobs/{digests['model.gguf']}").status_code == 404     # it is the model's now
    # The same from the files of a checkpoint.
    folder = {file.name: client.create_blob(file) for file in base.iterdir() if file.is_file()}
    assert client.create("plain", files=folder, quantize="f32").status == "success"
    assert client.chat("plain", TALK, options=OPTIONS).message.content
    for name in ("merged", "plain"):
        client.delete(name)


@pytest.mark.extended
def test_a_client_that_leaves_ends_the_export(
    http: httpx2.Client, client: ollama.Client, tmp_path: Path
) -> None:
    from tests.export.ggufs import write_gguf
    from tests.support.tiny_llama import tiny_llama_checkpoint

    base = tiny_llama_checkpoint(tmp_path / "base")
    digest = client.create_blob(write_gguf(base, tmp_path / "base.gguf"))
    body = {"model": "left", "files": {"model.gguf": digest}, "quantize": "f32"}
    with http.stream("POST", "/api/create", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: not [pid for pid in children() if "export_job" in command_of(pid)])
    assert http.head(f"/api/blobs/{digest}").status_code == 200
    assert client.create("left", files={"model.gguf": digest}, quantize="f32").status == "success"
    client.delete("left")


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:     # it has ended
        return ""
