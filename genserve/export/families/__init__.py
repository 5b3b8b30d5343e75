"""Families: the model family of each architecture in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from genserve.export.families.gpt import BLOOM, GPT2, GPT_NEOX, OPT
from genserve.export.families.llama import GEMMA, GEMMA2, GEMMA3, LLAMA, PHI3, QWEN2, QWEN3
from genserve.export.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BloomForCausalLM": BLOOM,
        "GPT2LMHeadModel": GPT2,
        "GPTNeoXForCausalLM": GPT_NEOX,
        "Gemma2ForCausalLM": GEMMA2,
        "Gemma3ForCausalLM": GEMMA3,
        "GemmaForCausalLM": GEMMA,
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": LLAMA,
        "OPTForCausalLM": OPT,
        "Phi3ForCausalLM": PHI3,
        "Qwen2ForCausalLM": QWEN2,
        "Qwen3ForCausalLM": QWEN3,
        "SmolLM3ForCausalLM": LLAMA,
    }
)


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture that config.json names, or else the usual one of its model type."""
    match config.get("architectures"):
        case [str(named), *_]:
            return named
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    usual: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), "unnamed")
    return usual


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a config's architecture, or None."""
    return FAMILIES.get(architecture(config))
