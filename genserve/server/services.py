"""Services: what a running server consists of, and whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from genserve.errors import Closed, InvalidRequest, ModelNotReady
from genserve.generation.delta_streams import AsyncDeltaStream, EventLoopSink
from genserve.generation.engine_request import TokenSequence
from genserve.generation.request_inbox import Reservation
from genserve.generation_metrics import Metrics
from genserve.kserve.log_settings import LogSettings
from genserve.kserve.served_models import Models
from genserve.kserve.shared_memory import SharedMemory
from genserve.kserve.trace_settings import TraceSettings, read_trace_config
from genserve.log import CURRENT_REQUEST, LoggedRequest
from genserve.prompt import Prompt
from genserve.redaction import redact_repositories
from genserve.repository.model_versions import ModelState
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.error_responses import renamed
from genserve.server.offload import start_daemon
from genserve.server.running_inference import ResponseDispatcher
from genserve.settings import ServerSettings
from genserve.textmodel.text_model import TextModel

__all__ = ["Open", "Readiness", "Services", "SharedServices"]


T = TypeVar("T")

_WITHIN_S = 5.0


class Readiness:
    """A model may answer for itself, in code that takes its time, or never returns; it gets 5 s.

    Each question is asked once at a time, however many wait for its answer. For one event loop.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._asking: dict[object, asyncio.Future[Any]] = {}

    async def state(self) -> str:
        """Return the worst state of all models; UNAVAILABLE if that cannot be known in time."""
        return await self._ask(None, lambda: self._models.state, otherwise=ModelState.UNAVAILABLE)

    async def of_model(self, name: str, version: int) -> bool:
        """Whether a model answers; -1: its latest version."""
        return await self._ask(
            (name, version), lambda: self._models.is_ready(name, version), otherwise=False
        )

    async def _ask(self, key: object, question: Callable[[], T], *, otherwise: T) -> T:
        asking: asyncio.Future[T] | None = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = start_daemon(question, name="readiness")
            asking.add_done_callback(lambda _: self._asking.pop(key))
        done, _ = await asyncio.wait({asking}, timeout=_WITHIN_S)
        return asking.result() if done else otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A request that the engine has accepted."""

    model: TextModel
    stream: AsyncDeltaStream
    prompts: tuple[tuple[int, ...], ...]    # the token ids of each
    seeds: tuple[int, ...]                  # of the choices
    params: SamplingParams
    begins_thought: bool                    # the first of the prompts leaves one open


@dataclass(slots=True, kw_only=True)
class Services:
    """What a running server is made of."""

    settings: ServerSettings
    repository: Repository
    metrics: Metrics
    draining: bool = False                                  # set once, when the server is told to stop
    shared_memory: SharedMemory = field(init=False)
    trace_settings: TraceSettings = field(init=False)
    log_settings: LogSettings = field(init=False)
    readiness: Readiness = field(init=False)
    _sink: EventLoopSink | None = None
    _response_dispatcher: ResponseDispatcher | None = None

    def __post_init__(self) -> None:
        backends = self.settings.backend_directory
        redact_repositories([*self.settings.model_repository, *([backends] if backends else [])])
        self.shared_memory = SharedMemory(allowed=self.settings.allow_client_shm)
        self.trace_settings = TraceSettings(read_trace_config(self.settings.trace_config))
        self.readiness = Readiness(self.repository)
        self.log_settings = LogSettings(self.settings)

    async def is_ready(self) -> bool:
        """Whether requests are taken, and every model that was to be loaded answers.

        Without `strict_readiness` it is enough that the server has tried to load them.
        """
        if self.draining:
            return False
        state = await self.readiness.state()
        return state == ModelState.READY if self.settings.strict_readiness else state != ModelState.LOADING

    def response_dispatcher(self) -> ResponseDispatcher:
        """Return where responses to the requests of the event loop go; it runs this call."""
        if self._response_dispatcher is None:
            self._response_dispatcher = ResponseDispatcher(asyncio.get_running_loop())
        return self._response_dispatcher

    async def open(
        self, model: str | None, prompts: Sequence[Prompt], params: SamplingParams, *, n: int = 1
    ) -> Open:
        """Check a request and hand it to the engine: all that can be wrong with it is raised here.

        Its choices are `n` to each prompt, or `params.best_of` if that is more, in the order of the prompts;
        of more the log-probabilities are told too.

        Raises:
            InvalidRequest: it has more choices than may run and wait; otherwise, see
                `TextModel.prepare_choices`. Of several prompts, `field` says which.
            GenserveError: see `Repository.get`, `EngineThread.reserve`, `EngineThread.submit`.
        """
        if self.draining:
            raise ModelNotReady("the server is stopping", remedy="try again on another server")
        request = CURRENT_REQUEST.get() or LoggedRequest(id="")
        request.model = model or ""
        ensemble = self.repository.get(model)
        request.model = ensemble.name
        if params.best_of > n:
            n, params = params.best_of, replace(params, logprobs=True)
        name = "best_of" if params.best_of > 1 else "n"
        _check_count(len(prompts), n=n, name=name, limit=ensemble.engine.capacity)
        try:
            # Before its text costs anything.
            with ensemble.engine.reserve(len(prompts) * n, priority=params.priority) as reservation:
                prepare = partial(_prepare, ensemble, prompts, params, n=n, reservation=reservation)
                future = ensemble.run_soon(prepare, compiles=params.structured_outputs is not None)
                sequences = await asyncio.wrap_future(future)
                # Before the engine's thread has them.
                prompt_ids = tuple(tuple(sequence.token_ids) for sequence in sequences[::n])
                if self._sink is None:
                    self._sink = EventLoopSink(asyncio.get_running_loop())
                stream = self._sink.open(ensemble.engine, *sequences, reservation=reservation)
        except Closed:
            if self.repository.get(model) is ensemble:
                raise
            return await self.open(model, prompts, params, n=n)  # another has taken its place meanwhile
        request.answers, request.prompt_tokens = sequences, sum(map(len, prompt_ids))
        return Open(
            model=ensemble,
            stream=stream,
            prompts=prompt_ids,
            seeds=tuple(s.seed for s in sequences),
            params=params,
            begins_thought=sequences[0].begins_thought,
        )


def _check_count(num_prompts: int, *, n: int, name: str, limit: int) -> None:
    if num_prompts * n > limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with {name} = {n} are more than the {limit} requests that may run and "
            "wait",
            field=name if n > 1 else "prompt",
            remedy="send several requests, or raise --max-queue",
        )


def _prepare(
    ensemble: TextModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    reservation: Reservation,
) -> list[TokenSequence]:
    reservation.check()
    sequences: list[TokenSequence] = []
    for index, prompt in enumerate(prompts):
        try:
            sequences += ensemble.prepare_choices(
                prompt, params, num_choices=n, arrived_s=reservation.arrived_s
            )
        except InvalidRequest as error:
            raise renamed(error, {"prompt": f"prompt[{index}]"} if len(prompts) > 1 else {}) from None
    return sequences


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


SharedServices = Annotated[Services, Depends(_services)]
