"""Sender: by which a model answers a request at any time, from any thread."""

from __future__ import annotations

import logging
import threading
from _thread import start_new_thread
from collections.abc import Sequence

from genserve.backends.python.calls import LOOK_EVERY_S, lift_if_circular
from genserve.backends.python.pb_utils.error import TritonModelException
from genserve.backends.python.pb_utils.response import InferenceResponse
from genserve.errors import Closed, InferenceError, Status
from genserve.inference import Backlog, Inference

__all__ = ["FINAL", "InferenceResponseSender"]

logger = logging.getLogger(__name__)

FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL


class InferenceResponseSender:
    """Sends the responses to one request."""

    def __init__(self, inference: Inference | None, *, requested: Sequence[str], decoupled: bool) -> None:
        self._inference = inference
        self._requested = requested
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._num_sent = 0
        self._closed = False
        self._handed_on = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or end without one.

        Args:
            response: None only with the final flag.
            flags: TRITONSERVER_RESPONSE_COMPLETE_FINAL with or after the last response; else 0.

        As a step of an ensemble with `max_inflight_requests` it waits until there is room for the response.

        Raises:
            TritonModelException: the order is wrong, or the request has ended.
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
            _wait_for_room(inference, inference.backlog)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
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

    def _hand_on(self) -> None:
        """Leave the end of the request to its next execution."""
        self._handed_on = True

    def __del__(self) -> None:
        inference = self._inference
        if inference is not None and not self._handed_on and not inference.ended:
            # On a thread of its own: the garbage collector may run where locks are held.
            start_new_thread(_end_dropped, (inference,))


def _wait_for_room(inference: Inference, backlog: Backlog) -> None:
    clear = threading.Event()
    backlog.when_clear(clear.set)
    while not clear.wait(LOOK_EVERY_S):
        lift_if_circular(inference)


def _end_dropped(inference: Inference) -> None:
    """End a request that nobody can answer any more; Triton leaves it open for ever."""
    logger.warning("model %s dropped a sender without the final flag", inference.model_name)
    if not inference.num_responses:
        inference.fail(
            InferenceError(
                f"model '{inference.model_name}' dropped the request without a response",
                status=Status.INTERNAL,
                remedy="send with flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL, and keep the sender until then",
            )
        )
        return
    try:
        inference.send(None, final=True)
    except Closed:
        return
