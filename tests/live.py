"""A live server on a free port of 127.0.0.1, in a thread of the test's process."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from genserve.server.api_server import Server, ServerInfo
from genserve.settings import ServerSettings
from genserve.textmodel.text_model import TextModel


class LiveServer:
    """`with LiveServer(repository) as server: ... server.url ...`"""

    def __init__(self, repository: Path, **settings: Any) -> None:
        ready: queue.SimpleQueue[ServerInfo] = queue.SimpleQueue()
        self.server = Server(
            ServerSettings(
                model_repository=(repository,),
                **{"http_port": 0, "grpc_port": 0, "metrics_port": 0, **settings},
            ),
            on_ready=ready.put,
        )
        self.thread = threading.Thread(target=self.server.serve_until_stopped)
        self.thread.start()
        self.info = ready.get(timeout=60)
        self.url = self.info.url
        self.grpc_url = self.info.grpc_address

    @property
    def model(self) -> TextModel:
        return self.server.services.repository.text_model()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold anything: the state, and the parent.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return found
