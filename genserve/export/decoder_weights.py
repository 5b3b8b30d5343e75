"""Decoder weights: the tensors of a decoder by role, however its checkpoint packs them.

Roles are the same for all families. `{}` is a layer; each has a `.weight`, some have a `.bias`:

    embedding                           [vocab, hidden]
    embedding.norm                      [hidden]
    positions                           [context, hidden]
    layers.{}.attention.norm            [hidden]
    layers.{}.attention.query           [heads * head_dim, hidden]
    layers.{}.attention.key             [kv_heads * head_dim, hidden]; .value
    layers.{}.attention.query_norm      [head_dim]; .key_norm
    layers.{}.attention.output          [hidden, heads * head_dim]
    layers.{}.attention.post_norm       [hidden]
    layers.{}.mlp.norm                  [hidden]
    layers.{}.mlp.gate                  [inner, hidden]; .up
    layers.{}.mlp.down                  [hidden, inner]
    layers.{}.mlp.post_norm             [hidden]
    norm                                [hidden]
    head                                [vocab, hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder import Decoder

__all__ = [
    "DecoderWeights",
    "TensorMap",
    "PackedTensor",
    "Take",
    "half",
    "interleaved",
    "packed",
    "tensor_sources",
    "plus_one",
    "rows_from",
    "stacked",
    "transposed",
    "transposed_stack",
]


Unpack = Callable[[FloatArray, Decoder], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """A role that a checkpoint keeps in another form than [outputs, inputs], or packed with others."""

    name: str
    take: Take  # of its weight and of its bias


# Of a role, without .weight and .bias: the name in the checkpoint. `{}` is the layer in both.
TensorMap = Mapping[str, str | PackedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The tensors of a decoder; to fold something into them, replace `load`."""

    roles: frozenset[str]               # with .weight or .bias
    load: Callable[[str], FloatArray]   # the tensor of a role, read anew each time

    def optional(self, role: str) -> FloatArray | None:
        """The tensor of a role, if the decoder has it."""
        return self.load(role) if role in self.roles else None

    @staticmethod
    def of(checkpoint: Checkpoint, *, names: TensorMap, decoder: Decoder) -> DecoderWeights:
        """The tensors of a checkpoint: all the weights in `names`, and those biases that it has.

        `load` raises ExportError for what the checkpoint lacks.
        """
        parts = tensor_sources(names, num_layers=len(decoder.attentions))
        places = {
            f"{role}.{kind}": (f"{part.name}.{kind}", part.take)
            for role, part in parts.items()
            for kind in ("weight", "bias")
            if kind == "weight" or f"{part.name}.bias" in checkpoint.tensor_names
        }
        if decoder.tied:
            places["head.weight"] = places["embedding.weight"]

        def load(role: str) -> FloatArray:
            name, take = places[role]
            return take(checkpoint.tensor(name), decoder)

        return DecoderWeights(roles=frozenset(places), load=load)


def tensor_sources(names: TensorMap, *, num_layers: int) -> dict[str, PackedTensor]:
    """Where a checkpoint keeps what: by role, both without .weight and .bias."""
    return {
        role.format(i): _part(place, layer=i)
        for role, place in names.items()
        for i in range(num_layers if "{}" in role else 1)
    }


def _part(place: str | PackedTensor, *, layer: int) -> PackedTensor:
    if isinstance(place, str):
        return PackedTensor(name=place.format(layer), take=_as_it_is)
    return PackedTensor(name=place.name.format(layer), take=place.take)


def _as_it_is(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return tensor


_Projection = Literal["query", "key", "value"]
_PROJECTIONS: tuple[_Projection, ...] = ("query", "key", "value")


def packed(name: str, how: Callable[[_Projection], Unpack]) -> TensorMap:
    """The roles of queries, keys and values that are one tensor in the checkpoint."""
    return {f"layers.{{}}.attention.{part}": PackedTensor(name=name, take=how(part)) for part in _PROJECTIONS}


def stacked(projection: _Projection) -> Unpack:
    """Take one of queries, keys and values that are stacked in this order, all heads of each together."""

    def take(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        start = {"query": 0, "key": queries, "value": queries + keys}[projection]
        return tensor[start : start + (queries if projection == "query" else keys)]

    return take


def interleaved(projection: _Projection) -> Unpack:
    """Take one of queries, keys and values that alternate head by head."""

    def take(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        heads = tensor.reshape(decoder.num_heads, 3, decoder.head_dim, *tensor.shape[1:])
        return heads[:, _PROJECTIONS.index(projection)].reshape(-1, *tensor.shape[1:])

    return take


def transposed(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Undo the order [inputs, outputs] of GPT-2's Conv1D."""
    return tensor.T


def transposed_stack(projection: _Projection) -> Unpack:
    """As `stacked`, in the order of GPT-2's Conv1D."""
    take = stacked(projection)
    return lambda tensor, decoder: take(tensor.T, decoder)


def half(index: Literal[0, 1]) -> Unpack:
    """Take the upper (0) or the lower half of two layers of one size that are stacked."""
    return lambda tensor, _decoder: tensor.reshape(2, -1, *tensor.shape[1:])[index]


def rows_from(first: int) -> Unpack:
    """Leave out the rows below `first`."""
    return lambda tensor, _decoder: tensor[first:]


def plus_one(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Complete the weight of a norm that is stored as its difference from 1."""
    return tensor + np.float32(1)
