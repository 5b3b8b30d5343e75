"""Attention graph: writes attention over the paged KV cache, and what comes between it and its projections.

Attention is MHA, GQA or MQA, by the number of kv_heads, or latent attention in the absorbed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import AttributeProto, FunctionProto, TensorProto, helper

from genserve.export.decoder import (
    Attention,
    Decoder,
    HeadNorm,
    Latent,
    QueryScale,
    Rotary,
    alibi_slopes,
)
from genserve.export.graphs.layers import SEQUENCE_INPUTS, Linear, Norm
from genserve.export.graphs.onnx_graph import Dims
from genserve.export.graphs.role_writer import RoleWriter

_ATTENTION_INPUTS = (
    "query", "key_cache", "value_cache", *SEQUENCE_INPUTS,
    "cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "alibi_slopes", "key_scales", "value_scales",
    "attention_metadata", "sinks",
)
_ATTENTION_OUTPUTS = ("output", "key_cache_out", "value_cache_out")
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT, "kv_num_heads": AttributeProto.INT, "scale": AttributeProto.FLOAT,
    "softcap": AttributeProto.FLOAT, "local_window_size": AttributeProto.INT,
    "do_rotary": AttributeProto.INT, "qk_norm_epsilon": AttributeProto.FLOAT,
}
# The inputs of com.microsoft.PagedAttention in order. "" stands for inputs without a counterpart in our
# operator: separate keys and values, a slot mapping, sinks, and the scales of an int8 cache.
_BODY_INPUTS = (
    "query", "", "", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "", "", "q_norm_weight", "k_norm_weight", "", "", "attention_metadata",
)


@dataclass(frozen=True, slots=True)
class AttentionWriter:
    """Adds the attention of layers; methods return the names of the values that they add.

    Attributes:
        roles: writes what belongs to roles.
        kv_cache: the type of keys and values in the KV cache.
    """

    roles: RoleWriter
    kv_cache: type[np.generic]

    def shared(self) -> None:
        """Add the tables that layers share, and the function for CUDA if attention is one there."""
        roles, decoder, attentions = self.roles, self.roles.decoder, self.roles.attentions
        for rotary in self._rotaries():
            for name, table in zip(self._tables(rotary), rotary.tables(decoder.context_length), strict=True):
                roles.graph.weight(name, table)
        if attentions and attentions[0].alibi:
            roles.graph.weight("alibi.slopes", alibi_slopes(attentions[0].num_heads))
        for scale in self._query_scales():
            roles.layers.vector(self._query_scale(scale), scale.table(decoder.context_length)[:, None])
        if {self.kv_cache, roles.layers.scheme.activations} == {np.float16} and has_function(decoder):
            qk_norm = _is_kernel_norm(attentions[0])
            roles.graph.function(paged_attention_function(rotary=bool(self._rotaries()), qk_norm=qk_norm))

    def _rotaries(self) -> list[Rotary]:
        """The rotary positions of the graph's layers."""
        used = {attention.rotary for attention in self.roles.attentions}
        return [rotary for rotary in self.roles.decoder.rotaries if rotary in used]

    def _tables(self, rotary: Rotary) -> list[str]:
        """The names of the tables of cosines and sines."""
        index = self.roles.decoder.rotaries.index(rotary)
        return [f"rotary.{index}.cos", f"rotary.{index}.sin"]

    def _query_scales(self) -> list[QueryScale]:
        scales = dict.fromkeys(attention.query_scale for attention in self.roles.attentions)
        return [scale for scale in scales if scale is not None]

    def _query_scale(self, scale: QueryScale) -> str:
        """The name of the table of a scale by positions."""
        return f"query_scale.{self._query_scales().index(scale)}"

    def heads(self, x: str, index: int) -> str:
        """Attention, which appends to the KV cache: [num_tokens, heads * head_dim]."""
        described, part, gate = self.roles.attention_of(index), f"layers.{index}.attention", ""
        if described.latent is None:
            packed = self.roles.layers.linear(self.qkv(x, index))
            if described.gated:
                gate = f"{part}.gate"
                num_heads, num_kv_heads = described.num_heads, described.num_kv_heads
                sizes = [num_heads * described.head_dim, (num_heads + 2 * num_kv_heads) * described.head_dim]
                self.roles.split(packed, [gate, f"{part}.ungated"], sizes)
                packed = f"{part}.ungated"
            packed = self._prepared(packed, index)
        else:
            packed = self._latent_qkv(x, index)
        past, present = self.cache(index)
        output = self.roles.graph.value(f"{part}.heads", self.roles.layers.scheme.activations)
        inputs = [
            packed,
            *past[:2],
            *(self.roles.of_rows(name, index) for name in SEQUENCE_INPUTS),
            *self.constants(index),
            *(past[2:] or ["", ""]),
            "attention_metadata",
            self.roles.fp32(f"layers.{index}.attention.sinks"),
        ]
        if described.value_norm and described.cache_of is None:
            ones = np.ones(described.head_dim, np.float32)
            inputs.append(self.roles.graph.weight(f"{part}.value_norm", ones))
        attributes = self.attributes(index)
        heads = self.roles.graph.node("PagedAttention", inputs, output, *present, **attributes)
        if not gate:
            return heads
        return self.roles.layers.activated(gate, "sigmoid", factor=heads)

    def latent_values(self, heads: str, index: int) -> str:
        """The values of all heads, after attention: [rows, heads * value]."""
        attention, node = self.roles.attention_of(index), self.roles.graph.node
        latent, constant = attention.latent, self.roles.graph.constant
        assert latent is not None
        shape = constant(f"{heads}.shape", np.array([0, attention.num_heads, attention.head_dim]))
        by_head = node("Reshape", [heads, shape], f"{heads}.by_head")
        vectors = f"{heads}.vectors"
        self.roles.split(by_head, [f"{heads}.rope", vectors], [latent.rope, latent.rank])
        flat = node("Reshape", [vectors, constant(f"{heads}.flat", np.array([0, -1]))], f"{vectors}.flat")
        return self._by_head(flat, index, "latent_value")

    def qkv(self, x: str, index: int) -> Linear:
        """Gates if there are any, queries, keys and values, concatenated."""
        # Queries have the format of gates in a quantized checkpoint, so that both are one segment.
        part, gate = f"layers.{index}.attention", ["gate"] if self.roles.attention_of(index).gated else []
        own = ["key", "value"] if self.roles.attention_of(index).cache_of is None else []
        return self.roles.linear(x, part, *gate, "query", *own, output="qkv", **self.roles.pre_norm(part))

    def cache(self, index: int) -> tuple[list[str], list[str]]:
        """Declare the buffers of a layer's cache: the names of its inputs and outputs."""
        attention = self.roles.attention_of(index)
        if attention.cache_of is not None:
            # An earlier layer has written these; the order of the nodes follows from their names.
            return [f"present.{attention.cache_of}.{part}" for part in self._parts_of_cache()], []
        scales: Dims = ("num_blocks", "block_size", attention.num_kv_heads)
        values: Dims = (*scales, attention.head_dim)
        buffers: dict[str, tuple[type[np.generic], Dims]] = {
            part: (np.float32, scales) if part.endswith("_scale") else (self.kv_cache, values)
            for part in self._parts_of_cache()
        }
        graph = self.roles.graph
        past = [graph.input(f"past_key_values.{index}.{part}", *buffer) for part, buffer in buffers.items()]
        present = [f"present.{index}.{part}" for part in buffers]
        for name, buffer in zip(present, buffers.values(), strict=True):
            graph.output(name, *buffer)
        return past, present

    def attributes(self, index: int) -> dict[str, float]:
        """The attributes of a layer's attention."""
        attention = self.roles.attention_of(index)
        # Only graphs without the function for CUDA have these.
        own = {} if attention.chunk is None else {"local_chunk_size": attention.chunk}
        own |= {} if attention.cache_of is None else {"shares_cache": 1}
        return {
            **own,
            "num_heads": attention.num_heads,
            "kv_num_heads": attention.num_kv_heads,
            "scale": attention.scale,
            "do_rotary": int(attention.rotary is not None and not _rotates_first(attention)),
            "softcap": attention.softcap or 0.0,
            "local_window_size": attention.window or -1,
            "qk_norm_epsilon": self.roles.decoder.norm_epsilon,
        }

    def constants(self, index: int) -> list[str]:
        """Tables of cosines and sines, norms of queries and keys, ALiBi's slopes; "" for absent ones."""
        # A layer without rotary positions gets the tables of another layer, which the function's body needs.
        attention = self.roles.attention_of(index)
        norms = ["query_norm.weight", "key_norm.weight"] if _is_kernel_norm(attention) else []
        rotary = attention.rotary or next(iter(self._rotaries()), None)
        return [
            *(["", ""] if rotary is None else self._tables(rotary)),
            *([self.roles.fp32(f"layers.{index}.attention.{norm}") for norm in norms] or ["", ""]),
            "alibi.slopes" if attention.alibi else "",
        ]

    def _parts_of_cache(self) -> list[str]:
        return ["key", "value", *(["key_scale", "value_scale"] if self.kv_cache is np.int8 else [])]

    def _latent_qkv(self, x: str, index: int) -> str:
        """Queries of all heads, and the one head of keys, twice, since its vectors are the values too."""
        attention, part = self.roles.attention_of(index), f"layers.{index}.attention"
        latent, heads, node = attention.latent, attention.num_heads, self.roles.graph.node
        assert latent is not None
        first = "latent_query" if latent.query_rank is None else "query_a"
        read = self.roles.layers.linear(
            self.roles.linear(x, part, first, "latent", output="latents", **self.roles.pre_norm(part))
        )
        rope, plain = heads * latent.rope, heads * latent.nope
        queries = [plain, rope] if latent.query_rank is None else [latent.query_rank]
        names = [f"{part}.{name}" for name in ("plain", "turned", "key_rope", "vectors")]
        if latent.query_rank is not None:
            names[:2] = [f"{part}.query_rows"]
        self.roles.split(read, names, [*queries, latent.rope, latent.rank])
        if latent.query_rank is not None:
            norm = self._latent_norm(f"{part}.query_a_norm", latent)
            linear = self.roles.linear(names[0], part, "query_b", output="query_b", kind="inner", norm=norm)
            names[:1] = [f"{part}.plain", f"{part}.turned"]
            self.roles.split(self.roles.layers.linear(linear), names[:2], [plain, rope])
        met = self._by_head(names[0], index, "latent_key")
        vectors = self.roles.layers.norm(names[3], self._latent_norm(f"{part}.latent_norm", latent))
        parts = []
        for name, value, size in (("turned", names[1], latent.rope), ("met", met, latent.rank)):
            shape = self.roles.graph.constant(f"{part}.{name}.shape", np.array([0, heads, size]))
            parts.append(node("Reshape", [value, shape], f"{part}.{name}.heads"))
        query = node("Concat", parts, f"{part}.query", axis=-1)
        flat = self.roles.graph.constant(f"{part}.flat", np.array([0, -1]))
        key = node("Concat", [names[2], vectors], f"{part}.key", axis=-1)
        rows = [node("Reshape", [query, flat], f"{part}.query.flat"), key, key]
        return node("Concat", rows, f"{part}.packed", axis=-1)

    def _by_head(self, x: str, index: int, role: str) -> str:
        """The product of each head's columns and its rows of a weight."""
        num_heads = self.roles.attention_of(index).num_heads
        return self.roles.in_groups(x, f"layers.{index}.attention.{role}", num_heads)

    def _latent_norm(self, name: str, latent: Latent) -> Norm:
        return Norm(
            name=name,
            kind="rms",
            epsilon=latent.norm_epsilon,
            weight=self.roles.weights.load(f"{name}.weight"),
            bias=None,
        )

    def _prepared(self, packed: str, index: int) -> str:
        """Queries, keys and values after what our attention cannot do: [num_tokens, all heads * head_dim]."""
        attention, part = self.roles.attention_of(index), f"layers.{index}.attention"
        if not is_prepared(attention):
            return packed
        heads = {"query": attention.num_heads}
        if attention.cache_of is None:
            heads |= {"key": attention.num_kv_heads, "value": attention.num_kv_heads}
        graph, sizes = self.roles.graph, np.array([count * attention.head_dim for count in heads.values()])
        parts = [f"{part}.{name}" for name in heads]
        graph.node("Split", [packed, graph.constant(f"{part}.sizes", sizes)], *parts, axis=-1)
        for position, name in enumerate(("query", "key")[: len(parts)]):
            if _rotates_first(attention):
                parts[position] = self._rotated(parts[position], index, num_heads=heads[name])
            if attention.head_norm is not None and not _is_kernel_norm(attention):
                num_groups = 1 if attention.head_norm.joint else heads[name]
                norm = self.roles.norm(f"{part}.{name}_norm", num_groups=num_groups)
                norm = replace(norm, kind=attention.head_norm.kind)
                parts[position] = self.roles.layers.norm(parts[position], norm)
        if attention.query_scale is not None:
            table = self._query_scale(attention.query_scale)
            positions = self.roles.of_rows("position_ids", index)
            factors = graph.node("Gather", [table, positions], f"{part}.factors")
            parts[0] = graph.node("Mul", [parts[0], factors], f"{part}.scaled")
        prepared = graph.node("Concat", parts, f"{part}.prepared", axis=-1)
        if attention.clip is None:
            return prepared
        least = self.roles.number(f"{part}.least", -attention.clip)
        most = self.roles.number(f"{part}.most", attention.clip)
        return graph.node("Clip", [prepared, least, most], f"{part}.clipped")

    def _rotated(self, x: str, index: int, *, num_heads: int) -> str:
        """Queries or keys [num_tokens, heads * head_dim] with rotary positions."""
        attention, positions = self.roles.attention_of(index), self.roles.of_rows("position_ids", index)
        assert attention.rotary is not None
        node, constant = self.roles.graph.node, self.roles.graph.constant
        half = len(attention.rotary.frequencies)
        # RotaryEmbedding would do, but its bits depend on the other tokens of the batch.
        cosines, sines = (self._angles(table, positions, x) for table in self._tables(attention.rotary))
        shape = constant(f"{x}.shape", np.array([0, num_heads, attention.head_dim]))
        sizes = [half, half, attention.head_dim - 2 * half]
        parts = [f"{x}.first", f"{x}.second", f"{x}.rest"][: 3 if sizes[2] else 2]
        heads = node("Reshape", [x, shape], f"{x}.by_head")
        node("Split", [heads, constant(f"{x}.sizes", np.array(sizes[: len(parts)]))], *parts, axis=-1)
        first, second, *rest = parts
        turned = [
            node(
                op,
                [node("Mul", [near, cosines], f"{near}.cos"), node("Mul", [far, sines], f"{near}.sin")],
                f"{near}.turned",
            )
            for op, near, far in (("Sub", first, second), ("Add", second, first))
        ]
        rotated = node("Concat", [*turned, *rest], f"{x}.rotated", axis=-1)
        return node("Reshape", [rotated, constant(f"{x}.flat", np.array([0, -1]))], f"{x}.turned")

    def _angles(self, table: str, positions: str, x: str) -> str:
        """The rows of a table of cosines or sines for all tokens: [num_tokens, 1, n]."""
        rows = self.roles.graph.node("Gather", [table, positions], f"{x}.{table}.tokens")
        axis = self.roles.graph.constant(f"{x}.{table}.axis", np.array([1]))
        rows = self.roles.graph.node("Unsqueeze", [rows, axis], f"{x}.{table}.rows")
        if self.roles.layers.scheme.activations is np.float32:
            return rows
        return self.roles.graph.node("Cast", [rows], f"{x}.{table}.cast", to=TensorProto.FLOAT16)


