"""Packing: the forms in which checkpoints keep weights, and how each is undone.

What a `Take` does to a weight [outputs, inputs] it does to a bias [outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Decoder
from genserve.export.weights import Names, Part, Take

__all__ = [
    "half",
    "interleaved",
    "packed",
    "plus_one",
    "rows_from",
    "stacked",
    "transposed",
    "transposed_stack",
]

_Projection = Literal["query", "key", "value"]
_PROJECTIONS: tuple[_Projection, ...] = ("query", "key", "value")


def packed(name: str, how: Callable[[_Projection], Take]) -> Names:
    """The roles of queries, keys and values that are one tensor in the checkpoint."""
    return {f"layers.{{}}.attention.{part}": Part(name=name, take=how(part)) for part in _PROJECTIONS}


def stacked(projection: _Projection) -> Take:
    """Take one of queries, keys and values that are stacked in this order, all heads of each together."""

    def take(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        start = {"query": 0, "key": queries, "value": queries + keys}[projection]
        return tensor[start : start + (queries if projection == "query" else keys)]

    return take


def interleaved(projection: _Projection) -> Take:
    """Take one of queries, keys and values that alternate head by head."""

    def take(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        heads = tensor.reshape(decoder.num_heads, 3, decoder.head_dim, *tensor.shape[1:])
        return heads[:, _PROJECTIONS.index(projection)].reshape(-1, *tensor.shape[1:])

    return take


def transposed(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Undo the order [inputs, outputs] of GPT-2's Conv1D."""
    return tensor.T


def transposed_stack(projection: _Projection) -> Take:
    """As `stacked`, in the order of GPT-2's Conv1D."""
    take = stacked(projection)
    return lambda tensor, decoder: take(tensor.T, decoder)


def half(index: Literal[0, 1]) -> Take:
    """Take the upper (0) or the lower half of two layers of one size that are stacked."""
    return lambda tensor, _decoder: tensor.reshape(2, -1, *tensor.shape[1:])[index]


def rows_from(first: int) -> Take:
    """Leave out the rows below `first`."""
    return lambda tensor, _decoder: tensor[first:]


def plus_one(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Complete the weight of a norm that is stored as its difference from 1."""
    return tensor + np.float32(1)
