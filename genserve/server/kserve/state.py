"""KServe state: what KServe's routes and gRPC's methods share besides the server's services."""

from __future__ import annotations

import asyncio

from genserve.server.kserve.running_inference import ResponseDispatcher
from genserve.server.kserve.shared_memory import SharedMemory
from genserve.server.kserve.trace_settings import TraceSettings, read_trace_config
from genserve.settings import ServerSettings


class KServeState:
    """The state of the protocol in one server.

    Attributes:
        shared_memory: the regions that clients have registered.
        trace_settings: which requests are traced, and where to.
    """

    def __init__(self, settings: ServerSettings, *, shared_memory: SharedMemory | None = None) -> None:
        """Begin without regions and traces; raises GenserveError for an invalid `trace_config`."""
        self.shared_memory = shared_memory or SharedMemory(allowed=settings.allow_client_shm)
        self.trace_settings = TraceSettings(read_trace_config(settings.trace_config))
        self._dispatcher: ResponseDispatcher | None = None

    def dispatcher(self) -> ResponseDispatcher:
        """Return the dispatcher of responses to the running event loop, created by the first call."""
        if self._dispatcher is None:
            self._dispatcher = ResponseDispatcher(asyncio.get_running_loop())
        return self._dispatcher
