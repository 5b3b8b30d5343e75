"""Requests to a model.py, and BLS requests from it to other models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal, overload

from genserve import inference as inner
from genserve.backends.python.bls import Answers, answers_async, call, call_async
from genserve.backends.python.model_context import Host, Phase, current_context
from genserve.backends.python.pb_utils.pb_error import TritonModelException, text_argument
from genserve.backends.python.pb_utils.pb_response import (
    FINAL,
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
    checked_parameters,
    parameters_json,
)
from genserve.backends.python.pb_utils.pb_tensor import Tensor
from genserve.errors import InferenceError
from genserve.inference import CURRENT_EXECUTOR, Executor, Inference, InferenceServer, RequestFlags
from genserve.tracing import Span

__all__ = ["RESCHEDULE", "InferenceRequest", "InferenceTrace", "MemoryType", "PreferredMemory"]


RESCHEDULE = 2  # TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class MemoryType(IntEnum):
    """Where outputs may lie."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Where a model would like the outputs of a BLS call; they stay where the target made them."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self._type = preferred_memory_type
        self._device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to; what is asked of other models with it is recorded too."""

    __slots__ = ("_span",)

    def __init__(self) -> None:
        self._span: Span | None = None

    @classmethod
    def _of(cls, span: Span | None) -> InferenceTrace:
        self = cls()
        self._span = span
        return self

    def get_context(self) -> str | None:
        """The OpenTelemetry context, as JSON; always None: traces are recorded in files alone."""
        return None


class InferenceRequest:
    """A request to this model, as `execute` gets it; or one to another, as a model makes it."""

    __slots__ = ("_asked", "_flags", "_host", "_inference", "_inputs", "_requested", "_sender", "_trace")

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str | bytes] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, inner.Parameter] | None = None,
    ) -> None:
        """Make a request to another model. Names may be bytes, as the elements of a string tensor are.

        Args:
            request_id: any text.
            correlation_id: of its sequence; 0 or "": it is in none.
            inputs: its tensors.
            requested_output_names: empty: all outputs.
            model_name: of the model to ask.
            model_version: -1: the highest that is ready.
            flags: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, _END.
            timeout: in the queue, microseconds; 0: none.
            preferred_memory: where the outputs should lie.
            trace: that it belongs to.
            parameters: booleans, integers and strings.

        Raises:
            TypeError: inputs, requested_output_names or model_name is missing, or a name is no text.
            TritonModelException: one of them has a None or an empty name in it, or a wrong type.
        """
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        model_name, request_id = text_argument(model_name, "a model name"), text_argument(request_id, "an id")
        outputs = tuple(text_argument(name, "the name of an output") for name in requested_output_names)
        of = f"for request with id '{request_id}' and model name '{model_name}' should not be empty."
        if None in inputs:
            raise TritonModelException(f"Input tensor {of}")
        if "" in outputs:
            raise TritonModelException(f"Requested output name {of}")
        self._inputs: list[Tensor] | None = list(inputs)
        tensors = {tensor._wrapped.name: tensor._wrapped for tensor in self._inputs}
        if len(tensors) < len(self._inputs):
            names = [tensor._wrapped.name for tensor in self._inputs]
            twice = next(name for name in names if names.count(name) > 1)
            raise TritonModelException(f"input '{twice}' already exists in request")
        self._asked = inner.InferenceRequest(
            model_name=model_name,
            model_version=model_version,
            id=request_id,
            inputs=tensors,
            requested_outputs=outputs,
            parameters=checked_parameters(parameters) if parameters else {},
            correlation_id=correlation_id,
            flags=RequestFlags(flags) if flags else RequestFlags.NONE,
            timeout_us=timeout,
            cause=None if trace is None else trace._span,
        )
        self._requested = self._asked.requested_outputs
        self._flags = flags
        self._trace = trace
        self._inference: Inference | None = None
        self._sender: InferenceResponseSender | None = None
        self._host = current_context()

    @classmethod
    def _of(cls, inference: Inference, host: Host) -> InferenceRequest:
        self = cls.__new__(cls)
        self._inputs = None
        self._asked = inference.request
        self._requested = inference.request.requested_outputs or host.outputs
        self._flags = int(inference.request.flags)
        self._trace = None
        self._inference = inference
        self._host = host
        # Whoever drops a decoupled request before it has ended drops its sender too, which ends it.
        self._sender = self._new_sender(decoupled=True) if host.decoupled else None
        return self

    def inputs(self) -> list[Tensor]:
        """The tensors; an optional one that was not sent is not among them."""
        if self._inputs is None:
            tensors = self._asked.inputs if self._inference is None else self._inference.inputs
            needs_cpu = self._host is not None and self._host.cpu_inputs
            self._inputs = [
                Tensor._of(tensor.on_cpu() if needs_cpu else tensor) for tensor in tensors.values()
            ]
        return self._inputs

    def request_id(self) -> str:
        """The id that the client gave it."""
        return self._asked.id

    def correlation_id(self) -> int | str:
        """Of its sequence, as it was sent; 0: it is in none."""
        return self._asked.correlation_id

    def flags(self) -> int:
        """Where it stands in its sequence: bits of TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set where it stands in its sequence."""
        self._flags = flags

    def timeout(self) -> int:
        """In the queue, microseconds; 0: none of its own."""
        return self._asked.timeout_us

    def parameters(self) -> str:
        """Its parameters, as JSON."""
        if self._inference is None:
            return json.dumps(dict(self._asked.parameters))
        return parameters_json(self._asked.parameters)

    def requested_output_names(self) -> set[str]:
        """The outputs that are asked for; of a request to another model, empty: all."""
        return set(self._requested)

    def trace(self) -> InferenceTrace:
        """The trace it belongs to."""
        if self._trace is not None or self._inference is None:
            return self._trace or InferenceTrace()
        return InferenceTrace._of(self._inference.span or self._asked.cause)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._inference is not None and self._inference.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """By which it can be answered at any time; of a decoupled model, the only way."""
        if self._sender is None:
            decoupled = self._host is not None and self._host.decoupled
            self._sender = self._new_sender(decoupled=decoupled)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of it after `execute`: TRITONSERVER_REQUEST_RELEASE_ALL or _RESCHEDULE."""
        if self._inference is not None:
            self._inference.reschedule = flags == RESCHEDULE

    @overload
    def exec(self, decoupled: Literal[False] = ...) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:  # noqa: FBT001, FBT002
        """Ask the model and wait; failures are in the response.

        Args:
            decoupled: get an iterator of any number of responses.

        Raises:
            TritonModelException: not called while the model executes.
        """
        server, executor = self._way_out()
        if decoupled:
            return ResponseIterator(Answers(self._to_ask(), server=server, executor=executor))
        return InferenceResponse._of(call(self._to_ask(), server=server, executor=executor))

    @overload
    def async_exec(self, decoupled: Literal[False] = ...) -> asyncio.Future[InferenceResponse]: ...
    @overload
    def async_exec(self, decoupled: Literal[True]) -> asyncio.Future[ResponseIterator]: ...
    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:  # noqa: FBT001, FBT002
        """Ask the model; the answer is to be awaited. It is asked at once, awaited or not.

        Args:
            decoupled: await an iterator of any number of responses; it is there with the first of them.

        Raises:
            TritonModelException: not called while the model executes.
        """
        server, executor = self._way_out()
        if decoupled:
            return answers_async(self._to_ask(), server=server, executor=executor, convert=ResponseIterator)
        return call_async(self._to_ask(), server=server, executor=executor, convert=InferenceResponse._of)

    def _answer(self, response: InferenceResponse) -> None:
        """Answer a request to this model with what `execute` returned for it."""
        if self._sender is not None:
            self._sender.send(response, FINAL)
        elif self._inference is not None:
            self._inference.send(response._unwrapped(self._requested), final=True)

    def _new_sender(self, *, decoupled: bool) -> InferenceResponseSender:
        return InferenceResponseSender(self._inference, requested=self._requested, decoupled=decoupled)

    def _check_answerable(self) -> None:
        if self._sender is not None:
            self._sender._check_order(final=True, empty=False)

    def _may_be_answered(self) -> bool:
        """Whether someone has, or can still send, its last response."""
        return self._sender is not None

    def _hand_on(self) -> None:
        if self._sender is not None:
            self._sender._hand_on()

    def _close(self) -> None:
        """Let its sender send nothing more."""
        if self._sender is not None:
            self._sender._close()

    def _fail(self, error: InferenceError) -> None:
        self._close()
        if self._inference is not None:
            self._inference.fail(error)

    def _way_out(self) -> tuple[InferenceServer, Executor | None]:
        """Return the server, and the instance that waits for its answer."""
        host = self._host or current_context()
        if host is None or host.server is None or host.phase is not Phase.RUNNING:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        return host.server, _executor(host)

    def _to_ask(self) -> inner.InferenceRequest:
        if self._flags == self._asked.flags:
            return self._asked
        return replace(self._asked, flags=RequestFlags(self._flags))


def _executor(host: Host) -> Executor | None:
    """Return the instance that waits for what is asked now.

    A thread that `execute` has started is waited for by it, as far as one can tell; but one of a decoupled
    model goes on after `execute`.
    """
    executor = CURRENT_EXECUTOR.get()
    if executor is not None or host.decoupled:
        return executor
    return host.executor
