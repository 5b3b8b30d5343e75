"""Weights: the tensors of a decoder by the role that they play, however its checkpoint packs them.

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

from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder import Decoder

__all__ = ["DecoderWeights", "Names", "Part", "Take", "parts_of"]

Take = Callable[[FloatArray, Decoder], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A role that a checkpoint keeps in another form than [outputs, inputs], or packed with others."""

    name: str
    take: Take  # of its weight and of its bias


# Of a role, without .weight and .bias: the name in the checkpoint. `{}` is the layer in both.
Names = Mapping[str, str | Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The tensors of a decoder; to fold something into them, replace `load`."""

    roles: frozenset[str]               # with .weight or .bias
    load: Callable[[str], FloatArray]   # the tensor of a role, read anew each time

    def optional(self, role: str) -> FloatArray | None:
        """The tensor of a role, if the decoder has it."""
        return self.load(role) if role in self.roles else None

    @staticmethod
    def of(checkpoint: Checkpoint, *, names: Names, decoder: Decoder) -> DecoderWeights:
        """The tensors of a checkpoint: all the weights in `names`, and those biases that it has.

        `load` raises ExportError for what the checkpoint lacks.
        """
        parts = parts_of(names, num_layers=len(decoder.attentions))
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


def parts_of(names: Names, *, num_layers: int) -> dict[str, Part]:
    """Where a checkpoint keeps what: by role, both without .weight and .bias."""
    return {
        role.format(i): _part(place, layer=i)
        for role, place in names.items()
        for i in range(num_layers if "{}" in role else 1)
    }


def _part(place: str | Part, *, layer: int) -> Part:
    if isinstance(place, str):
        return Part(name=place.format(layer), take=_as_it_is)
    return Part(name=place.name.format(layer), take=place.take)


def _as_it_is(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return tensor
