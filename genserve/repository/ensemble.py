"""Ensemble: a graph of models; each step runs as soon as its inputs are known."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_not

from genserve.config.model_config import EnsembleStep, ModelConfig
from genserve.errors import Closed, GenserveError, InferenceError, InvalidRequest, Status
from genserve.inference import (
    Backlog,
    Inference,
    InferenceRequest,
    InferenceResponse,
    InferenceServer,
    Parameter,
    RequestFlags,
)
from genserve.inference_statistics import ModelStatistics
from genserve.tensor import Tensor

logger = logging.getLogger(__name__)


class Ensemble:
    """The graph of one ensemble; a `ModelRuntime`. Its steps are submitted like any other request.

    Each response of a decoupled step runs the steps after it once more.

    `max_inflight_requests` limits the requests that each step has at its model, over all requests to the
    ensemble, as Triton documents it. Further requests wait in a queue, and so does the model whose response
    made them: a request leaves its step only when the requests made of its responses have been submitted, and
    the response sender of a Python model blocks. Responses of models that cannot block are queued.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        server: InferenceServer,
        config_of: Callable[[EnsembleStep], ModelConfig],
        statistics: ModelStatistics,
    ) -> None:
        """Prepare the graph.

        Args:
            config: the ensemble's config, with at least one step.
            server: the server that runs the models of the steps.
            config_of: returns the current config of a step's model; raises InferenceError.
            statistics: the statistics that count the executions.
        """
        self._config = config
        self._server = server
        self._config_of = config_of
        self._statistics = statistics
        limit = config.max_inflight_requests
        self._queues = [_InflightQueue(limit) for _ in config.ensemble_steps] if limit else None
        self._known: tuple[Sequence[ModelConfig], Sequence[_Step]] = ((), ())  # models, and their steps

    @property
    def ready(self) -> bool:
        """Whether the models of all steps are ready."""
        return all(
            self._server.is_ready(step.model_name, step.model_version) for step in self._config.ensemble_steps
        )

    @property
    def num_waiting(self) -> int:
        """Always 0: each step waits at its own model."""
        return 0

    def submit(self, inference: Inference) -> None:
        """Start the steps whose inputs are known."""
        try:
            models = [self._config_of(spec) for spec in self._config.ensemble_steps]
        except InferenceError as error:
            # Triton unloads an ensemble while a model of its steps is not loaded.
            raise InferenceError(
                f"Request for unknown model: '{self._config.name}' has no available versions",
                status=Status.NOT_FOUND,
                remedy=error.message,
            ) from error
        inference.started_ns = time.monotonic_ns()
        if inference.span is not None:
            inference.span.computes = False
        inference.when_ended(self._executed)
        requested = inference.request.requested_outputs
        steps = _needed(self._steps(models), requested, config=self._config)
        run = _Run(inference, config=self._config, steps=steps, server=self._server)
        inference.when_cancelled(run.cancel)
        if self._queues is not None:
            inference.when_ended(lambda _: run.cancel())  # queued requests, if it has failed
        run.start()

    def close(self) -> None:
        """Do nothing: an ensemble holds no resources."""

    def _steps(self, models: Sequence[ModelConfig]) -> Sequence[_Step]:
        """Return the steps, which are made again when one of their models has been loaded again."""
        known, steps = self._known
        if len(known) != len(models) or any(map(is_not, known, models)):
            queues: Sequence[_InflightQueue | None] = self._queues or [None] * len(models)
            steps = [*map(_Step, self._config.ensemble_steps, models, queues)]
            self._known = models, steps
        return steps

    def _executed(self, inference: Inference) -> None:
        if inference.error is None:
            self._statistics.executed_alone(inference)


class _Step:
    """One step, with the config of its model, and its queue if it has a limit."""

    def __init__(self, spec: EnsembleStep, model: ModelConfig, queue: _InflightQueue | None) -> None:
        self.spec = spec
        self.queue = queue
        self.decoupled = model.decoupled
        self.sources = tuple(spec.input_map.values())
        self.makes = tuple(spec.output_map.values())
        optional = {tensor.name for tensor in model.inputs if tensor.optional}
        self.required = tuple(tensor for name, tensor in spec.input_map.items() if name not in optional)
        self._ranks = _ranks({spec.name: spec.dims for spec in model.inputs}, model)

    def inputs(self, flow: _Flow) -> dict[str, Tensor]:
        """Return the inputs of the step, by the model's names."""
        return {
            name: _fitted(tensor.renamed(name), self._ranks)
            for name, source in self.spec.input_map.items()
            if (tensor := flow.get(source)) is not None
        }

    def outputs(self, response: InferenceResponse | None) -> dict[str, Tensor | None]:
        """Return the tensors of a response by the ensemble's names; None for missing ones."""
        made: dict[str, Tensor | None] = {}
        for output, name in self.spec.output_map.items():
            tensor = response.output(output) if response is not None else None
            made[name] = tensor.renamed(name) if tensor is not None else None
        return made


