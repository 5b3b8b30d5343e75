"""Services: the parts of a running server, whether it is ready, and the options of its repository."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from genserve.batching.rate_limiter import ResourceCapacity
from genserve.config.backends import BackendConfig
from genserve.engine.delta_streams import AsyncDeltaStream, EventLoopSink
from genserve.engine.disk_cache import PrefixCacheFolder
from genserve.errors import GenserveError, InferenceError, InvalidRequest, ModelNotReady, ResponseNotFound
from genserve.generation_metrics import Metrics
from genserve.redaction import redact_repositories
from genserve.repository.encoder_model import EncoderModel
from genserve.repository.model_versions import ModelState
from genserve.repository.on_demand import ModelUse, default_memory_budget
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.served_models import ServedModels
from genserve.request_context import CURRENT_REQUEST, RequestContext
from genserve.sampling.defaults import default_sampling_params
from genserve.server.access.access_control import AccessControl, is_loopback, parse_restrictions
from genserve.server.access.key_ring import KeyRing
from genserve.server.access.key_usage import KeyUsageCollector
from genserve.server.http.offload import start_daemon
from genserve.server.http.sse_response import ClientLeft, while_connected
from genserve.server.observe.log_settings import LogSettings
from genserve.server.observe.request_spans import RequestSpans
from genserve.server.observe.triton_metrics import read_metrics_config
from genserve.settings import ServerSettings, read_keep_alive, read_memory_budget
from genserve.textmodel.text_model import TextModel

T = TypeVar("T")

_READINESS_TIMEOUT_S = 5.0
_ID_PREFIX = re.compile("^[a-z]+[-_]")  # such as `chatcmpl-`


def _end_unused(using: Future[ModelUse]) -> None:
    """End the use of a model by a request that has ended before it."""
    if not using.cancelled() and using.exception() is None:
        using.result().end()


class Readiness:
    """Asks models whether they are ready. A Python model's own check may hang, so it has 5 s.

    Concurrent callers share one call. For one event loop.
    """

    def __init__(self, models: ServedModels) -> None:
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
            except RuntimeError:  # no thread can be started
                return otherwise
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key))
        done, _ = await asyncio.wait({running}, timeout=_READINESS_TIMEOUT_S)
        return running.result() if done else otherwise


class RunningAnswers:
    """The answers that run, by their ids and those of their requests, apart for each API key."""

    def __init__(self) -> None:
        self._streams: WeakValueDictionary[tuple[str, str], AsyncDeltaStream] = WeakValueDictionary()

    def add(self, stream: AsyncDeltaStream, request: RequestContext, *, answer_id: str) -> None:
        """Add an answer, which is forgotten when nobody reads it any more.

        Args:
            stream: the answer.
            request: the client's request; its id counts, too.
            answer_id: the id of the answer, without the prefix that a dialect writes.
        """
        self._streams[request.key.name, answer_id] = stream
        if request.id:
            self._streams[request.key.name, request.id] = stream

    def find(self, written_id: str, *, key: str) -> AsyncDeltaStream:
        """Return the stream of a running answer.

        Args:
            written_id: the id of the answer, as a dialect writes it, or of its request.
            key: the name of the API key of who asks.

        Raises:
            ResponseNotFound: no answer with this id runs for the key.
        """
        for known_id in (written_id, _ID_PREFIX.sub("", written_id)):
            stream = self._streams.get((key, known_id))
            if stream is not None and stream.is_open:
                return stream
        raise ResponseNotFound(f"no answer with the id {written_id[:128]!r} runs", field="id")


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of a running server that its routes share."""

    settings: ServerSettings
    repository: ServedModels
    metrics: Metrics
    draining: bool = False  # set once, when the server begins to stop
    num_grpc_calls: int = 0  # that run; changed on the event loop
    answers: RunningAnswers = field(default_factory=RunningAnswers)
    keys: KeyRing = field(init=False)
    access: AccessControl = field(init=False)  # to the HTTP port
    is_local: bool = field(init=False)  # no other machine can connect to that port
    log_settings: LogSettings = field(init=False)
    readiness: Readiness = field(init=False)
    request_spans: RequestSpans | None = field(init=False)  # None: no collector is set
    _sink: EventLoopSink | None = None

    def __post_init__(self) -> None:
        backends = self.settings.backend_directory
        redact_repositories([*self.settings.model_repository, *([backends] if backends else [])])
        self.keys = KeyRing(self.settings)
        self.metrics.registry.register(KeyUsageCollector(self.keys.usages))
        self.access = AccessControl(
            self.settings,
            host=self.settings.host,
            keys=self.keys,
            restrictions=parse_restrictions(self.settings.http_restricted_api),
        )
        endpoint = self.settings.otlp_traces_endpoint
        self.is_local = is_loopback(self.settings.host) and not self.settings.allow_unauthenticated
        self.request_spans = RequestSpans(endpoint) if endpoint else None
        self.readiness = Readiness(self.repository)
        self.log_settings = LogSettings(self.settings)

    async def is_ready(self) -> bool:
        """Whether the server accepts requests and every model that it should load is ready.

        Without `strict_readiness` it is enough that the server has tried to load them.
        """
        if self.draining:
            return False
        state = await self.readiness.state()
        return state == ModelState.READY if self.settings.strict_readiness else state != ModelState.LOADING

    def check_running(self) -> None:
        """Raise ModelNotReady if the server is stopping."""
        if self.draining:
            raise ModelNotReady("the server is stopping", remedy="try again on another server")

    async def text_model(self, name: str | None = None, *, keep_alive_s: float | None = None) -> TextModel:
        """Return a text model, which stays loaded for the current request; see `ServedModels.text_model`.

        Args:
            name: its name; None: the only one.
            keep_alive_s: see `OnDemandModels.use`.

        Raises:
            ModelNotFound, ModelNotReady: see `ServedModels.text_model`; or it cannot be loaded on demand.
            Overloaded: too many requests wait for it.
        """
        if self.repository.on_demand is not None:
            name = name or self.repository.only_text_model_name()
            if await self._knows(name) and self.repository.text_stages(name) is not None:
                await self.use_model(name, keep_alive_s=keep_alive_s)
        return self.repository.text_model(name)

    async def encoder_model(
        self, name: str | None = None, *, keep_alive_s: float | None = None
    ) -> EncoderModel:
        """Return a model of vectors or scores, loaded as `text_model` loads its own.

        Raises:
            ModelNotFound, ModelNotReady: see `ServedEncoders.find`; or it cannot be loaded on demand.
            Overloaded: too many requests wait for it.
        """
        if self.repository.on_demand is not None:
            name = name or self.repository.encoders.only_name()
            if await self._knows(name) and name in self.repository.encoders:
                await self.use_model(name, keep_alive_s=keep_alive_s)
        return self.repository.encoders.find(name)

    async def _knows(self, name: str) -> bool:
        """Whether the repository has a model; its folders are read again for a name that is new."""
        lifecycle = self.repository.lifecycle
        if name not in lifecycle.entries:
            await asyncio.to_thread(lifecycle.scan_folders)
        return name in lifecycle.entries

    async def use_model(self, name: str, *, keep_alive_s: float | None = None) -> None:
        """Load a model if it is loaded on demand; it stays loaded until the current request has ended.

        An unknown name is left to the caller, whose dialect has words for it. The body of a request over HTTP
        has been read, so that its client is watched meanwhile.

        Raises:
            ClientLeft: the client has disconnected; others that wait still get the model.
            ModelNotReady: it cannot be loaded, or its memory is in use; or the server is stopping.
            Overloaded: too many requests wait for it.
        """
        on_demand, request = self.repository.on_demand, CURRENT_REQUEST.get()
        if on_demand is None or request is None or not await self._knows(name):
            return
        self.check_running()  # a server that stops waits for no load
        if name in request.uses:  # a second use might wait for a load that waits for the end of the first
            return
        request.model = request.model or name
        started_s = time.monotonic()
        using = on_demand.use(name, keep_alive_s=keep_alive_s)
        try:
            if using.done():
                use = using.result()
            elif request.receive is None:
                use = await asyncio.wrap_future(using)
            else:
                use = await while_connected(asyncio.wrap_future(using), request.receive)
        except (asyncio.CancelledError, ClientLeft):
            using.add_done_callback(_end_unused)  # it may be loaded at this moment
            raise
        except InferenceError as error:
            raise ModelNotReady(error.message, remedy=error.remedy) from error
        request.uses[name] = use
        request.load_s += time.monotonic() - started_s

    def output_sink(self) -> EventLoopSink:
        """Return the sink of the running event loop for generated text, created by the first call."""
        if self._sink is None:
            self._sink = EventLoopSink(asyncio.get_running_loop())
        return self._sink


