"""Ensemble: a graph of models; each step runs as soon as its tensors are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from genserve.config.model_config import EnsembleStep, ModelConfig
from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.inference import (
    Door,
    Inference,
    InferenceRequest,
    InferenceResponse,
    Parameter,
    RequestFlags,
)
from genserve.statistics import ModelStatistics
from genserve.tensor import Tensor

__all__ = ["Ensemble"]

class Ensemble:
    """The graph of one ensemble; a `Runner`. Its steps go through the door that everybody uses.

    Each response of a decoupled step sends its tensors through the rest of the graph once more.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        door: Door,
        config_of: Callable[[EnsembleStep], ModelConfig],
        statistics: ModelStatistics,
    ) -> None:
        """Make the graph ready.

        Args:
            config: with at least one step.
            door: to the models of its steps.
            config_of: the config of a step's model as it is now; raises InferenceError.
            statistics: to count executions in.
        """
        self._config = config
        self._door = door
        self._config_of = config_of
        self._statistics = statistics

    @property
    def ready(self) -> bool:
        """Whether every model of its steps answers."""
        return all(
            self._door.is_ready(step.model_name, step.model_version) for step in self._config.ensemble_steps
        )

    @property
    def num_waiting(self) -> int:
        """Inferences that wait for nothing: each step waits at its own model."""
        return 0

    def submit(self, inference: Inference) -> None:
        """Start the steps that can."""
        try:
            steps = [_Step(spec, self._config_of(spec)) for spec in self._config.ensemble_steps]
        except InferenceError as error:
            # Triton takes an ensemble away while a model of its steps is away.
            raise InferenceError(
                f"Request for unknown model: '{self._config.name}' has no available versions",
                status=Status.NOT_FOUND,
                remedy=error.message,
            ) from error
        inference.started_ns = time.monotonic_ns()
        inference.when_ended(self._executed)
        run = _Run(inference, config=self._config, steps=steps, door=self._door)
        inference.when_cancelled(run.cancel)
        run.start()

    def close(self) -> None:
        """Nothing is held."""

    def _executed(self, inference: Inference) -> None:
        if inference.error is None:
            self._statistics.executed_alone(inference)


class _Step:
    """One step, with the config of its model."""

    def __init__(self, spec: EnsembleStep, model: ModelConfig) -> None:
        self.spec = spec
        self.decoupled = model.decoupled
        self.sources = tuple(spec.input_map.values())
        self.makes = tuple(spec.output_map.values())
        optional = {tensor.name for tensor in model.inputs if tensor.optional}
        self.required = tuple(tensor for name, tensor in spec.input_map.items() if name not in optional)
        lead = 1 if model.max_batch_size else 0
        self._ranks = {tensor.name: lead + len(tensor.dims) for tensor in model.inputs}

    def inputs(self, flow: _Flow) -> dict[str, Tensor]:
        """Return the tensors of a flow by the model's names."""
        return {
            name: self._fitted(tensor.renamed(name))
            for name, source in self.spec.input_map.items()
            if (tensor := flow.get(source)) is not None
        }

    def outputs(self, response: InferenceResponse | None) -> dict[str, Tensor | None]:
        """Return the tensors of a response by the ensemble's names; None for those it lacks."""
        made: dict[str, Tensor | None] = {}
        for output, name in self.spec.output_map.items():
            tensor = response.output(output) if response is not None else None
            made[name] = tensor.renamed(name) if tensor is not None else None
        return made

    def _fitted(self, tensor: Tensor) -> Tensor:
        """Add or strip a batch dimension of one where only one of ensemble and model batches."""
        rank = self._ranks.get(tensor.name, len(tensor.shape))
        if len(tensor.shape) == rank + 1 and tensor.shape[0] == 1:
            return tensor.reshaped(tensor.shape[1:])
        if len(tensor.shape) == rank - 1:
            return tensor.reshaped((1, *tensor.shape))
        return tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _Flow:
    """Tensors on their way through the graph: those of the request, or of one decoupled response.

    Attributes:
        tensors: by the ensemble's names; None: there will be none of this name.
        waiting: the steps that are to run in this flow.
        parent: whose tensors are seen here too.
        num_running: its steps that have not ended, but for decoupled ones.
        num_streaming: its decoupled steps that have not ended.
        branched: a decoupled step has begun: what comes after it runs in flows below this one.
        children: the flows below this one that are not over, in order.
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
        """Whether every tensor that it will ever see is known."""
        return not self.waiting and not self.num_running and (self.parent is None or self.parent.settled)

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it or of those below."""
        return self.settled and not self.num_streaming and not self.children


