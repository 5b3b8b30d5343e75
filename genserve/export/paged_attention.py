"""Paged attention: `genserve.PagedAttention` in the words of ONNX Runtime, for those who lack our kernel."""

from __future__ import annotations

from onnx import AttributeProto, FunctionProto, helper

__all__ = ["paged_attention_function"]

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
# Those of com.microsoft.PagedAttention, in its order; "" is what we have not: key and value apart from the
# query, a mapping of slots, sinks, scales of a cache in int8.
_CALLED_WITH = (
    "query", "", "", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "", "", "q_norm_weight", "k_norm_weight", "", "", "attention_metadata",
)


def paged_attention_function() -> FunctionProto:
    """Return a function of the model whose body is com.microsoft.PagedAttention.

    ONNX Runtime has that operator for CUDA, in float16, and without ALiBi. A session with our library
    registered takes our kernel, any other the body.
    """
    body = helper.make_node("PagedAttention", _CALLED_WITH, _OUTPUTS, domain="com.microsoft")
    body.attribute.extend(
        AttributeProto(name=name, type=kind, ref_attr_name=name) for name, kind in _ATTRIBUTES.items()
    )
    opsets = [helper.make_opsetid("com.microsoft", 1)]
    return helper.make_function(
        "genserve", "PagedAttention", _INPUTS, _OUTPUTS, [body], opsets, attributes=list(_ATTRIBUTES)
    )
