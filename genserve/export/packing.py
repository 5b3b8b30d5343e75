"""Packing: the forms in which checkpoints keep weights, and how each is undone.

Every function makes a `Part.take`; what it does to a weight [outputs, inputs] it does to a bias [outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Decoder

__all__ = ["interleaved", "plus_one", "rows_from", "stacked", "transposed"]

_Take = Callable[[FloatArray, Decoder], FloatArray]
_Projection = Literal["query", "key", "value"]
_PROJECTIONS: tuple[_Projection, ...] = ("query", "key", "value")


def transposed(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Undo the order [inputs, outputs] of GPT-2's Conv1D."""
    return tensor.T


def plus_one(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Complete the weight of a norm that is stored as its difference from 1."""
    return tensor + 1


def rows_from(first: int) -> _Take:
    """Leave out the rows below `first`."""
    return lambda tensor, _decoder: tensor[first:]


def stacked(projection: _Projection) -> _Take:
    """Take one of queries, keys and values that are stacked in this order, all heads of each together."""

    def take(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        start = {"query": 0, "key": queries, "value": queries + keys}[projection]
        return tensor[start : start + (queries if projection == "query" else keys)]

    return take


def interleaved(projection: _Projection) -> _Take:
    """Take one of queries, keys and values that alternate head by head."""

    def take(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        heads = tensor.reshape(decoder.num_heads, 3, decoder.head_dim, *tensor.shape[1:])
        return heads[:, _PROJECTIONS.index(projection)].reshape(-1, *tensor.shape[1:])

    return take
