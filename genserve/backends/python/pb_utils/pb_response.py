"""Responses of a model.py to a request, returned by `execute` or sent by a response sender."""

from __future__ import annotations

import json
import logging
import threading
from _thread import start_new_thread
from collections.abc import Iterator, Mapping, Sequence

from genserve import inference as inner
from genserve.backends.python.bls import BlsResponses
from genserve.backends.python.deadlock import CHECK_INTERVAL_S, lift_backlog_if_circular
from genserve.backends.python.pb_utils.pb_error import (
    TritonError,
    TritonModelException,
    error_of,
    inference_error,
)
from genserve.backends.python.pb_utils.pb_tensor import Tensor
from genserve.errors import Closed, InferenceError, Status
from genserve.inference import Backlog, Inference

logger = logging.getLogger(__name__)
FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL


class InferenceResponse:
    """Output tensors, or an error, which takes precedence."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, inner.Parameter] | None = None,
    ) -> None:
        """Make a response.

        Args:
            output_tensors: tensors that were not requested, or are not in the config, are dropped.
            error: sent in place of tensors.
            parameters: the response's parameters: booleans, integers and strings.

        Raises:
            TritonModelException: a tensor is None, or a parameter has another type.
        """
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceResponse(output_tensors: list of Tensor), got {type(tensor)}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse(error: TritonError), got {type(error)}")
        self._error = error
        self._parameters: Mapping[str, inner.Parameter] = {}
        if parameters is not None:
            self._parameters = checked_parameters(parameters)

    @classmethod
    def _of(cls, response: inner.InferenceResponse) -> InferenceResponse:
        self = cls.__new__(cls)
        self._tensors = [Tensor._of(tensor) for tensor in response.outputs]
        self._error = None if response.error is None else error_of(response.error)
        self._parameters = response.parameters
        return self

    def _unwrapped(self, requested: Sequence[str]) -> inner.InferenceResponse:
        if self._error is not None:
            return inner.InferenceResponse(error=inference_error(self._error))
        outputs = tuple(tensor._wrapped for tensor in self._tensors if tensor._wrapped.name in requested)
        return inner.InferenceResponse(outputs=outputs, parameters=self._parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the tensors; of a response to a BLS request, none if it has an error."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether it has an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters of the response as JSON."""
        return parameters_json(self._parameters)


class InferenceResponseSender:
    """Sends the responses to one request, at any time and from any thread."""

    def __init__(self, inference: Inference | None, *, requested: Sequence[str], decoupled: bool) -> None:
        self._inference = inference
        self._requested = requested
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._num_sent = 0
        self._closed = False
        self._released = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or end the request without one.

        In a step of an ensemble with `max_inflight_requests`, it blocks until a later step can take the
        response.

        Args:
            response: may only be None with the final flag.
            flags: TRITONSERVER_RESPONSE_COMPLETE_FINAL with or after the last response; else 0.

        Raises:
            TritonModelException: a final response has been sent, or the request has ended.
        """
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send(response: InferenceResponse), got {type(response)}")
        inference = self._inference
        if inference is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of the "
                "model."
            )
        with self._lock:
            self._check_order(final=flags == FINAL, empty=response is None)
            self._closed = flags == FINAL
            self._num_sent += 1
        answer = None if response is None else response._unwrapped(self._requested)
        try:
            inference.send(answer, final=flags == FINAL)
        except Closed as error:
            raise TritonModelException(error.message) from None
        if inference.backlog is not None and flags != FINAL:
            _wait_for_backlog(inference, inference.backlog)

    def is_cancelled(self) -> bool:
        """Whether the request has been cancelled."""
        return self._inference is not None and self._inference.cancelled

    def _check_order(self, *, final: bool, empty: bool) -> None:
        if not self._decoupled:
            if not empty and self._num_sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if empty and final and not self._num_sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending "
                    "a response."
                )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _close(self) -> None:
        self._closed = True

    def _release(self) -> None:
        """Do not end the request when the sender is freed: the request is rescheduled."""
        self._released = True

    def __del__(self) -> None:
        inference = self._inference
        if inference is not None and not self._released and not inference.ended:
            # On another thread, since the garbage collector may run while locks are held.
            start_new_thread(_end_dropped, (inference,))


class ResponseIterator:
    """The responses to a BLS request as they arrive; after the last one they can be iterated again."""

    def __init__(self, responses: BlsResponses) -> None:
        self._responses = responses
        self._incoming = map(InferenceResponse._of, responses)
        self._received: list[InferenceResponse] = []
        self._again: Iterator[InferenceResponse] | None = None

    def __iter__(self) -> ResponseIterator:
        if self._again is not None:
            self._again = iter(self._received)
        return self

    def __next__(self) -> InferenceResponse:
        if self._again is not None:
            return next(self._again)
        try:
            response = next(self._incoming)
        except StopIteration:
            self._again = iter(())
            raise
        self._received.append(response)
        return response

    def cancel(self) -> None:
        """Cancel the request."""
        self._responses.cancel()


def checked_parameters(parameters: Mapping[str, inner.Parameter]) -> dict[str, inner.Parameter]:
    """Return validated parameters.

    Raises:
        TritonModelException: a key is not a string, a value is not a boolean, integer or string, or an
            integer does not fit in 64 bits.
    """
    if not isinstance(parameters, Mapping):
        raise TypeError(f"Expect a dict of parameters, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TritonModelException(
                f"Expect parameters values of type int to fit in 64 bits with their sign: '{key}' does not"
            )
    return dict(parameters)


def parameters_json(parameters: Mapping[str, inner.Parameter]) -> str:
    """Return parameters as JSON, for models."""
    return json.dumps(dict(parameters), separators=(",", ":"), ensure_ascii=False) if parameters else "{}"


def _wait_for_backlog(inference: Inference, backlog: Backlog) -> None:
    clear = threading.Event()
    backlog.when_clear(clear.set)
    while not clear.wait(CHECK_INTERVAL_S):
        lift_backlog_if_circular(inference)


def _end_dropped(inference: Inference) -> None:
    """End a request whose sender was freed; Triton leaves it open for ever."""
    model = inference.request.model_name
    logger.warning("model %s dropped a response sender without sending the final flag", model)
    if not inference.num_responses:
        inference.fail(
            InferenceError(
                f"model '{model}' dropped the request without a response",
                status=Status.INTERNAL,
                remedy="send with flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL, and keep the sender until then",
            )
        )
        return
    try:
        inference.send(None, final=True)
    except Closed:
        return
