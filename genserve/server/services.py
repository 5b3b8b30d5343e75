"""Services: the parts of a running server, whether it is ready, and the options of its repository."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from genserve.config.backends import BackendConfig
from genserve.errors import GenserveError, InvalidRequest
from genserve.generation.delta_streams import EventLoopSink
from genserve.generation_metrics import Metrics
from genserve.kserve.log_settings import LogSettings
from genserve.kserve.shared_memory import SharedMemory
from genserve.kserve.trace_settings import TraceSettings, read_trace_config
from genserve.redaction import redact_repositories
from genserve.repository.model_versions import ModelState
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.defaults import default_sampling_params
from genserve.schedulers.rate_limiter import ResourceCapacity
from genserve.server.key_ring import KeyRing
from genserve.server.offload import start_daemon
from genserve.server.request_spans import RequestSpans
from genserve.server.response_store import ResponseStore
from genserve.server.running_inference import ResponseDispatcher
from genserve.server.triton_metrics import read_metrics_config
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


def repository_options(settings: ServerSettings) -> RepositoryOptions:
    """Return the options of the repository that a server with these settings serves.

    Raises:
        GenserveError: a setting is invalid; names its flag.
    """
    backends = BackendConfig.parse(settings.backend_config, backend_directory=settings.backend_directory)
    overriding = settings.overriding_generation_config
    try:
        default_sampling_params(overriding)
    except InvalidRequest as error:
        raise GenserveError(f"--override-generation-config: {error.message}") from None
    return RepositoryOptions(
        control_mode=ControlMode(settings.model_control_mode),
        poll_s=settings.repository_poll_s,
        strict_config=settings.strict_model_config,
        strict_placement=settings.strict_placement,
        strict_paths=settings.strict_repository_paths,
        config_name=settings.model_config_name,
        backend_directory=backends.backend_directory,
        default_max_batch_size=backends.default_max_batch_size,
        cache_bytes=settings.cache_bytes,
        load_threads=settings.load_threads,
        generation_config=settings.generation_config == "auto",
        override_generation_config=overriding,
        exit_timeout_s=settings.drain_s,
        max_queue=settings.max_queue,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_wait_s=settings.max_queue_wait_s,
        histogram_latencies=read_metrics_config(settings.metrics_config)["histogram_latencies"],
        rate_limiter=settings.rate_limit == "execution_count",
        resources=tuple(map(_capacity, settings.rate_limit_resources)),
    )


def _capacity(text: str) -> ResourceCapacity:
    try:
        return ResourceCapacity.parse(text)
    except ValueError as error:
        raise GenserveError(str(error), remedy="write for example --rate-limit-resource R1:4") from error
