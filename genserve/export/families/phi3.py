"""Phi-3: Llama's layers, with queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from genserve.export.families.llama import LLAMA_NAMES, describe_llama
from genserve.export.family import Family
from genserve.export.packing import half, packed, stacked
from genserve.export.weights import Names, Part

__all__ = ["PHI3"]

_NAMES: Names = MappingProxyType(
    {
        **LLAMA_NAMES,
        **packed("model.layers.{}.self_attn.qkv_proj", stacked),
        "layers.{}.mlp.gate": Part(name="model.layers.{}.mlp.gate_up_proj", take=half(0)),
        "layers.{}.mlp.up": Part(name="model.layers.{}.mlp.gate_up_proj", take=half(1)),
    }
)

PHI3 = Family(name="phi3", describe=partial(describe_llama, partial=True), names=_NAMES, prefix="model.")
