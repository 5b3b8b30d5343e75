"""API server: opens the ports, loads the models, and answers requests until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Self

from genserve.errors import GenserveError, RepositoryError
from genserve.generation_metrics import Metrics
from genserve.repository.model_versions import IndexEntry
from genserve.repository.repository import Repository
from genserve.server.access.access_control import AccessControl, address_of, require_safe_addresses
from genserve.server.access.tls import TlsFiles
from genserve.server.http.http_server import HttpServer, open_http_port
from genserve.server.http.offload import start_daemon
from genserve.server.observe.engine_watch import EngineWatch, engines_of
from genserve.server.observe.metrics_port import MetricsPort
from genserve.server.observe.metrics_text import metrics_text
from genserve.server.observe.throughput_log import ThroughputLog
from genserve.server.server_parts import ServerParts
from genserve.server.services import Services, repository_options
from genserve.settings import ServerSettings
from genserve.store import described, repository_flag

if TYPE_CHECKING:
    from genserve.server.kserve.grpc.grpc_server import GrpcServer


logger = logging.getLogger(__name__)

# Streams may write their error event for this long after the drain, before their tasks are cancelled.
_LAST_EVENTS_S = 1
# A collector that does not answer may delay the end by this time.
_LAST_SPANS_S = 3
# Interval of the lines that say what a server that stops still waits for.
_REPORT_S = 5
# Time for the process to exit after the second signal; and once everything has closed, which takes longer if
# the machine is busy.
_EXIT_S = 1
_CLOSED_EXIT_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that generates text."""

    name: str
    context: str  # the tokens of prompt and answer together; see `TextModel.context`
    max_num_seqs: int
    kv_cache_bytes: int  # at most
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server that is ready, for the user who started it."""

    url: str
    grpc_address: str = ""  # host and port; empty: no gRPC
    metrics_url: str = ""  # empty: metrics are only on the HTTP port
    needs_key: bool = False  # whether clients need one
    models: tuple[ModelInfo, ...]  # those that generate text
    versions: tuple[IndexEntry, ...] = ()
    stages: frozenset[str] = frozenset()  # the models among them that are stages of text models
    errors: tuple[GenserveError, ...]  # why models could not be loaded

    def with_models(self, repository: Repository) -> Self:
        """Return this information with the models of a repository."""
        models = tuple(
            ModelInfo(
                name=model.name,
                context=model.context,
                max_num_seqs=model.max_num_seqs,
                kv_cache_bytes=model.kv_cache_bytes,
                precision=model.precision,
            )
            for model in repository.text_models
        )
        versions, errors = tuple(repository.index()), tuple(repository.errors.values())
        stages = repository.stage_names
        return replace(self, models=models, versions=versions, stages=stages, errors=errors)


def serve(
    settings: ServerSettings,
    *,
    on_ready: Callable[[ServerInfo], None] | None = None,
    end_process: Callable[[int], None] | None = None,
) -> None:
    """Load the models and answer requests until SIGTERM, SIGINT or SIGHUP; then drain, and return.

    Args:
        settings: see `ServerSettings`.
        on_ready: called once, on the server's thread, when the models are loaded.
        end_process: called with an exit code, on any thread, where only the end of the process stops a model
            that does not return: with 1 some seconds after the drain, and with 128 + its number after a
            second signal.

    Raises:
        RepositoryError: there is no repository, or no model in it, or (with `exit_on_error`) one of its
            models could not be loaded.
        ModelNotFound: `load_model` names a model that does not exist.
        GenserveError: a port is taken, or open to other machines without a key; or the certificate or the log
            file cannot be used.
    """
    server = Server(settings, on_ready=on_ready, end_process=end_process)
    with server.services.log_settings.written():
        try:
            server.serve_until_stopped()
        except GenserveError as error:
            if settings.log_file:  # otherwise the caller prints the error to the same stream
                logger.error("%s", error)  # noqa: TRY400  # not a bug, so no traceback
            raise
    if server.force_exit and end_process is not None:
        end_process(server.exit_code)


class Server(HttpServer):
    """An HTTP server that loads the models after the port is open, and closes them after the drain.

    The port opens first, so that a probe sees `loading` while large weights are read. Setting
    `should_exit` from any thread stops the server as SIGTERM does.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        on_ready: Callable[[ServerInfo], None] | None = None,
        end_process: Callable[[int], None] | None = None,
    ) -> None:
        """Scan the repository's folders; raises what `serve` raises about them."""
        require_safe_addresses(settings)
        metrics, options = Metrics(), repository_options(settings)
        self._repository = Repository(settings.model_repository, options=options, metrics=metrics)
        self._parts = parts = ServerParts(settings, self._repository, metrics)
        self.services = parts.services
        if settings.model_control_mode == "none" and not self._repository.index():
            raise _nothing_to_load(settings)
        drain_s = round(settings.drain_s + _LAST_EVENTS_S)
        super().__init__(parts.app, settings=settings, tls=parts.tls, drain_s=drain_s)
        self._on_ready = on_ready
        self._end_process = end_process
        self._first_signal: int | None = None
        self.exit_code = 1  # if the process is ended before everything is closed
        self._grpc: GrpcServer | None = None
        self._metrics_port: MetricsPort | None = None
        self._loading: asyncio.Task[None] | None = None
        self._watching: tuple[asyncio.Task[None], ...] = ()  # while the ports are open
        self._closing: asyncio.Future[None] | None = None
        self._failure: Exception | None = None

    def serve_until_stopped(self) -> None:
        """Bind, load, serve, drain and close; raises what `serve` raises."""
        with open_http_port(self.services.settings) as listener:
            self.run(sockets=[listener])
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Treat SIGHUP, of a terminal that closes, as SIGTERM, unless it is ignored, as under nohup."""
        with super().capture_signals():
            # Only the main thread may install signal handlers.
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
                yield
                return
            signal.signal(signal.SIGHUP, self._hang_up)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def _hang_up(self, sig: int, frame: FrameType | None) -> None:
        # The shell and the kernel send one each, so a second one does not cut the drain short.
        if not self.should_exit:
            self.handle_exit(sig, frame)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal does not wait for the drain.

        uvicorn's own handler raises the signal again at the end, but a server that stops on request exits
        with success.
        """
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:
            self.exit_code = 128 + sig
            # On a thread: the signal may have interrupted the writing of another line.
            threading.Thread(target=logger.info, args=("stopping at once",), daemon=True).start()
        else:
            self._first_signal = sig
        # Here, since a blocked event loop never reaches `shutdown`.
        self._expect_end(
            _EXIT_S if self.force_exit else self.services.settings.drain_s + _LAST_EVENTS_S + _CLOSED_EXIT_S
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the ports, and load the models in the background."""
        await super().startup(sockets=sockets)
        assert sockets
        try:
            url = f"{self._scheme}://{address_of(*sockets[0].getsockname()[:2])}"
            needs_key = self.services.keys.is_required
            info = await self._open_ports(ServerInfo(url=url, needs_key=needs_key, models=(), errors=()))
        except Exception as error:
            self._fail(error)
        else:
            _log_listening(info)
            self._parts.start()
            self._loading = asyncio.create_task(self._load(info))
            engines = partial(engines_of, self._repository)
            watches = (ThroughputLog(self.services.metrics), EngineWatch(engines))
            self._watching = tuple(asyncio.create_task(watch.run()) for watch in watches)

    @property
    def _scheme(self) -> str:
        return "https" if self._parts.tls else "http"

    async def _open_ports(self, info: ServerInfo) -> ServerInfo:
        """Open the ports of gRPC and of metrics."""
        settings = self.services.settings
        if settings.allow_metrics:
            host = settings.metrics_host or settings.host
            self._metrics_port = _open_metrics_port(self.services, host=host, tls=self._parts.tls)
            address = address_of(host, self._metrics_port.port)
            info = replace(info, metrics_url=f"{self._scheme}://{address}/metrics")
        if settings.allow_grpc:
            from genserve.server.kserve.grpc.grpc_server import GrpcServer

            host = settings.grpc_host or settings.host
            self._grpc = GrpcServer(self.services, self._parts.kserve, tls=self._parts.tls)
            port = await self._grpc.open(host=host, port=settings.grpc_port)
            info = replace(info, grpc_address=address_of(host, port))
        return info

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reject new requests, let running ones finish during the drain, then close the models."""
        self.services.draining = True
        self._repository.reject_loads()
        drain_s = self.services.settings.drain_s
        logger.info("stopping: %s", self._waiting(drain_s) or "no request is running")
        self._expect_end(drain_s + _LAST_EVENTS_S + _CLOSED_EXIT_S)
        event_loop = asyncio.get_running_loop()
        end = event_loop.time() + drain_s + _LAST_EVENTS_S
        reports = asyncio.create_task(self._report_waiting(end=event_loop.time() + drain_s))
        # Closing the models fails the requests that still run.
        deadline = event_loop.call_later(drain_s, self._close_repository)
        await asyncio.gather(super().shutdown(sockets=sockets), self._close_grpc())
        deadline.cancel()
        if self._loading is not None:
            await _wait("loading the models", self._loading, until=end)
        await _wait("closing the models", self._close_repository(), until=end)
        for watch in self._watching:
            watch.cancel()
        await event_loop.run_in_executor(None, self._parts.kserve.trace_settings.close)
        if spans := self.services.request_spans:
            sending = start_daemon(spans.close, name="spans")
            await _wait("sending the last spans", sending, until=event_loop.time() + _LAST_SPANS_S)
        if self._metrics_port is not None:
            await event_loop.run_in_executor(None, self._metrics_port.close)
        self._parts.stop()
        reports.cancel()
        logger.info("stopped")

    def _waiting(self, seconds: float) -> str:
        """Return what a server that stops waits for, how long, and how to end it at once; empty: nothing."""
        requests = len(self.server_state.tasks) + self.services.num_grpc_calls
        if requests:
            what = f"{requests} running {'request' if requests == 1 else 'requests'}"
        elif self._loading is not None and not self._loading.done():
            what = "the models that are being loaded"
        else:
            return ""
        name = "Ctrl-C" if self._first_signal == signal.SIGINT else "SIGTERM"
        at_once = f"; a second {name} ends the server at once" if self._first_signal else ""
        return f"waiting for {what}, {max(0, seconds):.0f} s at most{at_once}"

    async def _report_waiting(self, *, end: float) -> None:
        event_loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_REPORT_S)
            logger.info("stopping: %s", self._waiting(end - event_loop.time()) or "closing the models")

    def _close_repository(self) -> asyncio.Future[None]:
        """Begin to close the models, once."""
        if self._closing is None:
            self._closing = start_daemon(self._repository.close, name="close")
        return self._closing

    def _expect_end(self, seconds: float) -> None:
        """End the process unless it has exited by then."""
        if self._end_process is not None:
            timer = threading.Timer(seconds, self._end_process, args=(self.exit_code,))
            timer.daemon = True
            timer.start()

    async def _close_grpc(self) -> None:
        if self._grpc is not None:
            drain_s = self.services.settings.drain_s + _LAST_EVENTS_S
            await self._grpc.close(drain_s=0 if self.force_exit else drain_s)

    async def _load(self, info: ServerInfo) -> None:
        settings, repository = self.services.settings, self._repository
        started_s = time.monotonic()
        try:
            await start_daemon(lambda: repository.start(_models_to_load(settings)), name="load")
            error = next(iter(repository.errors.values()), None)
            if error is not None and settings.exit_on_error:
                raise error
        except Exception as error:
            self._fail(error)
            return
        logger.info("ready: the models were loaded in %.1f s", time.monotonic() - started_s)
        if self._on_ready is not None:
            self._on_ready(info.with_models(repository))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self.should_exit = True


