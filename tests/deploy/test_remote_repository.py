"""How an ingress follows the replicas, and what it cannot serve."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from genserve.deploy.ingress import remote_repository
from genserve.deploy.ingress.deployment_metrics import DeploymentMetrics
from genserve.deploy.ingress.remote_repository import RemoteRepository
from genserve.deploy.replica.description import ReplicaStatus, VersionDescription, identity_of
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Broadcast
from genserve.prompt import Chat, Message, Tool
from genserve.repository.model_versions import ModelState
from genserve.repository.options import RepositoryOptions
from tests.fakes.local_replicas import LocalReplicas


class Replica:
    """The only replica of a deployment, which reports its status but gets no calls."""

    def __init__(self, status: Callable[[], ReplicaStatus], description: VersionDescription) -> None:
        self._status = status
        self._description = description
        self.num_described = 0

    async def broadcast(self, method: Broadcast) -> list[Any]:
        if method == "status":
            return [self._status()]
        self.num_described += 1
        return [[self._description]]


def described(config: bytes) -> VersionDescription:
    return VersionDescription(name="m", version=1, config=config, labels={}, load_s=1.0, text=None)


async def follow_once(root: Path, replica: Any) -> RemoteRepository:
    repository = RemoteRepository(
        [root], {"m": replica}, options=RepositoryOptions(), metrics=DeploymentMetrics()
    )
    repository.follow()
    await repository.described(timeout_s=30)
    assert repository._following is not None
    assert not repository._following.done()
    await repository.stop()
    return repository


async def test_a_description_that_cannot_be_read_does_not_end_the_following(tmp_path: Path) -> None:
    broken = described(b"\xff")
    status = ReplicaStatus(identity=identity_of([broken]), load=ReplicaLoad())
    repository = await follow_once(tmp_path, Replica(lambda: status, broken))
    assert "'m'" in repository.errors["m"].message
    assert repository.state is ModelState.UNAVAILABLE


async def test_an_error_of_a_cluster_does_not_end_the_following(tmp_path: Path) -> None:
    good = described(b"\x0a\x01m")
    answers = iter([ZeroDivisionError(), ReplicaStatus(identity=identity_of([good]), load=ReplicaLoad())])

    def status() -> ReplicaStatus:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    repository = await follow_once(tmp_path, Replica(status, good))
    assert repository.served == []  # stopped
    assert not repository.errors


async def test_a_deployment_that_does_not_answer_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_repository, "_FOLLOW_S", 0.001)

    class Silent:
        async def broadcast(self, method: Broadcast) -> list[Any]:
            await asyncio.Event().wait()
            return []

    good = described(b"\x0a\x01m")
    replica: Any = Replica(lambda: ReplicaStatus(identity=identity_of([good]), load=ReplicaLoad()), good)
    silent: Any = Silent()
    repository = RemoteRepository(
        [tmp_path], {"silent": silent, "m": replica}, options=RepositoryOptions(), metrics=DeploymentMetrics()
    )
    repository.follow()
    while not repository.is_ready("m"):
        await asyncio.sleep(0)
    await repository.stop()


async def test_what_cannot_be_served_is_tried_again_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_repository, "_FOLLOW_S", 0.001)
    broken = described(b"\xff")
    replica = Replica(lambda: ReplicaStatus(identity=identity_of([broken]), load=ReplicaLoad()), broken)
    repository = RemoteRepository(
        [tmp_path], {"m": replica}, options=RepositoryOptions(), metrics=DeploymentMetrics()
    )
    repository.follow()
    while replica.num_described < 3:
        await asyncio.sleep(0)
    await repository.stop()
    assert caplog.text.count("model m is not served") == 1


TOOL_FORMAT = 'parameters { key: "tool_format" value { string_value: "mistral" } }\n'


@pytest.fixture(scope="module")
def replica(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelReplica]:
    """A replica whose decoder's config names a format of tool calls."""
    root = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("replica") / "models")
    with (root / "tiny_decoder" / "config.pbtxt").open("a") as config:
        config.write(TOOL_FORMAT)
    replica = ModelReplica([root], "tiny")
    yield replica
    replica.close()


async def test_a_text_model_has_the_files_of_its_replicas_or_is_not_served(
    tiny_repository: Path, tmp_path: Path, replica: ModelReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_repository, "_FOLLOW_S", 0.001)
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    tokenizer = root / "tiny_tokenizer" / "1" / "tokenizer.json"
    original = tokenizer.read_bytes()
    tokenizer.write_bytes(original + b"\n")
    repository = RemoteRepository(
        [root], {"tiny": LocalReplicas(replica)}, options=RepositoryOptions(), metrics=DeploymentMetrics()
    )
    repository.follow()
    await repository.described(timeout_s=30)
    assert "'tiny_tokenizer', version 1" in repository.errors["tiny"].message
    assert not repository.is_ready("tiny")

    with (root / "tiny_decoder" / "config.pbtxt").open("a") as config:
        config.write(TOOL_FORMAT)
    tokenizer.write_bytes(original)
    while repository.errors:
        await asyncio.sleep(0)
    chat = Chat(messages=(Message(role="user", content="Hello"),), tools=(Tool(name="f"),))
    assert repository.text_model("tiny").encode(chat) == replica.repository.text_model("tiny").encode(chat)
    await repository.stop()
