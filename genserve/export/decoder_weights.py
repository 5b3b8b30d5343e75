"""Decoder weights: gives the tensors of a decoder by role, unpacked from any checkpoint layout.

All families have the same roles. `{}` is a layer; each role has a `.weight`, and some have a `.bias`:

    embedding                           [vocab, hidden]
    embedding.norm                      [hidden]
    positions                           [context, hidden]
    layers.{}.attention.norm            [hidden]
    layers.{}.attention.query           [heads * head_dim, hidden]
    layers.{}.attention.key             [kv_heads * head_dim, hidden]; .value
    layers.{}.attention.query_norm      [head_dim], or [heads, head_dim]; .key_norm
    layers.{}.attention.sinks           [heads], without .weight: the scores of one more key, without a value
    layers.{}.attention.latent_query    [heads * nope + heads * rope, hidden]; all of these of a `Latent`
    layers.{}.attention.query_a         [query_rank, hidden]; .query_a_norm [query_rank]
    layers.{}.attention.query_b         [heads * nope + heads * rope, query_rank]
    layers.{}.attention.latent          [rope + rank, hidden]; .latent_norm [rank]
    layers.{}.attention.latent_key      [heads * rank, nope]
    layers.{}.attention.latent_value    [heads * value, rank]
    layers.{}.attention.gate            [heads * head_dim, hidden]: see `Attention.gated`
    layers.{}.attention.output          [hidden, heads * head_dim]
    layers.{}.attention.post_norm       [hidden]
    layers.{}.scale                     [1], without .weight: multiplies the layer's outputs and its residual
    layers.{}.mixer.norm                [hidden]
    layers.{}.mixer.input               [3 * hidden, hidden]: b, c and x of a `ShortConv`
    layers.{}.mixer.conv                [hidden, kernel_size]
    layers.{}.mixer.query               [key_heads * key_dim, hidden]; .key; these of a `LinearAttention`
    layers.{}.mixer.value               [heads * value_dim, hidden]; .gate
    layers.{}.mixer.step                [heads, hidden]; of the delta rule also .beta
    layers.{}.mixer.query_conv          [key_heads * key_dim, kernel_size]; .key_conv
    layers.{}.mixer.value_conv          [heads * value_dim, kernel_size]
    layers.{}.mixer.rate                [heads], without .weight; .step_bias; of the gated rule also .skip
    layers.{}.mixer.out_norm            [heads * value_dim], or [value_dim] for all heads
    layers.{}.mixer.output              [hidden, hidden or heads * value_dim]
    layers.{}.mixer.post_norm           [hidden]
    layers.{}.mlp.norm                  [hidden]
    layers.{}.mlp.gate                  [inner, hidden]; .up
    layers.{}.mlp.alpha_p               [1], without .weight; .alpha_n, .beta: xIELU's parameters
    layers.{}.mlp.down                  [hidden, inner]
    layers.{}.mlp.post_norm             [hidden]
    layers.{}.mlp.router                [experts, hidden]
    layers.{}.mlp.choice                [experts], without .weight: see `Router`
    layers.{}.mlp.experts.{e}.gate      [inner, hidden]; .up; {e} is an expert
    layers.{}.mlp.experts.{e}.down      [hidden, inner]
    layers.{}.mlp.shared.gate           [inner, hidden]; .up
    layers.{}.mlp.shared.down           [hidden, inner]
    layers.{}.mlp.shared.score          [1, hidden]: its sigmoid multiplies the shared expert
    layers.{}.mlp.own_post_norm         [hidden]; all of these of experts beside an MLP
    layers.{}.mlp.router_norm           [hidden]; .experts_norm, .experts_post_norm
    layers.{}.mlp.expert_scales         [experts], without .weight: multiply the weights of chosen experts
    per_layer.embedding                 [vocab, layers * size]; all of these of a `PerLayer`
    per_layer.projection                [layers * size, hidden]
    per_layer.norm                      [size]
    altup.input                         [(streams - 1) * hidden, hidden]; .output; these of an `AltUp`
    layers.{}.altup.norm                [hidden]
    layers.{}.altup.router              [streams, hidden]
    layers.{}.altup.predict             [streams * streams, streams]
    layers.{}.altup.correct             [streams, streams]
    layers.{}.altup.scale               [hidden], without .weight: multiplies what `per_layer.gate` reads
    layers.{}.attention.laurel_left     [rank, hidden]: a low-rank layer beside attention, and its residual
    layers.{}.attention.laurel_right    [hidden, rank]; .laurel_norm [hidden]
    layers.{}.per_layer.gate            [size, hidden]
    layers.{}.per_layer.output          [hidden, size]; .post_norm [hidden]
    norm                                [hidden]
    head                                [vocab, hidden]

The scales of residuals and logits and the pairs of rotary positions are folded into these tensors, so what
reads them knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from genserve.export.checkpoints.checkpoint import Checkpoint, StoredRows
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder import Attention, Decoder, Latent, LinearAttention, Rotary, ShortConv
from genserve.sampling.logits_array import FloatArray

# Turns a tensor of the checkpoint into a role's tensor: a weight [outputs, inputs], or a bias [outputs].
Unpack = Callable[[FloatArray, Decoder], FloatArray]
# Makes a role's tensor of those that it reads by name: numbers, or indices of rows.
_Reader = Callable[[Callable[[str], NDArray[Any]]], NDArray[Any]]
_Matrix = TypeVar("_Matrix", Rows[np.float32], StoredRows)
_Projection = Literal["query", "key", "value"]
_PROJECTIONS: tuple[_Projection, ...] = ("query", "key", "value")


def _unchanged(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return tensor


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a checkpoint has the tensors of a role.

    Attributes:
        names: modules, which have a .weight and perhaps a .bias; the first one that the checkpoint has. In a
            name, `{}` is the layer, `{e}` the expert, and `{n}` counts heads whose tensors are stacked.
        unpack: is applied to both weight and bias.
        kind: "module"; or "difference": a norm that stores the difference of its weight from 1; or "ones": a
            norm without tensors, whose weight is 1; or "tensor": the name is that of a tensor, and the role
            has neither .weight nor .bias; or "stack": the second name is that of a tensor, of which an
            expert takes one entry [experts, ...], and its biases have this name with `_bias` behind it. The
            first name is the module that checkpoints have in which the parts are apart, and which is not
            unpacked.
    """

    names: tuple[str, ...]
    unpack: Unpack = _unchanged
    kind: Literal["module", "difference", "ones", "tensor", "stack"] = "module"

    def in_layer(self, layer: int) -> TensorSource:
        """Return the source of one layer."""
        return replace(self, names=tuple(name.replace("{}", str(layer)) for name in self.names))

    def of_expert(self, expert: int) -> TensorSource:
        """Return the source of one expert."""
        own = [name.replace("{e}", str(expert)) for name in self.names]
        if self.kind == "stack":
            own[1] = f"{own[1]}[{expert}]"
        return replace(self, names=tuple(own))

    def name_in(self, tensor_names: Container[str]) -> str:
        """Return the first of the names that a checkpoint with these tensors has, or else the last one."""
        has = (name for name in self.names if f"{_first_head(name)}.weight" in tensor_names)
        return next(has, self.names[-1])


