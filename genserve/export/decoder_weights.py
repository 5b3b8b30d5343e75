"""Decoder weights: the tensors of a decoder by role, unpacked from any checkpoint layout.

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

from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Decoder
from genserve.sampling.logits_array import FloatArray

# Turns a tensor of the checkpoint into that of a role: a weight [outputs, inputs], or a bias [outputs].
Unpack = Callable[[FloatArray, Decoder], FloatArray]
_Projection = Literal["query", "key", "value"]
_PROJECTIONS: tuple[_Projection, ...] = ("query", "key", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """The source of a role that a checkpoint keeps in another layout, or packed with others."""

    name: str
    unpack: Unpack  # of both weight and bias


# From a role to its source, both without .weight and .bias. `{}` is the layer in both.
TensorMap = Mapping[str, str | PackedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The tensors of a decoder; replace `load` to fold something into them."""

    roles: frozenset[str]               # with .weight or .bias
    load: Callable[[str], FloatArray]   # the tensor of a role, read again at each call

    def optional(self, role: str) -> FloatArray | None:
        """Return the tensor of a role, or None if the decoder does not have it."""
        return self.load(role) if role in self.roles else None

    @staticmethod
    def of(checkpoint: Checkpoint, *, names: TensorMap, decoder: Decoder) -> DecoderWeights:
        """Return the tensors of a checkpoint: a weight for each role in `names`, and its bias, if any.

        `load` raises ExportError for a tensor that the checkpoint lacks.
        """
        sources = {
            f"{role}.{kind}": (f"{source.name}.{kind}", source.unpack)
            for role, source in tensor_sources(names, num_layers=len(decoder.attentions)).items()
            for kind in ("weight", "bias")
            if kind == "weight" or f"{source.name}.bias" in checkpoint.tensor_names
        }
        if decoder.tied:
            sources["head.weight"] = sources["embedding.weight"]

        def load(role: str) -> FloatArray:
            name, unpack = sources[role]
            return unpack(checkpoint.tensor(name), decoder)

        return DecoderWeights(roles=frozenset(sources), load=load)


def tensor_sources(names: TensorMap, *, num_layers: int) -> dict[str, PackedTensor]:
    """Return the source of each role of each layer, both without .weight and .bias."""
    return {
        role.format(layer): _in_layer(source, layer=layer)
        for role, source in names.items()
        for layer in range(num_layers if "{}" in role else 1)
    }


def _in_layer(source: str | PackedTensor, *, layer: int) -> PackedTensor:
    if isinstance(source, str):
        return PackedTensor(name=source.format(layer), unpack=_unchanged)
    return PackedTensor(name=source.name.format(layer), unpack=source.unpack)


def _unchanged(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return tensor


def packed(name: str, unpacking: Callable[[_Projection], Unpack]) -> TensorMap:
    """Return the roles of queries, keys and values that are one tensor in the checkpoint."""
    return {
        f"layers.{{}}.attention.{projection}": PackedTensor(name=name, unpack=unpacking(projection))
        for projection in _PROJECTIONS
    }


def stacked(projection: _Projection) -> Unpack:
    """Unpack queries, keys or values from all heads of queries, then of keys, then of values."""

    def unpack(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
        start = {"query": 0, "key": queries, "value": queries + keys}[projection]
        return tensor[start : start + (queries if projection == "query" else keys)]

    return unpack


def interleaved(projection: _Projection) -> Unpack:
    """Unpack queries, keys or values that alternate head by head."""

    def unpack(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        heads = tensor.reshape(decoder.num_heads, 3, decoder.head_dim, *tensor.shape[1:])
        return heads[:, _PROJECTIONS.index(projection)].reshape(-1, *tensor.shape[1:])

    return unpack


def transposed(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Unpack GPT-2's Conv1D, whose weight is [inputs, outputs]."""
    return tensor.T


def transposed_stack(projection: _Projection) -> Unpack:
    """Unpack a stack, as `stacked`, in GPT-2's Conv1D."""
    unpack = stacked(projection)
    return lambda tensor, decoder: unpack(tensor.T, decoder)


def half(index: Literal[0, 1]) -> Unpack:
    """Unpack the first (0) or the second of two stacked layers of one size."""
    return lambda tensor, _decoder: tensor.reshape(2, -1, *tensor.shape[1:])[index]


def skip_rows(count: int) -> Unpack:
    """Leave out the first rows."""
    return lambda tensor, _decoder: tensor[count:]


def add_one(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Restore the weight of a norm that is stored as its difference from 1."""
    return tensor + np.float32(1)