def has_function(decoder: Decoder) -> bool:
    """Whether com.microsoft.PagedAttention supports the attention of a decoder, with float16 activations.

    Source: onnxruntime/contrib_ops/cpu/bert/paged_attention_helper.h and rotary_helper.h.
    """
    rotary_dims = [2 * len(rotary.frequencies) for rotary in decoder.rotaries]
    sizes = all(each.head_dim % 8 == 0 for each in decoder.attentions)
    sizes = sizes and all(dims % 16 == 0 for dims in rotary_dims)
    return sizes and not any(attention.alibi for attention in decoder.attentions)


def _is_kernel_norm(attention: Attention) -> bool:
    """Whether our attention norms queries and keys; then nothing can follow before the rotary positions."""
    return attention.head_norm == HeadNorm() and attention.clip is None


def _rotates_first(attention: Attention) -> bool:
    """Whether queries and keys are rotated before our attention, because their norm follows."""
    is_after = attention.head_norm is not None and attention.head_norm.after_rotary
    return is_after and attention.rotary is not None


def is_prepared(attention: Attention) -> bool:
    """Whether other operators change queries, keys or values before our attention."""
    has_norm = attention.head_norm is not None and not _is_kernel_norm(attention)
    return has_norm or attention.clip is not None or attention.query_scale is not None


