"""Architectures: which model family builds the graph of which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from genserve.errors import ExportError
from genserve.export.family import Family
from genserve.export.llama import LLAMA

__all__ = ["family_of"]

_FAMILIES: Mapping[str, Family] = MappingProxyType({"LlamaForCausalLM": LLAMA})


def family_of(config: Mapping[str, Any], *, source: str) -> Family:
    """The family of the architecture that config.json names.

    Raises:
        ExportError: no family builds this architecture.
    """
    names = config.get("architectures") or ["unnamed"]
    if names[0] not in _FAMILIES:
        raise ExportError(
            f"{source} is of the architecture {names[0]}, which cannot be exported",
            remedy=f"known architectures: {', '.join(sorted(_FAMILIES))}",
        )
    return _FAMILIES[names[0]]