async def _wait(doing: str, work: asyncio.Future[None], *, until: float) -> None:
    """Wait for work until a time of the event loop; raises its exception."""
    done, _ = await asyncio.wait({work}, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    if done:
        work.result()
    else:
        logger.error("%s takes too long; stopping without waiting for it", doing)


def _open_metrics_port(services: Services, *, host: str, tls: TlsFiles | None) -> MetricsPort:
    settings = services.settings
    return MetricsPort(
        lambda: metrics_text(services.metrics.registry),
        host=host,
        port=settings.metrics_port,
        access=AccessControl(
            settings,
            host=host,
            keys=services.keys,
            asks_key=not settings.allow_unauthenticated_metrics,
        ),
        timeout_s=settings.head_timeout_s,
        ssl_context=tls.context if tls else None,
    )


def _models_to_load(settings: ServerSettings) -> tuple[str, ...] | None:
    """Return the names of the models to load at the start; None: all."""
    if not settings.load_model and settings.model_control_mode not in ("explicit", "on-demand"):
        return None
    return None if settings.load_model == ("*",) else settings.load_model


def _log_listening(info: ServerInfo) -> None:
    grpc = f", gRPC at {info.grpc_address}" if info.grpc_address else ""
    metrics = f", metrics at {info.metrics_url}" if info.metrics_url else ""
    logger.info("listening at %s%s%s", info.url, grpc, metrics)


def _nothing_to_load(settings: ServerSettings) -> RepositoryError:
    roots = ", ".join(map(described, settings.model_repository))
    return RepositoryError(
        f"there is no model in {roots}",
        remedy="`genserve serve smollm2"
        f"{repository_flag(settings.model_repository[0])}` pulls the default model and serves it",
    )
