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


class Channel:
    """A pipe with one reader and many writers; messages after its end are dropped."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message: its kind, then its arguments. Blocks while the pipe is full."""
        self.write(ForkingPickler.dumps(message))

    def write(self, message: memoryview) -> None:
        """Send a pickled message."""
        with self._lock:
            try:
                self._pipe.send_bytes(message)
            except (OSError, ValueError):
                return

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None: timed out. Raises EOFError at the end."""
        return self._pipe.recv() if timeout_s is None or self._pipe.poll(timeout_s) else None


class WriterThread:
    """Writes to a channel in the order of `send`, on behalf of threads that must not block.

    A stub process does not read while the code of its model holds the interpreter's lock, or while it is
    stopped. Cancellations come from the event loop, and responses to BLS requests from instances of other
    models.
    """

    def __init__(self, channel: Channel, *, name: str) -> None:
        self._channel = channel
        self._messages: SimpleQueue[memoryview | None] = SimpleQueue()
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def send(self, message: tuple[Any, ...]) -> None:
        """Queue a message; raises if it cannot be pickled."""
        self._messages.put(ForkingPickler.dumps(message))

    def end(self) -> None:
        """End the thread after the queued messages."""
        self._messages.put(None)

    def _write(self) -> None:
        while (message := self._messages.get()) is not None:
            self._channel.write(message)


def portable_inference(inference: Inference) -> InferenceRequest:
    """Return the request of an inference with the inputs that the model gets, and its span as the cause."""
    inputs = _portable_tensors(inference.inputs)
    return replace(portable_request(inference.request), inputs=inputs, cause=inference.span)


def portable_request(request: InferenceRequest) -> InferenceRequest:
    """Return a request that can be pickled."""
    return replace(request, inputs=_portable_tensors(request.inputs), parameters=dict(request.parameters))


def portable_response(response: InferenceResponse) -> InferenceResponse:
    """Return a response that can be pickled."""
    error = None if response.error is None else portable_error(response.error)
    outputs = _portable_tensors({tensor.name: tensor for tensor in response.outputs}).values()
    return InferenceResponse(outputs=tuple(outputs), parameters=dict(response.parameters), error=error)


def _portable_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: Tensor(tensor.name, tensor.array, data_type=tensor.data_type)
        for name, tensor in tensors.items()
    }


def portable_error(error: GenserveError) -> InferenceError:
    """Return an error that can be pickled."""
    return inference_error(error_of(error))
