"""A gRPC server on a free port of 127.0.0.1, on an event loop in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

from genserve.generation_metrics import Metrics
from genserve.server.kserve.grpc.grpc_server import GrpcServer
from genserve.server.kserve.state import KServeState
from genserve.server.services import Services
from genserve.settings import ServerSettings
from tests.fakes.inference_server import FakeInferenceServer, FakeModel


class LiveGrpc:
    """`with LiveGrpc([fake_model("m")]) as server: ... server.address ...`"""

    def __init__(self, models: list[FakeModel], **settings: Any) -> None:
        self.inference_server = FakeInferenceServer(models)
        self.services = Services(
            settings=ServerSettings(**{"allow_client_shm": True, **settings}),
            repository=self.inference_server,  # type: ignore[arg-type]
            metrics=Metrics(),
        )
        self._state = KServeState(self.services.settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = self._run(self._open())
        self.address = f"127.0.0.1:{self.port}"

    async def _open(self) -> int:
        self._endpoint = GrpcServer(self.services, self._state)
        return await self._endpoint.open(host="127.0.0.1", port=0)

    def open_again(self) -> None:
        """Open a second server on the same port."""

        async def open_second() -> None:
            second = GrpcServer(self.services, self._state)
            try:
                await second.open(host="127.0.0.1", port=self.port)
            finally:
                await second.close(drain_s=0)

        self._run(open_second())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def close(self, *, drain_s: float = 1) -> None:
        self._run(self._endpoint.close(drain_s=drain_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.inference_server.close()