def reads_positions(attention: Attention) -> bool:
    """Whether these operators read the positions of tokens."""
    return _rotates_first(attention) or attention.query_scale is not None


def paged_attention_function(*, rotary: bool, qk_norm: bool) -> FunctionProto:
    """Return an ONNX function for `genserve.PagedAttention` whose body is com.microsoft.PagedAttention.

    ONNX Runtime has com.microsoft.PagedAttention for CUDA. Sessions with genserve's library use our kernel,
    all other sessions the body.

    Args:
        rotary: whether callers pass tables of cosines and sines.
        qk_norm: whether callers pass norms of queries and keys.
    """
    # Our operator reads tables and norms in float32, and com.microsoft.PagedAttention in the type of the
    # query.
    vectors = ["cos_cache", "sin_cache"] if rotary else []
    vectors += ["q_norm_weight", "k_norm_weight"] if qk_norm else []
    casts = [helper.make_node("Cast", [name], [f"{name}_fp16"], to=TensorProto.FLOAT16) for name in vectors]
    inputs = [f"{name}_fp16" if name in vectors else name for name in _BODY_INPUTS]
    body = helper.make_node("PagedAttention", inputs, _ATTENTION_OUTPUTS, domain="com.microsoft")
    body.attribute.extend(
        AttributeProto(name=name, type=kind, ref_attr_name=name) for name, kind in _ATTRIBUTES.items()
    )
    return helper.make_function(
        "genserve",
        "PagedAttention",
        _ATTENTION_INPUTS,
        _ATTENTION_OUTPUTS,
        [*casts, body],
        [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        attributes=list(_ATTRIBUTES),
    )