class _Run:
    """One request on its way through the graph."""

    def __init__(
        self, inference: Inference, *, config: ModelConfig, steps: Sequence[_Step], door: Door
    ) -> None:
        self._inference = inference
        self._config = config
        self._door = door
        self._lock = threading.Lock()
        below = {step: _downstream(step, steps) for step in steps if step.decoupled}
        self._below = {step: _of_one_flow(after, below) for step, after in below.items()}
        self._root = _Flow(
            tensors={spec.name: inference.inputs.get(spec.name) for spec in config.inputs},
            waiting=_of_one_flow(steps, below),
        )

    def start(self) -> None:
        """Start the steps that need nothing of others."""
        self._advance(self._root)

    def cancel(self) -> None:
        """Cancel the steps that run."""
        for part in tuple(self._inference.parts):
            part.cancel()

    def _advance(self, changed: _Flow) -> None:
        """Start every step that can be started since a flow has changed, and answer what is complete."""
        with self._lock:
            if self._inference.ended:
                return  # it has failed
            flows = tuple(changed.with_all_below())
            starting = [(flow, step) for flow in flows for step in self._startable(flow)]
            self._answer(flows)
        for flow, step in starting:
            self._start(flow, step)

    def _startable(self, flow: _Flow) -> Iterator[_Step]:
        """Take the steps whose inputs are known out of `waiting`; one without a required one never runs."""
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

    def _start(self, flow: _Flow, step: _Step) -> None:
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
        )

        def on_response(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001 - OnResponse
            self._on_response(flow, step, response, final=final)

        part = Inference(request=request, on_response=on_response)
        self._inference.parts.append(part)
        part.when_ended(self._inference.parts.remove)
        if self._inference.cancelled:
            part.cancel()
        try:
            self._door.submit(part)
        except GenserveError as error:
            self._fail(error)

    def _on_response(
        self, flow: _Flow, step: _Step, response: InferenceResponse | None, *, final: bool
    ) -> None:
        if response is not None and response.error is not None:
            self._fail(response.error)
            return
        with self._lock:
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
        self._advance(changed)

    def _answer(self, flows: Sequence[_Flow]) -> None:
        """Send what is complete, in the order of the flows; under the lock, so that the end comes last."""
        responses = [self._response(flow) for flow in flows if flow.settled and not flow.branched]
        for flow in reversed(flows):  # those below before those above
            _let_go(flow)
        for number, response in enumerate(responses, start=1):
            self._send(response, final=self._root.over and number == len(responses))
        if self._root.over and not responses:
            self._send(None, final=True)

    def _response(self, flow: _Flow) -> InferenceResponse:
        wanted = self._inference.request.requested_outputs or [spec.name for spec in self._config.outputs]
        outputs = [tensor for name in wanted if (tensor := flow.get(name)) is not None]
        if len(outputs) < len(wanted) and flow.parent is None:
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
            return  # it has failed, and a step answered all the same

    def _fail(self, error: GenserveError) -> None:
        self._inference.fail(_within(self._config, error))
        self.cancel()


def _let_go(flow: _Flow) -> None:
    """Forget a flow that is over, and those above that have waited for it alone."""
    while flow.parent is not None and flow.over:
        flow.parent.children.pop(flow, None)
        flow = flow.parent


def _downstream(step: _Step, steps: Sequence[_Step]) -> list[_Step]:
    """Return the steps that take, directly or not, what a step makes."""
    made = set(step.makes)
    found: list[_Step] = []
    while True:
        more = [other for other in steps if other not in found and made & set(other.sources)]
        if not more:
            return found
        found += more
        made |= {name for other in more for name in other.makes}


def _of_one_flow(steps: Sequence[_Step], below: Mapping[_Step, Sequence[_Step]]) -> list[_Step]:
    """Leave out the steps that come after a decoupled one among these: they run in flows of their own."""
    later = {step for before in steps for step in below.get(before, ())}
    return [step for step in steps if step not in later]


def _sequence(request: InferenceRequest) -> Mapping[str, Parameter]:
    """Return the parameters that Triton's answers of ensembles carry."""
    return {
        "sequence_id": request.correlation_id,
        "sequence_start": RequestFlags.SEQUENCE_START in request.flags,
        "sequence_end": RequestFlags.SEQUENCE_END in request.flags,
    }


def _within(config: ModelConfig, error: GenserveError) -> InferenceError:
    """Return the error of a step as the ensemble's; its code stays."""
    prefix = f"in ensemble '{config.name}', "
    status = error.status if isinstance(error, InferenceError) else Status.INTERNAL
    return InferenceError(prefix + error.message, status=status, remedy=error.remedy)
