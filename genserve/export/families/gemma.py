"""Gemma: Llama's layers with scaled embeddings, and norms stored as their difference from 1.

Gemma 2 also has norms after attention and MLP, and soft caps of its scores. Gemma 3 has norms of each query
and key head instead of the soft caps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Decoder
from genserve.export.decoder_weights import PackedTensor, TensorMap, add_one
from genserve.export.families.llama import LLAMA_NAMES, describe_llama
from genserve.export.family import Family, require


def _norm(name: str) -> PackedTensor:
    return PackedTensor(name=name, unpack=add_one)


_GEMMA_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.norm": _norm("model.layers.{}.input_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.post_attention_layernorm"),
        "norm": _norm("model.norm"),
    }
)
_GEMMA2_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA_NAMES,
        "layers.{}.attention.post_norm": _norm("model.layers.{}.post_attention_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.pre_feedforward_layernorm"),
        "layers.{}.mlp.post_norm": _norm("model.layers.{}.post_feedforward_layernorm"),
    }
)
_GEMMA3_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA2_NAMES,
        "layers.{}.attention.query_norm": _norm("model.layers.{}.self_attn.q_norm"),
        "layers.{}.attention.key_norm": _norm("model.layers.{}.self_attn.k_norm"),
    }
)


def _describe(config: Any) -> Decoder:
    bidirectional = bool(getattr(config, "use_bidirectional_attention", False))
    require(not bidirectional, found="use_bidirectional_attention", known="attention to earlier tokens")
    return replace(describe_llama(config), embedding_scale=math.sqrt(config.hidden_size))


def _describe_later(config: Any) -> Decoder:
    return replace(
        _describe(config),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logits_softcap=config.final_logit_softcapping,
    )


GEMMA = Family(name="gemma", describe=_describe, names=_GEMMA_NAMES, prefix="model.")
GEMMA2 = Family(name="gemma2", describe=_describe_later, names=_GEMMA2_NAMES, prefix="model.")
GEMMA3 = Family(name="gemma3", describe=_describe_later, names=_GEMMA3_NAMES, prefix="model.")
