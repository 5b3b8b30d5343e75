"""genserve, started as each run of the exchanges asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.conformance.triton.conversation import Addresses, Conversation
from tests.conformance.triton.runs import RUNS, Run, lay_out
from tests.support.live_server import LiveServer


@pytest.fixture(scope="session")
def conformance_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Conversation]]:
    """A function from the name of a run to a conversation with its server, started when first asked for."""
    with ExitStack() as stack:

        @cache
        def start(run: str) -> Conversation:
            repository = tmp_path_factory.mktemp(run)
            lay_out(RUNS[run], repository)
            server = stack.enter_context(LiveServer(repository, **_settings(RUNS[run])))
            addresses = Addresses(
                http=server.url.removeprefix("http://"),
                grpc=server.info.grpc_address,
                metrics=server.info.metrics_url.removeprefix("http://").removesuffix("/metrics"),
            )
            return stack.enter_context(Conversation(addresses))

        yield start


def _settings(run: Run) -> dict[str, Any]:
    """The options of a run in genserve's words."""
    settings = run.options()
    settings.pop("models", None)
    # What Triton allowed by default when it was recorded.
    return settings | {"allow_client_shm": True, "allow_uploaded_code": True}
