"""Serve: run a server from its settings until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from genserve.errors import GenserveError, RepositoryError
from genserve.metrics import Metrics
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.server.app import create_app
from genserve.server.services import Services
from genserve.settings import ServerSettings

__all__ = ["ModelInfo", "Server", "ServerInfo", "serve"]

# After the drain, streams get a moment to write their error event before their tasks are cancelled.
_FAREWELL_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that answers."""

    name: str
    max_length: int             # tokens of prompt and answer together
    num_slots: int
    kv_cache_bytes: int         # if every slot is used to its end
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server that is ready."""

    url: str
    models: tuple[ModelInfo, ...]
    errors: tuple[GenserveError, ...]       # of models that could not be loaded


def serve(settings: ServerSettings, *, on_ready: Callable[[ServerInfo], None] | None = None) -> None:
    """Load the models and answer requests until SIGTERM or SIGINT; then drain, and return.

    Args:
        settings: see `ServerSettings`.
        on_ready: called once, on the server's thread, when the models are loaded.

    Raises:
        RepositoryError: there is no repository, or no model of it could be loaded.
        ModelNotFound: `load_model` names a model that is not there.
        GenserveError: the port is taken.
    """
    logging.basicConfig(
        level=logging.INFO if settings.log_verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    Server(settings, on_ready=on_ready).serve_until_stopped()


class Server(uvicorn.Server):
    """uvicorn, with the models' life inside its own: load after the port is open, close after the drain.

    The port opens first, so that a probe sees `loading` while large weights are read. Setting
    `should_exit` from any thread stops it as SIGTERM does.
    """

    def __init__(
        self, settings: ServerSettings, *, on_ready: Callable[[ServerInfo], None] | None = None
    ) -> None:
        """Read the repository's folders; raises what `serve` raises about them."""
        metrics = Metrics()
        self.services = Services(
            settings=settings,
            repository=Repository(
                settings.model_repository,
                options=RepositoryOptions(max_queue=settings.max_queue),
                metrics=metrics,
            ),
            metrics=metrics,
        )
        super().__init__(
            uvicorn.Config(
                create_app(self.services),
                access_log=False,
                log_config=None,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=round(settings.drain_s + _FAREWELL_S),
            )
        )
        self._on_ready = on_ready
        self._loading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def serve_until_stopped(self) -> None:
        """Bind, load, answer, drain, close; raises what `serve` raises."""
        with _bind(self.services.settings) as listener:
            self.run(sockets=[listener])
        if self._failure is not None:
            raise self._failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal does not wait for the drain.

        uvicorn's own handler would raise the signal once more at the end: but to be told to stop, and to
        have stopped, is a success.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port, and load the models beside."""
        await super().startup(sockets=sockets)
        assert sockets
        self._loading = asyncio.create_task(self._load(_url(sockets[0])))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new work, let what runs end until the drain is over, then close the models."""
        self.services.draining = True
        repository = self.services.repository
        event_loop = asyncio.get_running_loop()
        # Closing the engines ends the streams that still run, each with an error event.
        deadline = event_loop.call_later(
            self.services.settings.drain_s, event_loop.run_in_executor, None, repository.close
        )
        await super().shutdown(sockets=sockets)
        deadline.cancel()
        if self._loading is not None:
            await self._loading
        await event_loop.run_in_executor(None, repository.close)

    async def _load(self, url: str) -> None:
        settings, repository = self.services.settings, self.services.repository
        try:
            await asyncio.to_thread(repository.start, settings.load_model)
            if not repository.generation_models:
                raise next(iter(repository.errors.values()), _nothing_to_load(settings))
        except Exception as error:
            self._failure = error
            self.should_exit = True
            return
        if self._on_ready is not None:
            self._on_ready(_describe(url, repository))


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.http_port), family=family, backlog=2048)
    except OSError as error:
        raise GenserveError(
            f"cannot listen on {settings.host}:{settings.http_port}: {error.strerror}",
            remedy="choose another port with --http-port; 0 takes a free one",
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _describe(url: str, repository: Repository) -> ServerInfo:
    models = tuple(
        ModelInfo(
            name=model.name,
            max_length=model.max_length,
            num_slots=model.num_slots,
            kv_cache_bytes=model.kv_cache_bytes,
            precision=model.precision,
        )
        for model in repository.generation_models
    )
    return ServerInfo(url=url, models=models, errors=tuple(repository.errors.values()))


def _nothing_to_load(settings: ServerSettings) -> RepositoryError:
    roots = ", ".join(str(root) for root in settings.model_repository)
    return RepositoryError(
        f"there is no generation model in {roots}", remedy="bring one: `genserve pull smollm2`"
    )