async def _services(request: Request) -> Services:  # FastAPI would run a plain function on a thread
    services: Services = request.app.state.services
    return services


SharedServices = Annotated[Services, Depends(_services)]


def repository_options(settings: ServerSettings) -> RepositoryOptions:
    """Return the options of the repository that a server with these settings serves.

    Raises:
        GenserveError: a setting is invalid; names its flag.
    """
    backends = BackendConfig.parse(settings.backend_config, backend_directory=settings.backend_directory)
    overriding, prefix_cache = settings.overriding_generation_config, None
    if (folder := settings.prefix_cache_dir) is not None:
        prefix_cache = PrefixCacheFolder(path=folder, max_bytes=settings.prefix_cache_disk_byte_size)
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
        max_model_len=settings.context_limit,
        prefix_cache_folder=prefix_cache,
        generation_config=settings.generation_config == "auto",
        override_generation_config=overriding,
        exit_timeout_s=settings.drain_s,
        max_queue=settings.max_queue,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_wait_s=settings.max_queue_wait_s,
        histogram_latencies=read_metrics_config(settings.metrics_config)["histogram_latencies"],
        rate_limiter=settings.rate_limit == "execution_count",
        resources=tuple(map(_capacity, settings.rate_limit_resources)),
        memory_budget_bytes=_memory_budget(settings),
        keep_alive_s=read_keep_alive(settings.model_keep_alive),
    )


def _memory_budget(settings: ServerSettings) -> int | None:
    """Return the memory that models which are loaded on demand may take; None: no limit."""
    if settings.model_control_mode != "on-demand":
        for name in ("model_memory_budget", "model_keep_alive"):
            if getattr(settings, name) != ServerSettings.__dataclass_fields__[name].default:
                flag = f"--{name.replace('_', '-')}"
                raise GenserveError(
                    f"{flag} is for models that are loaded on demand",
                    remedy=f"add --model-control-mode on-demand, or leave {flag} out",
                )
        return None
    return read_memory_budget(settings.model_memory_budget) or default_memory_budget()


def _capacity(text: str) -> ResourceCapacity:
    try:
        return ResourceCapacity.parse(text)
    except ValueError as error:
        raise GenserveError(str(error), remedy="write for example --rate-limit-resource R1:4") from error
