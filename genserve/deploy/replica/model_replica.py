"""Replica: one model of a repository, with the models that it needs, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from genserve.completion import Delta
from genserve.deploy.replica.description import (
    ReplicaReport,
    ReplicaStatus,
    VersionDescription,
    VersionReport,
    describe,
    engine_sizes,
    identity_of,
)
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import Call, InferenceItem, plain_error
from genserve.engine.delta_streams import AsyncDeltaStream, EventLoopSink, opened
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.input_queue import Reservation
from genserve.engine.text_engine import TextEngine
from genserve.errors import Closed, VersionReplaced
from genserve.generation_metrics import Metrics
from genserve.inference import InferenceRequest
from genserve.repository.model_versions import ModelState
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.request_context import CURRENT_REQUEST, RequestContext
from genserve.server.kserve.running_inference import ResponseDispatcher, RunningInference
from genserve.server.observe.engine_watch import engines_of
from genserve.server.observe.triton_metrics import InferenceCollector
from genserve.tensor import Tensor
from genserve.textmodel.text_model import needs_grammar


class ModelReplica:
    """Answers the calls of an ingress by a repository of its own. For one event loop, each call in a task.

    Attributes:
        id: an id that no other replica has.
        name: the name of the model.
        identity: a value that stands for what the replica serves; see `identity_of`.
        repository: the repository that has loaded the model, its steps and stages, and `needed`.
        metrics: the metrics of the repository.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        name: str,
        *,
        needed: Iterable[str] = (),
        options: RepositoryOptions | None = None,
        latency_counters: bool = True,
    ) -> None:
        """Load the model; blocks.

        Args:
            roots: folders of the repository.
            name: the name of the model.
            needed: other models that its code calls by BLS.
            options: the settings of the repository; None: the defaults.
            latency_counters: see `InferenceCollector`.

        Raises:
            ModelNotFound: the repository has no such model.
            GenserveError: the model cannot be loaded.
        """
        self.name = name
        self.metrics = Metrics()
        self.repository = Repository(roots, options=options, metrics=self.metrics)
        self.metrics.registry.register(
            InferenceCollector(self.repository, latency_counters=latency_counters)
        )
        self.id = uuid4().hex
        self._closing = False
        self._sink: EventLoopSink | None = None
        self._dispatcher: ResponseDispatcher | None = None
        try:
            self.repository.start([name, *self._stages(), *needed])
            for error in self.repository.errors.values():
                raise error
            self._versions = describe(self.repository)
            self.identity = identity_of(self._versions)
            self._sizes = engine_sizes(self.repository)
        except BaseException:
            self.repository.close()
            raise

    def _stages(self) -> list[str]:
        """The names of the stages of a text model, of which the tokenizer is a model of its own too."""
        stages = self.repository.text_stages(self.name) or {}
        return [stage.name for stage in stages.values()]

    @property
    def ready(self) -> bool:
        """Whether the replica accepts calls and goes on with them."""
        return not self._closing and self.repository.state is ModelState.READY

    async def generate(self, call: Call[GenerationRequest]) -> AsyncIterator[Sequence[Delta]]:
        """Yield the deltas of a call; see `ReplicaSet.generate`. Closing it cancels the call."""
        self._check_takes(call)
        async with await self._open(call.request) as stream:
            async for deltas in stream:
                yield deltas

    async def _open(self, request: GenerationRequest) -> AsyncDeltaStream:
        CURRENT_REQUEST.set(RequestContext(id=request.id))
        model = self.repository.text_model(request.model)
        if self._sink is None:
            self._sink = EventLoopSink(asyncio.get_running_loop())
        with model.engine.reserve(
            request.num_choices,
            priority=request.params.priority,
            share=request.share,
            is_resumed=request.is_resumed,
        ) as reservation:
            opening = partial(_open, self._sink, model.engine, request, reservation)
            compiles = needs_grammar(request.prompt, request.params)
            return await opened(model.run_soon(opening, compiles=compiles))

    async def infer(self, call: Call[InferenceRequest]) -> AsyncIterator[InferenceItem]:
        """Yield the responses to a request, on the CPU; see `ReplicaSet.infer`."""
        self._check_takes(call)
        request = call.request
        CURRENT_REQUEST.set(RequestContext(id=request.id))
        if self._dispatcher is None:
            self._dispatcher = ResponseDispatcher(asyncio.get_running_loop())
        with RunningInference(request, server=self.repository, dispatcher=self._dispatcher) as running:
            final = False
            while not final:
                response, final = await running.responses.next()
                if response is not None:
                    outputs = tuple(
                        Tensor(tensor.name, tensor.array, data_type=tensor.data_type)   # never torch's
                        for tensor in response.outputs
                    )
                    error = None if response.error is None else plain_error(response.error)
                    response = replace(response, outputs=outputs, error=error)
                yield response, final

    def load(self) -> ReplicaLoad:
        """Return what the replica has to do now."""
        model = next((one for one in self.repository.text_models if one.name == self.name), None)
        if model is not None:
            engine, logits = model.engine, model.logits
            return ReplicaLoad(
                running=engine.num_running,
                waiting=model.num_waiting,
                waiting_tokens=engine.num_waiting_tokens,
                kv_usage=engine.cache_usage,
                block_size=logits.block_size if logits.kv_cache_bytes else 0,
                num_blocks=logits.num_blocks if logits.kv_cache_bytes else 0,
                num_free=engine.num_free,
                seconds_per_slot=engine.seconds_per_slot or 0.0,
            )
        waiting = sum(served.num_waiting for served in self.repository.served)
        pending = sum(served.num_pending for served in self.repository.served)
        return ReplicaLoad(running=max(0, pending - waiting), waiting=waiting)

    async def status(self) -> ReplicaStatus:
        """Return what the replica serves and has to do now; asks no code of a model."""
        engines = [engine for _, engine in engines_of(self.repository)]
        return ReplicaStatus(
            identity=self.identity,
            load=self.load(),
            sizes=self._sizes,
            num_turns=sum(engine.num_turns for engine in engines),
            is_ready=not self._closing and all(engine.ready for engine in engines),
        )

    async def describe(self) -> list[VersionDescription]:
        """Return what the replica serves."""
        return self._versions

    async def report(self) -> ReplicaReport:
        """Return what the replica has done so far."""
        return ReplicaReport(
            replica=self.id,
            versions={
                (served.name, served.version): VersionReport(
                    statistics=served.statistics, num_waiting=served.num_waiting
                )
                for served in self.repository.served
            },
            metrics=list(self.metrics.registry.collect()),
        )

    def close(self) -> None:
        """Unload the models, and end what still runs; blocks."""
        self._closing = True
        self.repository.close()

    def _check_takes(self, call: Call[Any]) -> None:
        if self._closing:
            raise Closed("the replica is stopping", remedy="try again: another replica answers")
        if call.identity != self.identity:
            raise VersionReplaced(
                f"the replica serves another version of '{self.name}' than the request was prepared for",
                remedy="send the request again",
                retry_after_s=1.0,
            )


def _open(
    sink: EventLoopSink, engine: TextEngine, request: GenerationRequest, reservation: Reservation
) -> AsyncDeltaStream:
    """Submit a request, on a thread of the model; the time that is left to it begins with its reservation."""
    reservation.check()
    request = replace(request, arrived_s=reservation.arrived_s)
    return sink.open(engine, request, reservation=reservation, are_all=False)
