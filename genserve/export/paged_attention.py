"""Paged attention: `genserve.PagedAttention` in the words of ONNX Runtime, for those who lack our kernel."""

from __future__ import annotations

from onnx import AttributeProto, FunctionProto, TensorProto, helper

from genserve.export.decoder import Decoder

__all__ = ["has_function", "paged_attention_function"]

_INPUTS = (
    "query",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "q_norm_weight",
    "k_norm_weight",
    "alibi_slopes",
    "key_scales",
    "value_scales",
    "attention_metadata",
)
_OUTPUTS = ("output", "key_cache_out", "value_cache_out")
_ATTRIBUTES = {
    "num_heads": AttributeProto.INT,
    "kv_num_heads": AttributeProto.INT,
    "scale": AttributeProto.FLOAT,
    "softcap": AttributeProto.FLOAT,
    "local_window_size": AttributeProto.INT,
    "do_rotary": AttributeProto.INT,
    "qk_norm_epsilon": AttributeProto.FLOAT,
}
# Of com.microsoft.PagedAttention, in its order; "" is what we have not: key and value apart from the query, a
# mapping of slots, sinks, scales of a cache in int8.
_CALLED_WITH = (
    "query", "", "", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "", "", "q_norm_weight", "k_norm_weight", "", "", "attention_metadata",
)


def has_function(decoder: Decoder) -> bool:
    """Whether com.microsoft.PagedAttention computes the attention of a decoder, on activations in float16.

    Source: onnxruntime/contrib_ops/cpu/bert/paged_attention_helper.h and rotary_helper.h.
    """
    turning = [2 * len(attention.rotary.frequencies) for attention in decoder.attentions if attention.rotary]
    return not decoder.alibi and decoder.head_dim % 8 == 0 and all(numbers % 16 == 0 for numbers in turning)


def paged_attention_function(*, rotary: bool, qk_norm: bool) -> FunctionProto:
    """Return a function of the model whose body is com.microsoft.PagedAttention.

    ONNX Runtime has that operator for CUDA. A session with our library registered takes our kernel, any other
    the body.

    Args:
        rotary: whether the function is called with tables of angles.
        qk_norm: whether it is called with norms of queries and keys.
    """
    # Ours takes tables and norms in float32, the other one in the type of the query.
    vectors = ["cos_cache", "sin_cache"] if rotary else []
    vectors += ["q_norm_weight", "k_norm_weight"] if qk_norm else []
    casts = [helper.make_node("Cast", [name], [f"{name}_fp16"], to=TensorProto.FLOAT16) for name in vectors]
    called_with = [f"{name}_fp16" if name in vectors else name for name in _CALLED_WITH]
    body = helper.make_node("PagedAttention", called_with, _OUTPUTS, domain="com.microsoft")
    body.attribute.extend(
        AttributeProto(name=name, type=kind, ref_attr_name=name) for name, kind in _ATTRIBUTES.items()
    )
    return helper.make_function(
        "genserve",
        "PagedAttention",
        _INPUTS,
        _OUTPUTS,
        [*casts, body],
        [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        attributes=list(_ATTRIBUTES),
    )
