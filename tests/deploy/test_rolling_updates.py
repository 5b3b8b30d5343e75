"""While replicas are replaced by those of another version, each answer is of one version, and none is cut."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve import LLM
from genserve.deploy.ingress import ingress_server, remote_repository
from genserve.deploy.ingress.ingress_server import IngressServer
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.errors import RepositoryError
from genserve.repository.model_versions import ModelState
from genserve.settings import ServerSettings
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory
from tests.fakes.local_replicas import LocalReplicas
from tests.support.live_ingress import LiveIngress
from tests.support.live_server import wait_until
from tests.support.step_gate import StepGate
from tests.support.tiny_llama import add_shuffled_tokenizer

PROMPT = "Hello, what is it?"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def versions(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A repository with one tokenizer, and a repository with a second version of the tokenizer."""
    root = tmp_path_factory.mktemp("versions")
    old = shutil.copytree(tiny_repository, root / "old")
    new = shutil.copytree(tiny_repository, root / "new")
    add_shuffled_tokenizer(new / "tiny_tokenizer")
    return old, new


@pytest.fixture
def old(versions: tuple[Path, Path]) -> Iterator[list[ModelReplica]]:
    yield from loaded(versions[0])


@pytest.fixture
def new(versions: tuple[Path, Path]) -> Iterator[list[ModelReplica]]:
    yield from loaded(versions[1])


def loaded(repository: Path) -> Iterator[list[ModelReplica]]:
    replicas = [ModelReplica([repository], "tiny") for _ in range(2)]
    yield replicas
    for replica in replicas:
        replica.close()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_repository, "_FOLLOW_S", 0.2)


@pytest.fixture
def shared(versions: tuple[Path, Path], tmp_path: Path) -> Path:
    """The ingress's own copy of the repository, still without the second version."""
    return shutil.copytree(versions[0], tmp_path / "models")


def bring_new_version(shared: Path, versions: tuple[Path, Path]) -> None:
    shutil.copytree(versions[1] / "tiny_tokenizer" / "2", shared / "tiny_tokenizer" / "2")


def text(url: str) -> str:
    answer = httpx2.post(f"{url}/v1/completions", json=BODY, timeout=60)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def streamed(url: str, first: threading.Event | None = None) -> str:
    """The text of a stream, which must end as an answer does."""
    found, reason = "", None
    with httpx2.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                found += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
                if first is not None:
                    first.set()
    assert reason == "length"
    return found


def alone(repository: Path) -> str:
    """The text of a server that has one version only."""
    with LLM("tiny", model_repository=repository) as llm:
        answer = llm.generate(PROMPT, temperature=0, max_tokens=60, ignore_eos=True)
        return answer.text


@pytest.fixture(scope="module")
def texts(versions: tuple[Path, Path]) -> tuple[str, str]:
    """The answers of the two versions."""
    both = alone(versions[0]), alone(versions[1])
    assert both[0] != both[1]
    return both


@pytest.mark.extended
def test_no_answer_mixes_versions_and_none_fails(
    versions: tuple[Path, Path],
    old: list[ModelReplica],
    new: list[ModelReplica],
    texts: tuple[str, str],
    shared: Path,
) -> None:
    replicas = LocalReplicas(*old)
    found: list[str] = []
    ended = threading.Event()

    def load(url: str, number: int) -> None:
        while not ended.is_set():
            found.append(streamed(url) if number % 2 else text(url))

    with LiveIngress(shared, {"tiny": replicas}) as server, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(load, server.url, number) for number in range(4)]
        try:
            wait_until(lambda: texts[0] in found)
            bring_new_version(shared, versions)
            # As Serve does: one starts, one stops, and so on.
            server.call(lambda: replicas.add(new[0]))
            wait_until(lambda: found.count(texts[0]) > 20)
            server.call(lambda: replicas.add(new[1]))
            server.call(lambda: replicas.retire(0))
            wait_until(lambda: found.count(texts[1]) > 20)
            server.call(lambda: replicas.retire(1))
            seen = len(found)
            wait_until(lambda: len(found) > seen + 20)
        finally:
            ended.set()
        for client in clients:
            client.result()
    assert set(found) == set(texts)


@pytest.mark.extended
def test_a_stream_of_the_old_version_goes_on_for_longer_than_the_drain(
    versions: tuple[Path, Path],
    old: list[ModelReplica],
    new: list[ModelReplica],
    texts: tuple[str, str],
    shared: Path,
) -> None:
    replicas = LocalReplicas(old[0])
    with (
        LiveIngress(shared, {"tiny": replicas}, drain_s=0) as server,
        paused_stream(server, old[0]) as (reading, gate),
    ):
        bring_new_version(shared, versions)
        server.call(lambda: replicas.add(new[0]))
        server.call(lambda: replicas.retire(0))
        wait_until(lambda: is_served(server, "2"))
        assert text(server.url) == texts[1]
        assert not reading.done()
        gate.open()
        assert reading.result() == texts[0]


