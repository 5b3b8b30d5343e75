"""Replica: one model of a repository, with the models that it needs, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from genserve.completion import Delta
from genserve.deploy.replica.description import (
    ReplicaReport,
    ReplicaStatus,
    VersionDescription,
    VersionReport,
    describe,
    digest,
)
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import GenerationCall, InferenceItem
from genserve.errors import Closed
from genserve.generation.delta_streams import AsyncDeltaStream, EventLoopSink
from genserve.generation.engine_request import TokenSequence
from genserve.generation.request_inbox import Reservation
from genserve.generation_metrics import Metrics
from genserve.inference import InferenceRequest
from genserve.log import CURRENT_REQUEST, LoggedRequest
from genserve.repository.model_versions import ModelState
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.server.running_inference import ResponseDispatcher, RunningInference
from genserve.textmodel.text_model import TextModel, needs_grammar


class ModelReplica:
    """Answers the calls of an ingress by a repository of its own. For one event loop, each call in a task.

    Attributes:
        id: that no other replica has.
        name: of the model.
        repository: has loaded the model, its steps and stages, and `needed`.
        metrics: of the repository.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        name: str,
        *,
        needed: Iterable[str] = (),
        options: RepositoryOptions | None = None,
    ) -> None:
        """Load the model; blocks.

        Args:
            roots: folders of the repository.
            name: of the model.
            needed: other models that its code calls by BLS.
            options: of the repository.

        Raises:
            ModelNotFound: the repository has no such model.
            GenserveError: it cannot be loaded.
        """
        self.name = name
        self.metrics = Metrics()
        self.repository = Repository(roots, options=options, metrics=self.metrics)
        self.id = uuid4().hex
        self._closing = False
        self._sink: EventLoopSink | None = None
        self._dispatcher: ResponseDispatcher | None = None
        try:
            self.repository.start([name, *self._stages(), *needed])
            for error in self.repository.errors.values():
                raise error
            self._versions = describe(self.repository)
            self._digest = digest(self._versions)
        except BaseException:
            self.repository.close()
            raise

    def _stages(self) -> list[str]:
        """The names of the stages of a text model, of which the tokenizer is a model of its own too."""
        stages = self.repository.text_stages(self.name) or {}
        return [stage.name for stage in stages.values()]

    @property
    def ready(self) -> bool:
        """Whether it accepts calls and goes on with them."""
        return not self._closing and self.repository.state is ModelState.READY

    async def generate(self, call: GenerationCall) -> AsyncIterator[Sequence[Delta]]:
        """Yield the deltas of a call; see `ReplicaSet.generate`. Closing it cancels the call."""
        self._check_open()
        async with await self._submit(call) as stream:
            async for deltas in stream:
                yield deltas

    async def _submit(self, call: GenerationCall) -> AsyncDeltaStream:
        CURRENT_REQUEST.set(LoggedRequest(id=call.request_id))
        model = self.repository.text_model(call.model)
        if self._sink is None:
            self._sink = EventLoopSink(asyncio.get_running_loop())
        is_resumed = any(call.resumed_token_ids)
        with model.engine.reserve(
            len(call.seeds), priority=call.params.priority, is_resumed=is_resumed
        ) as reservation:
            prepared = model.run_soon(
                partial(_prepare, model, call, reservation),
                compiles=needs_grammar(call.prompt, call.params),
            )
            sequences = await asyncio.wrap_future(prepared)
            return self._sink.open(model.engine, *sequences, reservation=reservation)

    async def infer(self, request: InferenceRequest) -> AsyncIterator[InferenceItem]:
        """Yield the responses to a request, on the CPU; see `ReplicaSet.infer`."""
        self._check_open()
        CURRENT_REQUEST.set(LoggedRequest(id=request.id))
        if self._dispatcher is None:
            self._dispatcher = ResponseDispatcher(asyncio.get_running_loop())
        with RunningInference(request, server=self.repository, dispatcher=self._dispatcher) as running:
            final = False
            while not final:
                response, final = await running.responses.next()
                if response is not None:
                    outputs = tuple(tensor.on_cpu() for tensor in response.outputs)
                    response = replace(response, outputs=outputs)
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
            )
        waiting = sum(served.num_waiting for served in self.repository.served)
        pending = sum(served.num_pending for served in self.repository.served)
        return ReplicaLoad(running=max(0, pending - waiting), waiting=waiting)

    async def status(self) -> ReplicaStatus:
        """Return what it serves and has to do now."""
        return ReplicaStatus(digest=self._digest, load=self.load())

    async def describe(self) -> list[VersionDescription]:
        """Return what it serves."""
        return self._versions

    async def report(self) -> ReplicaReport:
        """Return what it has done so far."""
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

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("the replica is stopping", remedy="try again: another replica answers")


def _prepare(model: TextModel, call: GenerationCall, reservation: Reservation) -> list[TokenSequence]:
    reservation.check()
    params = call.params
    if call.deadline_ms is not None:
        params = replace(params, max_time_ms=max(1, call.deadline_ms))
    return model.inputs.sequences(
        call.prompt,
        params,
        token_ids=call.prompt_token_ids,
        begins_reasoning=call.begins_reasoning,
        seeds=call.seeds,
        arrived_s=reservation.arrived_s,
        resumed_token_ids=call.resumed_token_ids,
    )
