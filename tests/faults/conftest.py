"""Fixtures of this folder: a server that its tests share, and a gate before the steps of a module's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.shared_server import SharedServer, faults_repository
from tests.support.live_server import LiveServer, serving, wait_until
from tests.support.step_gate import StepGate


@pytest.fixture(scope="session")
def shared_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """A running server, without other streams."""
    folder = tmp_path_factory.mktemp("faults")
    repository = faults_repository(tiny_repository, folder / "repository")
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with (folder / "log").open("w") as log, serving(repository, *flags, stderr=log) as process:
        yield SharedServer(process, folder / "log")


@pytest.fixture(scope="module")
def _beside_streams(shared_server: SharedServer) -> Iterator[None]:
    """The streams run only during the tests of this folder."""
    shared_server.bystanders.start()
    yield
    shared_server.bystanders.stop()


@pytest.fixture
def server(shared_server: SharedServer, _beside_streams: None) -> Iterator[SharedServer]:
    """A running server; after the test: ready, without leaks, the other streams unharmed, its log clean."""
    yield shared_server
    shared_server.check()


@pytest.fixture
def gate(live: LiveServer) -> Iterator[StepGate]:
    """A gate before each step of the module's server, `live`; after the test, its requests have ended."""
    model = live.model
    gate = StepGate(model)
    yield gate
    gate.remove()
    wait_until(lambda: not model.engine.num_accepted)
