"""Requests to a model.py, and BLS requests from it to other models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal, overload

from genserve import inference as inner
from genserve.backends.python.bls import BlsResponses, bls_exec, bls_exec_async, bls_stream_async
from genserve.backends.python.model_context import (
    CURRENT_BATCH,
    ModelContext,
    Phase,
    RunningBatch,
    current_context,
)
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
from genserve.tensor import Tensor as InnerTensor
from genserve.tracing import Span

RESCHEDULE = 2  # TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class MemoryType(IntEnum):
    """Memory of outputs."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """The preferred memory of the outputs of a BLS request; ignored: they stay where the target made them."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self._type = preferred_memory_type
        self._device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request; BLS requests with it are recorded in the same trace."""

    __slots__ = ("_span",)

    def __init__(self) -> None:
        self._span: Span | None = None

    @classmethod
    def _of(cls, span: Span | None) -> InferenceTrace:
        self = cls()
        self._span = span
        return self

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON; always None, since traces are only written to files."""
        return None


class InferenceRequest:
    """A request to this model, as passed to `execute`; or a BLS request to another model."""

    __slots__ = ("_context", "_flags", "_inference", "_inputs", "_request", "_requested", "_sender", "_trace")

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
        """Make a BLS request. Names may be bytes, like the elements of a string tensor.

        Args:
            request_id: any text.
            correlation_id: the id of its sequence; 0 or "": it belongs to none.
            inputs: input tensors.
            requested_output_names: the outputs to return; empty: all.
            model_name: the target model.
            model_version: the target version; -1: the highest that is ready.
            flags: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, _END.
            timeout: the longest wait in the queue, in microseconds; 0: none.
            preferred_memory: where outputs should be; ignored.
            trace: the trace that the request belongs to.
            parameters: booleans, integers and strings.

        Raises:
            TypeError: inputs, requested_output_names or model_name is missing, or a name is not a text.
            TritonModelException: an input is None or occurs twice, a name is empty, or a type is wrong.
        """
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        model_name, request_id = text_argument(model_name, "a model name"), text_argument(request_id, "an id")
        outputs = tuple(text_argument(name, "the name of an output") for name in requested_output_names)
        self._inputs: list[Tensor] | None = list(inputs)
        if None in self._inputs:
            raise _empty("Input tensor", request_id=request_id, model=model_name)
        if "" in outputs:
            raise _empty("Requested output name", request_id=request_id, model=model_name)
        self._request = inner.InferenceRequest(
            model_name=model_name,
            model_version=model_version,
            id=request_id,
            inputs=_by_name(self._inputs),
            requested_outputs=outputs,
            parameters=checked_parameters(parameters) if parameters else {},
            correlation_id=correlation_id,
            flags=RequestFlags(flags) if flags else RequestFlags.NONE,
            timeout_us=timeout,
            cause=None if trace is None else trace._span,
        )
        self._requested = self._request.requested_outputs
        self._flags = flags
        self._trace = trace
        self._inference: Inference | None = None
        self._sender: InferenceResponseSender | None = None
        self._context = current_context()

    @classmethod
    def _of(cls, inference: Inference, context: ModelContext) -> InferenceRequest:
        self = cls.__new__(cls)
        self._inputs = None
        self._request = inference.request
        self._requested = inference.request.requested_outputs or context.outputs
        self._flags = int(inference.request.flags)
        self._trace = None
        self._inference = inference
        self._context = context
        # A decoupled request that the model drops must end: its sender ends it when it is freed.
        self._sender = self._new_sender(decoupled=True) if context.decoupled else None
        return self

    def inputs(self) -> list[Tensor]:
        """Return the input tensors, without optional inputs that were not sent."""
        if self._inputs is None:
            tensors = self._request.inputs if self._inference is None else self._inference.inputs
            needs_cpu = self._context is not None and self._context.cpu_inputs
            self._inputs = [
                Tensor._of(tensor.on_cpu() if needs_cpu else tensor) for tensor in tensors.values()
            ]
        return self._inputs

    def request_id(self) -> str:
        """Return the id that the client chose."""
        return self._request.id

    def correlation_id(self) -> int | str:
        """Return the correlation id of its sequence; 0: none."""
        return self._request.correlation_id

    def flags(self) -> int:
        """Return its sequence flags: bits of TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set its sequence flags."""
        self._flags = flags

    def timeout(self) -> int:
        """Return its timeout in the queue, in microseconds; 0: that of the model."""
        return self._request.timeout_us

    def parameters(self) -> str:
        """Return its parameters as JSON."""
        if self._inference is None:
            return json.dumps(dict(self._request.parameters))
        return parameters_json(self._request.parameters)

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs; of a BLS request, empty: all."""
        return set(self._requested)

    def trace(self) -> InferenceTrace:
        """Return its trace."""
        if self._trace is not None or self._inference is None:
            return self._trace or InferenceTrace()
        return InferenceTrace._of(self._inference.span or self._request.cause)

    def is_cancelled(self) -> bool:
        """Whether the request has been cancelled."""
        return self._inference is not None and self._inference.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """Return its response sender, the only way to respond of a decoupled model."""
        if self._sender is None:
            decoupled = self._context is not None and self._context.decoupled
            self._sender = self._new_sender(decoupled=decoupled)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Set whether `execute` ends it: TRITONSERVER_REQUEST_RELEASE_ALL, or reschedules it: _RESCHEDULE."""
        if self._inference is not None:
            self._inference.reschedule = flags == RESCHEDULE

    @overload
    def exec(self, decoupled: Literal[False] = ...) -> InferenceResponse: ...
    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...
    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:  # noqa: FBT001, FBT002
        """Send a BLS request and wait for the response, which also contains failures.

        Args:
            decoupled: return an iterator of any number of responses.

        Raises:
            TritonModelException: the model is not executing.
        """
        server, executor, batch = self._caller()
        request = self._bls_request()
        if decoupled:
            responses = BlsResponses(request, server=server, executor=executor, batch=batch)
            return ResponseIterator(responses)
        return InferenceResponse._of(bls_exec(request, server=server, executor=executor, batch=batch))

    @overload
    def async_exec(self, decoupled: Literal[False] = ...) -> asyncio.Future[InferenceResponse]: ...
    @overload
    def async_exec(self, decoupled: Literal[True]) -> asyncio.Future[ResponseIterator]: ...
    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:  # noqa: FBT001, FBT002
        """Send a BLS request, whether the result is awaited or not; return a future of the response.

        Args:
            decoupled: the future is an iterator of any number of responses, done with the first of them.

        Raises:
            TritonModelException: the model is not executing.
        """
        server, executor, batch = self._caller()
        request = self._bls_request()
        if decoupled:
            return bls_stream_async(
                request, server=server, executor=executor, batch=batch, convert=ResponseIterator
            )
        return bls_exec_async(
            request, server=server, executor=executor, batch=batch, convert=InferenceResponse._of
        )

    def _respond(self, response: InferenceResponse) -> None:
        """Send the response that `execute` returned for it."""
        if self._sender is not None:
            self._sender.send(response, FINAL)
        elif self._inference is not None:
            self._inference.send(response._unwrapped(self._requested), final=True)

    def _new_sender(self, *, decoupled: bool) -> InferenceResponseSender:
        return InferenceResponseSender(self._inference, requested=self._requested, decoupled=decoupled)

    def _check_answerable(self) -> None:
        if self._sender is not None:
            self._sender._check_order(final=True, empty=False)

    def _has_sender(self) -> bool:
        """Whether a response sender has sent, or can still send, its final response."""
        return self._sender is not None

    def _release_sender(self) -> None:
        if self._sender is not None:
            self._sender._release()

    def _close(self) -> None:
        """Close its sender."""
        if self._sender is not None:
            self._sender._close()

    def _fail(self, error: InferenceError) -> None:
        self._close()
        if self._inference is not None:
            self._inference.fail(error)

    def _caller(self) -> tuple[InferenceServer, Executor | None, RunningBatch | None]:
        """Return by whom a BLS request is made: the instance that waits for the response, and its batch."""
        context = self._context or current_context()
        if context is None or context.server is None or context.phase is not Phase.RUNNING:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        # A thread without an executor or a batch was started by the model. `execute` is assumed to wait for
        # it, unless the model is decoupled.
        executor, batch = CURRENT_EXECUTOR.get(), CURRENT_BATCH.get()
        if not context.decoupled:
            executor, batch = executor or context.executor, batch or context.batch
        return context.server, executor, batch

    def _bls_request(self) -> inner.InferenceRequest:
        if self._flags == self._request.flags:
            return self._request
        return replace(self._request, flags=RequestFlags(self._flags))


def _empty(part: str, *, request_id: str, model: str) -> TritonModelException:
    where = f"for request with id '{request_id}' and model name '{model}'"
    return TritonModelException(f"{part} {where} should not be empty.")


def _by_name(inputs: Sequence[Tensor]) -> dict[str, InnerTensor]:
    tensors: dict[str, InnerTensor] = {}
    for tensor in inputs:
        name = tensor._wrapped.name
        if name in tensors:
            raise TritonModelException(f"input '{name}' already exists in request")
        tensors[name] = tensor._wrapped
    return tensors
