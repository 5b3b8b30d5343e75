"""The server that the tests of this folder share, in good health after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.shared_server import SharedServer, faults_repository
from tests.support.live_server import serving


@pytest.fixture(scope="session")
def _shared_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    folder = tmp_path_factory.mktemp("faults")
    repository = faults_repository(tiny_repository, folder / "repository")
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with (folder / "log").open("w") as log, serving(repository, *flags, stderr=log) as process:
        yield SharedServer(process, folder / "log")


@pytest.fixture(scope="module")
def _beside_streams(_shared_server: SharedServer) -> Iterator[None]:
    """The streams run only during the tests of this folder."""
    _shared_server.bystanders.start()
    yield
    _shared_server.bystanders.stop()


@pytest.fixture
def server(_shared_server: SharedServer, _beside_streams: None) -> Iterator[SharedServer]:
    """A running server; after the test: ready, without leaks, the other streams unharmed, its log clean."""
    yield _shared_server
    _shared_server.check()
