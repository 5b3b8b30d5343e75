"""Channel: what goes between the server and the process of a model, and in which shape."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from genserve.backends.python.pb_utils.error import error_of, inference_error
from genserve.errors import GenserveError, InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse
from genserve.tensor import Tensor

__all__ = ["Channel", "portable_error", "portable_inference", "portable_request", "portable_response"]


class Channel:
    """A pipe with one reader and many writers; what is written after its end is lost."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message: its kind, and what belongs to it."""
        with self._lock:
            try:
                self._pipe.send(message)
            except (OSError, ValueError):
                return

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None: there was none in time. Raises EOFError at the end."""
        return self._pipe.recv() if timeout_s is None or self._pipe.poll(timeout_s) else None


def portable_inference(inference: Inference) -> InferenceRequest:
    """Return the request with the inputs that the model gets."""
    return replace(portable_request(inference.request), inputs=_portable_tensors(inference.inputs))


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
