"""Stub channel: the pipe between the server and a stub process, and the messages as they are pickled."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

from genserve.backends.python.pb_utils.pb_error import error_of, inference_error
from genserve.errors import GenserveError, InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse
from genserve.tensor import Tensor

__all__ = [
    "Channel",
    "WritingThread",
    "portable_error",
    "portable_inference",
    "portable_request",
    "portable_response",
]


class Channel:
    """A pipe with one reader and many writers; what is written after its end is lost."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message: its kind, and what belongs to it. Waits while the pipe is full."""
        self.write(ForkingPickler.dumps(message))

    def write(self, message: memoryview) -> None:
        """Send what was pickled."""
        with self._lock:
            try:
                self._pipe.send_bytes(message)
            except (OSError, ValueError):
                return

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None: there was none in time. Raises EOFError at the end."""
        return self._pipe.recv() if timeout_s is None or self._pipe.poll(timeout_s) else None


class WritingThread:
    """Writes into a channel for those who must not wait, in the order in which they send.

    A process reads nothing while code of its model keeps the interpreter to itself, or while it is stopped;
    and who cancels is the event loop, who answers a call is an instance of another model.
    """

    def __init__(self, channel: Channel, *, name: str) -> None:
        self._channel = channel
        self._messages: SimpleQueue[memoryview | None] = SimpleQueue()
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message, some time; raises what makes it one that cannot be sent."""
        self._messages.put(ForkingPickler.dumps(message))

    def end(self) -> None:
        """End the thread, after what was sent before."""
        self._messages.put(None)

    def _write(self) -> None:
        while (message := self._messages.get()) is not None:
            self._channel.write(message)


def portable_inference(inference: Inference) -> InferenceRequest:
    """Return the request with the inputs that the model gets, and what it may cause in its turn."""
    inputs = _portable_tensors(inference.inputs)
    return replace(portable_request(inference.request), inputs=inputs, cause=inference.span)


def portable_request(request: InferenceRequest) -> InferenceRequest:
    """Return a request that can be sent."""
    return replace(request, inputs=_portable_tensors(request.inputs), parameters=dict(request.parameters))


def portable_response(response: InferenceResponse) -> InferenceResponse:
    """Return a response that can be sent."""
    error = None if response.error is None else portable_error(response.error)
    outputs = _portable_tensors({tensor.name: tensor for tensor in response.outputs}).values()
    return InferenceResponse(outputs=tuple(outputs), parameters=dict(response.parameters), error=error)


def _portable_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: Tensor(tensor.name, tensor.array, data_type=tensor.data_type)
        for name, tensor in tensors.items()
    }


def portable_error(error: GenserveError) -> InferenceError:
    """Return an error that can be sent."""
    return inference_error(error_of(error))
