"""Message codec: pickles of the messages of calls, which hold data and no code.

A message is pickled, because it has what a request and its answer are made of, and both have many fields.
It is read with the classes of `MESSAGE_CLASSES` alone: any other name in a pickle, which could be a
function to call, is an error. Arrays are not copied into the pickle.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from genserve.deploy.replica_messages import MESSAGE_CLASSES

_ALIGNMENT = 16     # malloc aligns arrays to as many bytes
_COUNT = struct.Struct("!I")
_NO_ARRAYS = _COUNT.pack(0)

# numpy's pickles name these, for arrays, for their copies within the pickle, and for scalars.
_OF_NUMPY: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    np.zeros(1).__reduce_ex__(5)[0],
    np.zeros(1).__reduce_ex__(2)[0],
    np.float32(0).__reduce_ex__(5)[0],
)
_NAMES: dict[tuple[str, str], Any] = {
    (one.__module__, one.__qualname__): one for one in (*MESSAGE_CLASSES, *_OF_NUMPY)
}


class UnreadableMessage(ValueError):
    """A message has a name that no message of genserve has, or is damaged."""


def encoded(message: Any) -> list[bytes | memoryview]:
    """Return the parts of a message: the number and sizes of its arrays, the arrays, and the pickle.

    Raises whatever pickling raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    if not buffers:
        return [_NO_ARRAYS + pickled]
    views = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"!I{len(views)}Q", len(views), *(view.nbytes for view in views))
    parts: list[bytes | memoryview] = [sizes, bytes(-len(sizes) % _ALIGNMENT)]
    for view in views:
        parts += [view, bytes(-view.nbytes % _ALIGNMENT)]
    return [*parts, pickled]


def decoded(content: bytearray) -> Any:
    """Return the message whose parts follow one another in `content`, which its arrays share.

    Raises:
        UnreadableMessage: the pickle has a name that is not in `MESSAGE_CLASSES`, or is damaged.
    """
    try:
        if content.startswith(_NO_ARRAYS):  # every token
            return _Unpickler(io.BytesIO(content[_COUNT.size :])).load()
        whole = memoryview(content)
        [num_arrays] = _COUNT.unpack_from(whole)
        sizes: Sequence[int] = struct.unpack_from(f"!{num_arrays}Q", whole, _COUNT.size)
        start = _aligned(_COUNT.size + 8 * num_arrays)
        views = []
        for size in sizes:
            views.append(whole[start : start + size])
            start = _aligned(start + size)
        return _Unpickler(io.BytesIO(whole[start:]), buffers=views).load()
    except Exception as error:      # pickles raise anything
        raise UnreadableMessage(f"{type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Finds the names that messages may have, and no other names."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a message") from None


def _aligned(position: int) -> int:
    return position + -position % _ALIGNMENT
