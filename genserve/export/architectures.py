"""Architectures: which model family builds the graph of which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from genserve.export.families.llama import LLAMA
from genserve.export.family import Family

__all__ = ["FAMILIES", "architecture", "family_of"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": LLAMA,
        "SmolLM3ForCausalLM": LLAMA,
    }
)


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture that config.json names."""
    name: str = (config.get("architectures") or ["unnamed"])[0]
    return name


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of that architecture; None: no family builds it."""
    return FAMILIES.get(architecture(config))
