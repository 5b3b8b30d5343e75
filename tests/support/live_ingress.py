"""A live ingress on a free port of 127.0.0.1, over replicas in the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from genserve.deploy.ingress.ingress_app import make_ingress_app
from genserve.deploy.replica_messages import ReplicaSet
from genserve.settings import ServerSettings


class LiveIngress:
    """`with LiveIngress(repository, replicas) as server: ... server.url ...`

    Attributes:
        event_loop: of the ingress, on which the replicas are called.
    """

    def __init__(self, repository: Path, replicas: Mapping[str, ReplicaSet], **settings: Any) -> None:
        app = make_ingress_app(ServerSettings(model_repository=(repository,), **settings), replicas)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="on", log_config=None, ws="none")
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._server.ready.wait()
        [socket] = self._server.servers[0].sockets
        self.address = f"127.0.0.1:{socket.getsockname()[1]}"
        self.url = f"http://{self.address}"

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        return self._server.event_loop

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function on the event loop."""
        self.event_loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._server.serve())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Server(uvicorn.Server):
    event_loop: asyncio.AbstractEventLoop

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        self.event_loop = asyncio.get_running_loop()
        self.ready.set()
