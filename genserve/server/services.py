"""Services: the parts of a running server, and whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from genserve.generation.delta_streams import EventLoopSink
from genserve.generation_metrics import Metrics
from genserve.kserve.log_settings import LogSettings
from genserve.kserve.shared_memory import SharedMemory
from genserve.kserve.trace_settings import TraceSettings, read_trace_config
from genserve.redaction import redact_repositories
from genserve.repository.model_versions import ModelState
from genserve.repository.repository import Repository
from genserve.server.key_ring import KeyRing
from genserve.server.offload import start_daemon
from genserve.server.request_spans import RequestSpans
from genserve.server.response_store import ResponseStore
from genserve.server.running_inference import ResponseDispatcher
from genserve.settings import ServerSettings

T = TypeVar("T")

_READINESS_TIMEOUT_S = 5.0


class Readiness:
    """Asks models whether they are ready. A Python model's own check may hang, so it has 5 s.

    Concurrent callers share one call. For one event loop.
    """

    def __init__(self, models: Repository) -> None:
        self._models = models
        self._running: dict[object, asyncio.Future[Any]] = {}

    async def state(self) -> str:
        """Return the worst state of all models; UNAVAILABLE if they do not answer in time."""
        return await self._ask(None, lambda: self._models.state, otherwise=ModelState.UNAVAILABLE)

    async def of_model(self, name: str, version: int) -> bool:
        """Whether a version of a model is ready; -1: its latest version."""
        return await self._ask((name, version), lambda: self._models.is_ready(name, version), otherwise=False)

    async def _ask(self, key: object, question: Callable[[], T], *, otherwise: T) -> T:
        running: asyncio.Future[T] | None = self._running.get(key)
        if running is None:
            try:
                running = start_daemon(question, name="readiness")
            except RuntimeError:    # no thread can be started
                return otherwise
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key))
        done, _ = await asyncio.wait({running}, timeout=_READINESS_TIMEOUT_S)
        return running.result() if done else otherwise


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of a running server that its routes share."""

    settings: ServerSettings
    repository: Repository
    metrics: Metrics
    draining: bool = False                                  # set once, when the server begins to stop
    num_grpc_calls: int = 0                                 # that run; changed on the event loop
    keys: KeyRing = field(init=False)
    shared_memory: SharedMemory = field(init=False)
    trace_settings: TraceSettings = field(init=False)
    log_settings: LogSettings = field(init=False)
    readiness: Readiness = field(init=False)
    responses: ResponseStore = field(init=False)
    request_spans: RequestSpans | None = field(init=False)  # None: no collector is set
    _sink: EventLoopSink | None = None
    _response_dispatcher: ResponseDispatcher | None = None

    def __post_init__(self) -> None:
        backends = self.settings.backend_directory
        redact_repositories([*self.settings.model_repository, *([backends] if backends else [])])
        self.keys = KeyRing(self.settings)
        self.shared_memory = SharedMemory(allowed=self.settings.allow_client_shm)
        self.trace_settings = TraceSettings(read_trace_config(self.settings.trace_config))
        endpoint = self.settings.otlp_traces_endpoint
        self.request_spans = RequestSpans(endpoint) if endpoint else None
        self.readiness = Readiness(self.repository)
        self.log_settings = LogSettings(self.settings)
        self.responses = ResponseStore(max_bytes=self.settings.response_store_byte_size)

    async def is_ready(self) -> bool:
        """Whether the server accepts requests and every model that it should load is ready.

        Without `strict_readiness` it is enough that the server has tried to load them.
        """
        if self.draining:
            return False
        state = await self.readiness.state()
        return state == ModelState.READY if self.settings.strict_readiness else state != ModelState.LOADING

    def output_sink(self) -> EventLoopSink:
        """Return the sink of the running event loop for generated text, created by the first call."""
        if self._sink is None:
            self._sink = EventLoopSink(asyncio.get_running_loop())
        return self._sink

    def response_dispatcher(self) -> ResponseDispatcher:
        """Return the dispatcher of the running event loop for responses, created by the first call."""
        if self._response_dispatcher is None:
            self._response_dispatcher = ResponseDispatcher(asyncio.get_running_loop())
        return self._response_dispatcher


async def _services(request: Request) -> Services:     # FastAPI would run a plain function on a thread
    services: Services = request.app.state.services
    return services


SharedServices = Annotated[Services, Depends(_services)]
