"""Services: what the routes of one server share; built once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from genserve.backends.generation_ensemble import GenerationEnsemble
from genserve.errors import Overloaded
from genserve.generation.streams import AsyncStream, EventLoopOutbox
from genserve.kserve.log_settings import LogSettings
from genserve.kserve.outbox import ResponseOutbox
from genserve.kserve.shared_memory import SharedMemory
from genserve.kserve.trace_settings import TraceSettings
from genserve.metrics import Metrics
from genserve.repository.repository import Repository
from genserve.repository.versions import ModelState
from genserve.request import Message, SamplingParams
from genserve.server.readiness import Readiness
from genserve.settings import ServerSettings

__all__ = ["Open", "Services", "SharedServices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A request that the engine has accepted."""

    model: GenerationEnsemble
    stream: AsyncStream
    num_prompt_tokens: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Services:
    """What a running server is made of."""

    settings: ServerSettings
    repository: Repository
    metrics: Metrics
    draining: bool = False                                  # set once, when the server is told to stop
    shared_memory: SharedMemory = field(init=False)
    trace_settings: TraceSettings = field(default_factory=TraceSettings)
    log_settings: LogSettings = field(init=False)
    readiness: Readiness = field(init=False)
    _outbox: EventLoopOutbox | None = None
    _kserve_outbox: ResponseOutbox | None = None

    def __post_init__(self) -> None:
        self.shared_memory = SharedMemory(allowed=self.settings.allow_client_shm)
        self.readiness = Readiness(self.repository)
        self.log_settings = LogSettings(verbose_level=self.settings.log_verbose)

    async def is_ready(self) -> bool:
        """Whether requests are taken, and every model that was to be loaded answers.

        Without `strict_readiness` it is enough that the server has tried to load them.
        """
        if self.draining:
            return False
        state = await self.readiness.state()
        return state == ModelState.READY if self.settings.strict_readiness else state != ModelState.LOADING

    def kserve_outbox(self) -> ResponseOutbox:
        """Return where responses to the requests of the event loop go; it runs this call."""
        if self._kserve_outbox is None:
            self._kserve_outbox = ResponseOutbox(asyncio.get_running_loop())
        return self._kserve_outbox

    async def open(
        self, model: str | None, prompt: str | tuple[Message, ...], params: SamplingParams
    ) -> Open:
        """Check a request and hand it to the engine: all that can be wrong with it is raised here.

        Raises:
            GenserveError: see `Repository.get`, `GenerationEnsemble.prepare`, `EngineLoop.submit`.
        """
        if self.draining:
            raise Overloaded("the server is stopping", retry_after_s=5, remedy="try again on another server")
        ensemble = self.repository.get(model)
        sequence = await run_in_threadpool(ensemble.prepare, prompt, params)
        if self._outbox is None:
            self._outbox = EventLoopOutbox(asyncio.get_running_loop())
        return Open(
            model=ensemble,
            stream=self._outbox.open(ensemble.loop, sequence),
            num_prompt_tokens=sequence.num_prompt_tokens,
            seed=sequence.seed,
        )


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


SharedServices = Annotated[Services, Depends(_services)]
