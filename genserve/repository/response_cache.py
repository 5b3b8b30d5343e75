"""Response cache: responses by model and inputs; the least recently used are evicted first."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from genserve.inference import InferenceRequest, InferenceResponse
from genserve.tensor import Tensor

_OVERHEAD_BYTES = 256  # an entry has roughly as many without its arrays: its key and objects


class ResponseCache:
    """Responses up to a number of bytes, shared by all models. Safe from any thread.

    The key includes the parameters of the request. Triton's does not, so it answers a request with another
    temperature with the text of the first.
    """

    def __init__(self, *, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[InferenceResponse, int]] = OrderedDict()

    def key(self, request: InferenceRequest, *, load: int) -> bytes:
        """Return the key of a request to the model that the load of this number made."""
        digest = hashlib.blake2b(digest_size=32)
        asked = sorted(request.requested_outputs), sorted(request.parameters.items())
        head = (request.model_name, load, *asked)
        digest.update(repr(head).encode())
        for name, tensor in sorted(request.inputs.items()):
            digest.update(repr((name, tensor.data_type.name, tensor.shape)).encode())
            digest.update(tensor.to_bytes())
        return digest.digest()

    def get(self, key: bytes) -> InferenceResponse | None:
        """Return a copy of the response, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        return _copy(entry[0])

    def put(self, key: bytes, response: InferenceResponse) -> None:
        """Insert a response, unless it is larger than the whole cache."""
        copy = _copy(response)
        size = _OVERHEAD_BYTES + sum(map(_size, copy.outputs))
        if size > self._size_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (copy, size)
            self._used_bytes += size
            while self._used_bytes > self._size_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._used_bytes -= freed


def _copy(response: InferenceResponse) -> InferenceResponse:
    """Copy a response: its receiver may write into it, and the model may reuse its arrays."""
    outputs = tuple(Tensor(t.name, t.array.copy(), data_type=t.data_type) for t in response.outputs)
    return InferenceResponse(outputs=outputs, parameters=response.parameters)


def _size(tensor: Tensor) -> int:
    return len(tensor.to_bytes()) if tensor.array.dtype.hasobject else tensor.array.nbytes
