"""The Gemma families, whose norms store the difference from 1."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Decoder, HeadNorm
from genserve.export.decoder_weights import TensorMap, TensorSource
from genserve.export.families.family import Family, require
from genserve.export.families.llama import LLAMA_NAMES, describe_llama, with_attention


def _norm(name: str) -> TensorSource:
    """Return a norm of Gemma, which stores the difference from 1."""
    return TensorSource((name,), kind="difference")


_GEMMA_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.norm": _norm("model.layers.{}.input_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.post_attention_layernorm"),
        "norm": _norm("model.norm"),
    }
)
# Gemma 2 also has norms after attention and MLP, and soft caps of scores.
_GEMMA2_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA_NAMES,
        "layers.{}.attention.post_norm": _norm("model.layers.{}.post_attention_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.pre_feedforward_layernorm"),
        "layers.{}.mlp.post_norm": _norm("model.layers.{}.post_feedforward_layernorm"),
    }
)
# Gemma 3 has norms of each query and key head instead of the soft caps.
_GEMMA3_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA2_NAMES,
        "layers.{}.attention.query_norm": _norm("model.layers.{}.self_attn.q_norm"),
        "layers.{}.attention.key_norm": _norm("model.layers.{}.self_attn.k_norm"),
    }
)


def _describe_gemma(config: Any) -> Decoder:
    bidirectional = bool(getattr(config, "use_bidirectional_attention", False))
    require(not bidirectional, found="use_bidirectional_attention", known="attention to earlier tokens")
    return replace(describe_llama(config), embedding_scale=math.sqrt(config.hidden_size))


def _describe_gemma2(config: Any) -> Decoder:
    scale, softcap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
    decoder = with_attention(_describe_gemma(config), scale=scale, softcap=softcap)
    return replace(decoder, logits_softcap=config.final_logit_softcapping)


def _describe_gemma3(config: Any) -> Decoder:
    return with_attention(_describe_gemma2(config), head_norm=HeadNorm())


GEMMA = Family(name="gemma", describe=_describe_gemma, names=_GEMMA_NAMES, prefix="model.")
GEMMA2 = Family(name="gemma2", describe=_describe_gemma2, names=_GEMMA2_NAMES, prefix="model.")
GEMMA3 = Family(name="gemma3", describe=_describe_gemma3, names=_GEMMA3_NAMES, prefix="model.")