@contextmanager
def paused_stream(server: LiveIngress, replica: ModelReplica) -> Iterator[tuple[Future[str], StepGate]]:
    """A stream of a replica that has begun, and goes on when the gate of the replica opens."""
    gate, first = StepGate(replica.repository.text_model()), threading.Event()
    gate.shut()
    gate.allow(5)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(streamed, server.url, first)
        try:
            wait_until(first.is_set)
            yield reading, gate
        finally:
            gate.remove()


def is_served(server: LiveIngress, version: str) -> bool:
    """Whether the tokenizer has a version."""
    return version in httpx2.get(f"{server.url}/v2/models/tiny_tokenizer").json().get("versions", [])


def test_an_ingress_with_stale_files_answers_with_503_until_it_has_the_new_ones(
    versions: tuple[Path, Path],
    old: list[ModelReplica],
    new: list[ModelReplica],
    texts: tuple[str, str],
    shared: Path,
) -> None:
    replicas = LocalReplicas(old[0])
    with LiveIngress(shared, {"tiny": replicas}) as server, httpx2.Client(base_url=server.url) as client:
        server.call(lambda: replicas.add(new[0]))
        server.call(lambda: replicas.add(new[1]))
        wait_until(lambda: bool(server.server._repository.errors))
        assert text(server.url) == texts[0], "as long as one replica has the version whose files are here"
        assert client.get("/v2/health/ready").status_code == 200
        server.call(lambda: replicas.retire(0))
        wait_until(lambda: client.get("/v2/health/ready").status_code == 400)
        answer = client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
        assert client.post("/v2/models/tiny/generate", json={"text_input": PROMPT}).status_code == 400
        assert client.post("/v2/models/tiny_tokenizer/infer", json={
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [PROMPT]}]
        }).status_code == 503
        bring_new_version(shared, versions)
        wait_until(lambda: client.get("/v2/health/ready").status_code == 200)
        assert text(server.url) == texts[1]
        assert not server.server._repository.errors


def test_replicas_of_other_sizes_have_one_identity_and_their_end_cuts_no_stream(
    versions: tuple[Path, Path],
    old: list[ModelReplica],
    texts: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KV cache takes half of the memory that is free when a replica loads."""
    monkeypatch.setattr(HostMemory, "free_bytes", lambda _: 2 * 8 * 16 * 512)   # 8 blocks of 16 tokens
    small = ModelReplica([versions[0]], "tiny")
    monkeypatch.undo()
    monkeypatch.setattr(remote_repository, "_FOLLOW_S", 0.2)
    assert small.identity == old[0].identity
    length, small_length = (one.repository.text_model().max_length for one in (old[0], small))
    assert small_length < length
    # The small one is described first.
    replicas = LocalReplicas(small, old[0], choose=lambda _: 1)

    def shown() -> int:
        found: int = httpx2.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
        return found

    try:
        with (
            LiveIngress(versions[0], {"tiny": replicas}, drain_s=0) as server,
            paused_stream(server, old[0]) as (reading, gate),
        ):
            assert shown() == small_length, "any replica may have to take the request over"
            version = server.server._repository.find("tiny")
            server.call(lambda: replicas.kill(0))
            wait_until(lambda: shown() == length)
            assert server.server._repository.find("tiny") is version
            assert server.server._repository.state is ModelState.READY
            gate.open()
            assert reading.result() == texts[0]
    finally:
        small.close()


async def test_an_ingress_that_cannot_serve_replaces_none_that_does(
    versions: tuple[Path, Path], new: list[ModelReplica], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may lack the volume. The first ingress of a deployment opens its port all the same."""
    monkeypatch.setattr(ingress_server, "_START_S", 0.01)

    def made(repository: Path) -> IngressServer:
        settings = ServerSettings(model_repository=(repository,), http_port=0)
        return IngressServer(settings, {"tiny": LocalReplicas(new[0])})

    server = made(shared)
    with pytest.raises(RepositoryError, match="differ between the ingress and the replicas"):
        await server.start(others_serve=True)
    assert server._listener is None
    for repository, others_serve in ((shared, False), (versions[1], True)):
        server = made(repository)
        await server.start(others_serve=others_serve)
        assert server.port
        await server.stop()