# Maps a role to its source, both without .weight and .bias. `{}` is the layer in both.
TensorMap = Mapping[str, str | TensorSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The tensors of a decoder; replace `vector` and `rows` to fold something into them."""

    roles: frozenset[str]               # the roles with .weight or .bias
    rows: Callable[[str], Rows[np.float32]]     # reads the weight of a role for which `is_matrix` holds
    vector: Callable[[str], FloatArray]         # reads the tensor of any other role; each call reads it again
    # Reads the weight of a role as a quantized checkpoint stores it; None: it does not.
    stored: Callable[[str], StoredRows | None] = lambda _role: None
    # Returns the factors by which the outputs of a norm, a role without .weight, were divided; None: none.
    smoothing: Callable[[str], FloatArray | None] = lambda _role: None

    def load(self, role: str) -> FloatArray:
        """Return the whole tensor of a role; each call reads it again."""
        return self.rows(role).whole() if is_matrix(role) else self.vector(role)

    def optional(self, role: str) -> FloatArray | None:
        """Return the tensor of a role, or None if the decoder does not have it."""
        return self.load(role) if role in self.roles else None

    @staticmethod
    def of(checkpoint: Checkpoint, *, names: TensorMap, decoder: Decoder) -> DecoderWeights:
        """Return the tensors of a checkpoint: for each role in `names` a weight, and a bias if there is one.

        Reading raises ExportError for a tensor that the checkpoint lacks.
        """
        sources = tensor_sources(names, num_layers=len(decoder.layers), num_experts=decoder.num_experts)
        readers = {
            name: reader
            for role, source in sources.items()
            if is_used(role, decoder)
            for name, reader in _readers(role, source, checkpoint=checkpoint, decoder=decoder)
        }
        if decoder.tied:
            readers["head.weight"] = readers["embedding.weight"]

        def whole(role: str) -> FloatArray:
            tensor = _ordered(role, readers[role](checkpoint.tensor), decoder=decoder)
            return tensor if (scale := scale_of(role)) is None else tensor * scale

        def scale_of(role: str) -> np.float32 | None:
            return _scale(role, roles=readers.keys(), decoder=decoder)

        def rows(role: str) -> Rows[np.float32]:
            found = _taken(role, readers[role], checkpoint.rows, decoder=decoder)
            if found is None:
                return Rows.of(whole(role))
            matrix, order = found
            scale, taken = scale_of(role), matrix.taken(order)
            return taken if scale is None else taken.mapped(lambda part: part * scale)

        def stored(role: str) -> StoredRows | None:
            found = _taken(role, readers[role], checkpoint.load_stored, decoder=decoder)
            if found is None or scale_of(role) is not None:
                return None
            return replace(found[0], rows=found[0].rows.taken(found[1]))

        return DecoderWeights(roles=frozenset(readers), rows=rows, vector=whole, stored=stored)


def is_matrix(role: str) -> bool:
    """Whether a role, with .weight or .bias, is the matrix of a linear layer, an embedding or positions."""
    return role.endswith(".weight") and not role.endswith("norm.weight")


def tensor_sources(
    names: TensorMap, *, num_layers: int, num_experts: int | None = None
) -> dict[str, TensorSource]:
    """Return the source of each role of each layer and expert, both without .weight and .bias.

    Without `num_experts`, roles and names of experts keep their `{e}`.
    """
    sources: dict[str, TensorSource] = {}
    for role, named in names.items():
        source = TensorSource((named,)) if isinstance(named, str) else named
        for layer in range(num_layers if "{}" in role else 1):
            own, in_layer = role.replace("{}", str(layer)), source.in_layer(layer)
            if "{e}" not in own or num_experts is None:
                sources[own] = in_layer
                continue
            for expert in range(num_experts):
                sources[own.replace("{e}", str(expert))] = in_layer.of_expert(expert)
    return sources


_OF_EXPERTS = ("router", "choice", "experts")
_OF_EXPERTS_BESIDE = (
    "own_post_norm", "router_norm", "experts_norm", "experts_post_norm", "expert_scales"
)
_OF_ONE_MLP = ("gate", "up", "down")
_OF_ALL_MIXERS = ("norm", "output", "post_norm")
_OF_SHORT_CONVS = ("input", "conv")


def is_used(role: str, decoder: Decoder) -> bool:
    """Whether the decoder has a role that only some layers or models of its family have."""
    if role.startswith("per_layer.") or ".per_layer." in role:
        return decoder.per_layer is not None
    if not role.startswith("layers.") or role.endswith(".scale") or ".altup." in role:
        return True
    _, index, part, name, *_ = role.split(".")
    layer = decoder.layers[int(index)]
    if name == ("norm" if layer.norms == "after" else "post_norm") and layer.norms is not None:
        return False
    if part == "attention":
        return layer.attention is not None and _is_used_by_attention(name, layer.attention)
    if part == "mixer":
        return layer.mixer is not None and _is_used_by_mixer(name, layer.mixer)
    if layer.activation is None:
        return False
    if name in _OF_EXPERTS:
        return layer.experts is not None
    if name in _OF_EXPERTS_BESIDE:
        return layer.experts is not None and layer.experts.beside_mlp
    if name == "shared":
        return layer.experts is not None and layer.experts.shared
    return name not in _OF_ONE_MLP or layer.experts is None or layer.experts.beside_mlp


def _is_used_by_attention(name: str, attention: Attention) -> bool:
    if attention.cache_of is not None and name in ("key", "value", "key_norm"):
        return False
    if name in ("query_norm", "key_norm"):
        return attention.head_norm is not None
    if attention.latent is not None and name in ("latent_query", "query_a", "query_a_norm", "query_b"):
        return (attention.latent.query_rank is None) == (name == "latent_query")
    return name != "gate" or attention.gated


def _is_used_by_mixer(name: str, mixer: ShortConv | LinearAttention) -> bool:
    if isinstance(mixer, ShortConv) or name in _OF_ALL_MIXERS:
        return name in (*_OF_ALL_MIXERS, *_OF_SHORT_CONVS)
    match name:
        case "beta":
            return mixer.rule == "gated_delta"
        case "skip":
            return mixer.rule == "gated"
        case "out_norm":
            return mixer.norm != ""
    return name not in _OF_SHORT_CONVS


def _attention_of(role: str, decoder: Decoder) -> Attention:
    attention = decoder.layers[int(role.split(".")[1])].attention
    assert attention is not None
    return attention


def _readers(
    role: str, source: TensorSource, *, checkpoint: Checkpoint, decoder: Decoder
) -> Iterator[tuple[str, _Reader]]:
    """Yield each tensor of a role, with the function that reads it."""

    def reader(name: str) -> _Reader:
        def read(tensor: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
            if "{n}" not in name:
                return source.unpack(tensor(name), decoder)
            heads = (name.replace("{n}", str(n)) for n in count())
            parts = [tensor(head) for head in takewhile(checkpoint.tensor_names.__contains__, heads)]
            return source.unpack(np.stack(parts), decoder)

        return read

    match source.kind:
        case "ones":
            of_head = role.endswith(("query_norm", "key_norm"))
            size = _attention_of(role, decoder).head_dim if of_head else decoder.hidden_size
            yield f"{role}.weight", lambda _tensor: np.ones(size, np.float32)
        case "tensor":
            yield role, reader(source.names[0])
        case "stack" if f"{source.names[0]}.weight" in checkpoint.tensor_names:
            module = TensorSource(source.names[:1])
            yield from _readers(role, module, checkpoint=checkpoint, decoder=decoder)
        case "stack":
            name, bracket, entry = source.names[1].partition("[")
            yield f"{role}.weight", reader(f"{name}{bracket}{entry}")
            if f"{name}_bias" in checkpoint.tensor_names:
                yield f"{role}.bias", reader(f"{name}_bias{bracket}{entry}")
        case "module" | "difference":
            name = source.name_in(checkpoint.tensor_names)
            weight = reader(f"{name}.weight")
            is_difference = source.kind == "difference"
            yield f"{role}.weight", (
                (lambda tensor: weight(tensor) + np.float32(1)) if is_difference else weight
            )
            if f"{_first_head(name)}.bias" in checkpoint.tensor_names:
                yield f"{role}.bias", reader(f"{name}.bias")


def _taken(
    role: str, reader: _Reader, load: Callable[[str], _Matrix | None], *, decoder: Decoder
) -> tuple[_Matrix, NDArray[np.int64]] | None:
    """Return the matrix of the checkpoint that a role takes its rows from, and which rows it takes.

    A family takes some tensors apart, and changes the order of their rows. It gets the indices of the rows in
    place of the numbers, and what it returns tells which rows it took.

    Returns:
        None: the role is no matrix, or no matrix whose rows are rows of one matrix that `load` returns.
    """
    found: list[_Matrix] = []

    def indices(name: str) -> NDArray[np.int64]:
        matrix = load(name)
        if matrix is None:
            raise _NoMatrixError
        found.append(matrix)
        return np.arange(matrix.shape[0]).reshape(-1, 1)

    try:
        order = _ordered(role, reader(indices), decoder=decoder)
    except _NoMatrixError:
        return None
    is_column = order.ndim == 2 and order.shape[1] == 1 and np.issubdtype(order.dtype, np.integer)
    return (found[0], order[:, 0]) if is_column and len(found) == 1 else None


class _NoMatrixError(Exception):
    pass


def _first_head(name: str) -> str:
    return name.replace("{n}", "0")


def _scale(role: str, *, roles: Container[str], decoder: Decoder) -> np.float32 | None:
    """Return the factor of the decoder's scales by which a tensor is multiplied; None: there is none."""
    part, _, _ = role.rpartition(".")
    # The norm is scaled instead of the head's weight, which may be the embedding.
    if decoder.logits_scale != 1 and role in ("norm.weight", "norm.bias", "head.bias"):
        return np.float32(decoder.logits_scale)
    if part.startswith("layers.") and decoder.residual_scale != 1:
        block, _, last = part.rpartition(".")
        normed = f"{block}.post_norm.weight" in roles
        if last == "post_norm" or (last in ("output", "down") and not normed):
            return np.float32(decoder.residual_scale)
    if part.startswith("layers.") and (own := decoder.scales.get(".".join(role.split(".")[2:]))) is not None:
        return np.float32(own)
    return None


def _ordered(role: str, tensor: NDArray[Any], *, decoder: Decoder) -> NDArray[Any]:
    """Return a tensor in the order of rotary positions that the decoder has."""
    part, _, _ = role.rpartition(".")
    if ".attention." not in part:
        return tensor
    if part.endswith((".latent_query", ".query_b", ".latent")):
        attention = _attention_of(part, decoder)
        if attention.rotary is None or not attention.rotary.neighbours or attention.latent is None:
            return tensor
        rope = attention.latent.rope
        first, size = (0, rope) if part.endswith(".latent") else (len(tensor), attention.num_heads * rope)
        first = max(first - size, 0)
        heads = tensor[first : first + size].reshape(-1, rope, *tensor.shape[1:])
        turned = heads[:, _halves(attention.rotary, rope)].reshape(size, *tensor.shape[1:])
        return np.concatenate([tensor[:first], turned, tensor[first + size :]])
    if part.endswith((".query", ".key", ".query_norm", ".key_norm")):
        attention = _attention_of(part, decoder)
        if attention.rotary is not None and (attention.rotary.neighbours or attention.rotary.distance):
            # A norm may have a weight for each head.
            rest = () if part.endswith("_norm") else tensor.shape[1:]
            heads = tensor.reshape(-1, attention.head_dim, *rest)
            return heads[:, _halves(attention.rotary, attention.head_dim)].reshape(tensor.shape)
    return tensor


def _halves(rotary: Rotary, head_dim: int) -> NDArray[np.int64]:
    """Return the order of a head's numbers in which rotary pairs are numbers i and i + len(frequencies)."""
    count = len(rotary.frequencies)
    if rotary.neighbours:
        first, second = np.arange(0, 2 * count, 2), np.arange(1, 2 * count, 2)
    else:
        first = np.arange(count)
        second = first + (rotary.distance or count)
    rotated = np.concatenate([first, second])
    return np.concatenate([rotated, np.setdiff1d(np.arange(head_dim), rotated)])


def packed(name: str, unpacking: Callable[[_Projection], Unpack]) -> TensorMap:
    """Return the roles of queries, keys and values that are one tensor in the checkpoint."""
    return {
        f"layers.{{}}.attention.{projection}": TensorSource((name,), unpack=unpacking(projection))
        for projection in _PROJECTIONS
    }


def stacked(projection: _Projection) -> Unpack:
    """Unpack queries, keys or values from a tensor that has all queries, then all keys, then all values."""

    def unpack(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        head_dim = decoder.attentions[0].head_dim
        queries, keys = (count * head_dim for count in _num_heads(decoder))
        start = {"query": 0, "key": queries, "value": queries + keys}[projection]
        return tensor[start : start + (queries if projection == "query" else keys)]

    return unpack


def grouped(projection: _Projection) -> Unpack:
    """Unpack queries, keys or values that alternate by heads of keys, each behind its heads of queries."""

    def unpack(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        num_heads, num_kv_heads = _num_heads(decoder)
        num_queries, rest = num_heads // num_kv_heads, tensor.shape[1:]
        heads = tensor.reshape(num_kv_heads, num_queries + 2, decoder.attentions[0].head_dim, *rest)
        parts = {
            "query": slice(num_queries), "key": slice(num_queries, -1), "value": slice(num_queries + 1, None)
        }
        return heads[:, parts[projection]].reshape(-1, *rest)

    return unpack


def _num_heads(decoder: Decoder) -> tuple[int, int]:
    attention = decoder.attentions[0]
    return attention.num_heads, attention.num_kv_heads


def transposed(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Unpack GPT-2's Conv1D, whose weight is [inputs, outputs]."""
    return tensor.T


def transposed_stack(projection: _Projection) -> Unpack:
    """Unpack the same stack as `stacked`, from GPT-2's Conv1D."""
    unpack = stacked(projection)
    return lambda tensor, decoder: unpack(tensor.T, decoder)


def half(index: Literal[0, 1]) -> Unpack:
    """Unpack the first (0) or the second (1) of two stacked layers of equal size."""
    return lambda tensor, _decoder: tensor.reshape(2, -1, *tensor.shape[1:])[index]


def latent_queries(tensor: FloatArray, decoder: Decoder) -> FloatArray:
    """Unpack the queries of a `Latent`, of which each head has those without rotary positions first."""
    latent, heads = _latent_heads(tensor, decoder)
    parts = heads[:, : latent.nope], heads[:, latent.nope :]
    return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def latents(tensor: FloatArray, decoder: Decoder) -> FloatArray:
    """Unpack the vectors of a `Latent`, behind which the checkpoint has the keys with rotary positions."""
    rank = _latent_of(decoder).rank
    return np.concatenate([tensor[rank:], tensor[:rank]])


def latent_keys(tensor: FloatArray, decoder: Decoder) -> FloatArray:
    """Unpack the transposed weight of the keys of a `Latent`, behind which a head has that of its values."""
    latent, heads = _latent_heads(tensor, decoder)
    return heads[:, : latent.nope].swapaxes(1, 2).reshape(-1, latent.nope)


def latent_values(tensor: FloatArray, decoder: Decoder) -> FloatArray:
    """Unpack the weight of the values of a `Latent`."""
    latent, heads = _latent_heads(tensor, decoder)
    return heads[:, latent.nope :].reshape(-1, *tensor.shape[1:])


def _latent_of(decoder: Decoder) -> Latent:
    latent = decoder.attentions[0].latent
    assert latent is not None
    return latent


def _latent_heads(tensor: FloatArray, decoder: Decoder) -> tuple[Latent, FloatArray]:
    heads = tensor.reshape(decoder.attentions[0].num_heads, -1, *tensor.shape[1:])
    return _latent_of(decoder), heads


def softplus(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Restore a positive parameter from what was trained."""
    return np.logaddexp(tensor, np.float32(0))


def skip_rows(count: int) -> Unpack:
    """Leave out the first rows."""
    return lambda tensor, _decoder: tensor[count:]