class _InflightQueue:
    """The queue of a step: `limit` of its requests run at a time, further requests wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._running: dict[Inference, None] = {}
        self._waiting: dict[Inference, tuple[Callable[[], bool], Backlog | None]] = {}
        self._admitting = False

    def enter(self, part: Inference, *, submit: Callable[[], bool], of: Inference | None) -> None:
        """Submit a request to the model of the step when one of the limit is free.

        Args:
            part: the request.
            submit: submits the request; returns whether the model has accepted it.
            of: the inference whose response the request was made of, and whose model waits too. None: the
                ensemble's.
        """
        part.backlog = Backlog()
        part.when_ended(self._ended)
        backlog = of.backlog if of is not None else None
        with self._lock:
            part.blocked_by = self._blockers
            self._waiting[part] = submit, backlog
            if backlog is not None:
                backlog.add(part)
        part.when_cancelled(lambda: self._drop(part))
        self._admit()

    def _ended(self, part: Inference) -> None:
        """Free the place of a request once all requests made of its responses are submitted."""
        assert part.backlog is not None
        part.backlog.when_clear(lambda: self._leave(part))

    def _leave(self, part: Inference) -> None:
        with self._lock:
            self._running.pop(part, None)
        self._admit()

    def _drop(self, part: Inference) -> None:
        """End a request that is cancelled in the queue."""
        with self._lock:
            if part not in self._waiting:
                return  # it runs: its model is cancelled
            _, backlog = self._waiting.pop(part)
        if backlog is not None:
            backlog.remove(part)
        part.fail_cancelled()

    def _admit(self) -> None:
        """Submit the next requests up to the limit. One thread at a time: a request may end in `submit`."""
        while True:
            with self._lock:
                if self._admitting or not self._waiting or len(self._running) >= self._limit:
                    return
                part = next(iter(self._waiting))
                submit, backlog = self._waiting.pop(part)
                part.blocked_by = tuple
                self._running[part] = None
                self._admitting = True
            is_submitted = False
            try:
                if backlog is not None:
                    backlog.remove(part)
                is_submitted = submit()
            finally:
                with self._lock:
                    self._admitting = False
                    if not is_submitted:
                        self._running.pop(part, None)

    def _blockers(self) -> Sequence[Inference]:
        """Return the inferences of which one must end, or be submitted, before the next is admitted."""
        with self._lock:
            running = tuple(self._running)
        return [_occupant(part) for part in running]


def _occupant(part: Inference) -> Inference:
    """Return the holder of a place: a request or, after its end, the first waiting one made of it."""
    waiting = part.backlog.waiting if part.ended and part.backlog else ()  # read once: it may become empty
    return waiting[0] if waiting else part


@dataclass(slots=True, kw_only=True, eq=False)
class _Flow:
    """The tensors and steps that follow one source: the request, or one response of a decoupled step.

    Attributes:
        tensors: the known tensors, by the ensemble's names; None: the tensor will never be made.
        waiting: the steps that are still to run in this flow.
        parent: the flow whose tensors are visible here too.
        num_running: running steps of the flow, without decoupled ones.
        num_streaming: running decoupled steps of the flow.
        branched: whether a decoupled step has started, so that the steps after it run in child flows.
        children: unfinished child flows, in order.
    """

    tensors: dict[str, Tensor | None]
    waiting: list[_Step]
    parent: _Flow | None = None
    num_running: int = 0
    num_streaming: int = 0
    branched: bool = False
    children: dict[_Flow, None] = field(default_factory=dict)

    def with_all_below(self) -> Iterator[_Flow]:
        yield self
        for child in self.children:
            yield from child.with_all_below()

    def get(self, name: str) -> Tensor | None:
        if name in self.tensors:
            return self.tensors[name]
        return self.parent.get(name) if self.parent else None

    def knows(self, name: str) -> bool:
        return name in self.tensors or (self.parent is not None and self.parent.knows(name))

    @property
    def settled(self) -> bool:
        """Whether all tensors that are visible here are known."""
        return not self.waiting and not self.num_running and (self.parent is None or self.parent.settled)

    @property
    def finished(self) -> bool:
        """Whether it and its child flows have finished."""
        return self.settled and not self.num_streaming and not self.children


class _Run:
    """One request to the ensemble."""

    def __init__(
        self, inference: Inference, *, config: ModelConfig, steps: Sequence[_Step], server: InferenceServer
    ) -> None:
        self._inference = inference
        self._config = config
        self._server = server
        self._lock = threading.Lock()
        self._failed = False
        self._ranks = _ranks({spec.name: spec.model_dims for spec in config.outputs}, config)
        below = {step: _downstream(step, steps) for step in steps if step.decoupled}
        self._below = {step: _in_one_flow(after, below) for step, after in below.items()}
        self._root = _Flow(
            tensors={spec.name: inference.inputs.get(spec.name) for spec in config.inputs},
            waiting=_in_one_flow(steps, below),
        )

    def start(self) -> None:
        """Start the steps that depend on no other step."""
        with self._lock:
            starting = self._advance(self._root)
        for flow, step in starting:
            self._start(flow, step, of=None)

    def cancel(self) -> None:
        """Cancel the running steps."""
        for part in tuple(self._inference.parts):
            part.cancel()

    def _advance(self, changed: _Flow) -> list[tuple[_Flow, _Step]]:
        """Send complete responses; return the steps whose inputs a changed flow makes known.

        Called under the lock under which the flow was changed: otherwise a flow below it could be answered
        twice, by its own change and by the end of its parent.
        """
        flows = tuple(changed.with_all_below())
        starting = [(flow, step) for flow in flows for step in self._startable(flow)]
        self._answer(flows)
        return starting

    def _delay_with_ensemble(self, backlog: Backlog) -> None:
        """Make a step wait while this ensemble, itself a step of another, must wait."""
        ours = self._inference.backlog
        if ours is not None and (waiting := ours.waiting):
            backlog.add(waiting[-1])
            ours.when_clear(lambda: backlog.remove(waiting[-1]))

    def _startable(self, flow: _Flow) -> Iterator[_Step]:
        """Remove the steps with known inputs from `waiting`; a step without a required input never runs."""
        for step in list(flow.waiting):
            if not all(flow.knows(name) for name in step.sources):
                continue
            flow.waiting.remove(step)
            if any(flow.get(name) is None for name in step.required):
                flow.tensors.update(step.outputs(None))
                yield from self._startable(flow)
                return
            if step.decoupled:
                flow.num_streaming += 1
                flow.branched = True
            else:
                flow.num_running += 1
            yield step

    def _start(self, flow: _Flow, step: _Step, *, of: Inference | None) -> None:
        asked = self._inference.request
        request = InferenceRequest(
            model_name=step.spec.model_name,
            model_version=step.spec.model_version,
            id=asked.id,
            inputs=step.inputs(flow),
            requested_outputs=tuple(step.spec.output_map),
            parameters=asked.parameters,
            correlation_id=asked.correlation_id,
            flags=asked.flags,
            priority=asked.priority,
            timeout_us=asked.timeout_us,
            cause=self._inference.span,
        )

        def on_response(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001 - OnResponse
            self._on_response(flow, step, response, final=final, part=part)

        part = Inference(request=request, on_response=on_response, share=self._inference.share)
        self._inference.parts.append(part)
        part.when_ended(self._inference.parts.remove)
        if self._inference.cancelled:
            part.cancel()
        if step.queue is None:
            part.backlog = Backlog() if self._inference.backlog is not None else None
            self._submit(part)
        else:
            step.queue.enter(part, submit=lambda: self._submit(part), of=of)

    def _submit(self, part: Inference) -> bool:
        """Submit a request to the model of its step; return whether the model has taken it."""
        if self._inference.ended:
            return False  # it has failed while this one was queued
        try:
            self._server.submit(part)
        except Exception as error:  # this may be the thread of another request, which must go on
            if not isinstance(error, GenserveError):
                logger.exception("model %s could not take a request", part.request.model_name)
            self._fail(InferenceError.of(error))
            return False
        return True

    def _on_response(
        self, flow: _Flow, step: _Step, response: InferenceResponse | None, *, final: bool, part: Inference
    ) -> None:
        if response is not None and response.error is not None:
            self._fail(response.error)
            return
        with self._lock:
            if self._inference.ended:
                return  # it has failed
            changed = flow
            if step.decoupled:
                if response is not None:
                    waiting = list(self._below[step])
                    child = _Flow(tensors=step.outputs(response), waiting=waiting, parent=flow)
                    flow.children[child] = None
                    changed = flow if final else child
                flow.num_streaming -= final
            else:
                if response is not None or not flow.knows(step.makes[0]):
                    flow.tensors.update(step.outputs(response))
                flow.num_running -= final
            starting = self._advance(changed)
        if part.backlog is not None:
            self._delay_with_ensemble(part.backlog)
        for flow_of_step, next_step in starting:
            self._start(flow_of_step, next_step, of=part)

    def _answer(self, flows: Sequence[_Flow]) -> None:
        """Send the complete responses, in the order of the flows; under the lock: the final one is last."""
        responses = [self._response(flow) for flow in flows if flow.settled and not flow.branched]
        for flow in reversed(flows):  # children before parents
            _forget(flow)
        for number, response in enumerate(responses, start=1):
            self._send(response, final=self._root.finished and number == len(responses))
        if self._root.finished and not responses:
            self._send(None, final=True)

    def _response(self, flow: _Flow) -> InferenceResponse:
        wanted = self._inference.request.requested_outputs or [spec.name for spec in self._config.outputs]
        outputs = [_fitted(tensor, self._ranks) for name in wanted if (tensor := flow.get(name)) is not None]
        if not outputs and flow.parent is None:
            text = (
                f"in ensemble '{self._config.name}', unexpected deadlock, at least one output is not set "
                "while no more ensemble steps can be made"
            )
            return InferenceResponse(error=InferenceError(text))
        return InferenceResponse(outputs=tuple(outputs), parameters=_sequence(self._inference.request))

    def _send(self, response: InferenceResponse | None, *, final: bool) -> None:
        try:
            self._inference.send(response, final=final)
        except Closed:
            return  # it has failed before a step answered

    def _fail(self, error: GenserveError) -> None:
        if self._failed:
            return  # cancelling the queued requests comes back here
        self._failed = True
        self._inference.fail(_within(self._config, error))
        self.cancel()


def _needed(steps: Sequence[_Step], wanted: Sequence[str], *, config: ModelConfig) -> Sequence[_Step]:
    """Return the steps that the wanted outputs depend on; all steps if no output or every output is named."""
    tensors = set(wanted)
    if not tensors or tensors >= {spec.name for spec in config.outputs}:
        return steps
    needed: set[_Step] = set()
    while more := [step for step in steps if step not in needed and tensors.intersection(step.makes)]:
        needed.update(more)
        tensors.update(name for step in more for name in step.sources)
    return [step for step in steps if step in needed]


def _ranks(dims: Mapping[str, Sequence[int]], model: ModelConfig) -> dict[str, int]:
    """Return the number of dimensions of each tensor of a model, with the batch dimension."""
    return {name: bool(model.max_batch_size) + len(sizes) for name, sizes in dims.items()}


def _fitted(tensor: Tensor, ranks: Mapping[str, int]) -> Tensor:
    """Add or remove a batch dimension of 1 where only one of ensemble and model batches."""
    rank = ranks.get(tensor.name, len(tensor.shape))
    if len(tensor.shape) == rank + 1 and tensor.shape[0] == 1:
        return tensor.reshaped(tensor.shape[1:])
    if len(tensor.shape) == rank - 1:
        return tensor.reshaped((1, *tensor.shape))
    return tensor


def _forget(flow: _Flow) -> None:
    """Forget a finished flow, and the parents that are finished with it."""
    while flow.parent is not None and flow.finished:
        flow.parent.children.pop(flow, None)
        flow = flow.parent


def _downstream(step: _Step, steps: Sequence[_Step]) -> list[_Step]:
    """Return the steps that depend on a step, directly or not."""
    made = set(step.makes)
    found: list[_Step] = []
    while True:
        more = [other for other in steps if other not in found and made & set(other.sources)]
        if not more:
            return found
        found += more
        made |= {name for other in more for name in other.makes}


def _in_one_flow(steps: Sequence[_Step], below: Mapping[_Step, Sequence[_Step]]) -> list[_Step]:
    """Leave out the steps after a decoupled step: they run in child flows."""
    later = {step for before in steps for step in below.get(before, ())}
    return [step for step in steps if step not in later]


def _sequence(request: InferenceRequest) -> Mapping[str, Parameter]:
    """Return the parameters of Triton's ensemble responses."""
    return {
        "sequence_id": request.correlation_id,
        "sequence_start": RequestFlags.SEQUENCE_START in request.flags,
        "sequence_end": RequestFlags.SEQUENCE_END in request.flags,
    }


def _within(config: ModelConfig, error: GenserveError) -> InferenceError:
    """Return the error of a step as an error of the ensemble, with the same status."""
    prefix = f"in ensemble '{config.name}', "
    if isinstance(error, InferenceError):
        status = error.status
    else:
        status = Status.INVALID_ARG if isinstance(error, InvalidRequest) else Status.INTERNAL
    return InferenceError(prefix + error.message, status=status, remedy=error.remedy)
