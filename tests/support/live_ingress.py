"""A live ingress on a free port of 127.0.0.1, over replicas in the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from genserve.deploy.ingress.ingress_server import IngressServer
from genserve.deploy.replica_messages import ReplicaSet
from genserve.settings import ServerSettings


class LiveIngress:
    """`with LiveIngress(repository, replicas) as server: ... server.url ...`

    Attributes:
        event_loop: the event loop of the ingress, on which replicas are called.
    """

    event_loop: asyncio.AbstractEventLoop

    def __init__(self, repository: Path, replicas: Mapping[str, ReplicaSet], **settings: Any) -> None:
        self.server = IngressServer(
            ServerSettings(model_repository=(repository,), **{"http_port": 0, **settings}), replicas
        )
        self._ready, self._stopping = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()
        self.address = f"127.0.0.1:{self.server.port}"
        self.url = f"http://{self.address}"

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function on the event loop."""
        self.event_loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self.call(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        await self.server.start()
        self._ready.set()
        await self._stopping.wait()
        await self.server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
