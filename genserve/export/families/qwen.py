"""Qwen: Llama's layers, with biases (Qwen2) or with norms of each query and key head (Qwen3)."""

from __future__ import annotations

from types import MappingProxyType

from genserve.export.families.llama import LLAMA_NAMES, describe_llama
from genserve.export.family import Family
from genserve.export.weights import Names

__all__ = ["QWEN2", "QWEN3"]

_QWEN3_NAMES: Names = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    }
)

QWEN2 = Family(name="qwen2", describe=describe_llama, names=LLAMA_NAMES, prefix="model.")
QWEN3 = Family(name="qwen3", describe=describe_llama, names=_QWEN3_NAMES, prefix="model.")
