"""Families: the architectures that are built, each with the family that describes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from genserve.export.families import experts, gemma, gpt, hybrid, llama
from genserve.export.families.family import Family

__all__ = ["FAMILIES", "architecture", "family_of"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ApertusForCausalLM": llama.APERTUS,
        "ArceeForCausalLM": llama.ARCEE,
        "BloomForCausalLM": gpt.BLOOM,
        "Cohere2ForCausalLM": llama.COHERE2,
        "CohereForCausalLM": llama.COHERE,
        "DeepseekV2ForCausalLM": experts.DEEPSEEK_V2,
        "DeepseekV3ForCausalLM": experts.DEEPSEEK_V3,
        "Ernie4_5ForCausalLM": llama.HELIUM,
        "Ernie4_5_MoeForCausalLM": experts.ERNIE4_5_MOE,
        "Exaone4ForCausalLM": llama.EXAONE4,
        "FalconH1ForCausalLM": hybrid.FALCON_H1,
        "FalconForCausalLM": gpt.FALCON,
        "GPT2LMHeadModel": gpt.GPT2,
        "GPTNeoXForCausalLM": gpt.GPT_NEOX,
        "Gemma2ForCausalLM": gemma.GEMMA2,
        "Gemma3ForCausalLM": gemma.GEMMA3,
        "Gemma3nForCausalLM": gemma.GEMMA3N,
        "Gemma4ForCausalLM": gemma.GEMMA4,
        "Gemma4UnifiedForCausalLM": gemma.GEMMA4,
        "GemmaForCausalLM": gemma.GEMMA,
        "Glm4ForCausalLM": llama.GLM4,
        "Glm4MoeForCausalLM": experts.GLM4_MOE,
        "Glm4MoeLiteForCausalLM": experts.DEEPSEEK_V3,
        "GlmForCausalLM": llama.GLM,
        "GptOssForCausalLM": experts.GPT_OSS,
        "GraniteForCausalLM": llama.GRANITE,
        "GraniteMoeForCausalLM": experts.GRANITE_MOE,
        "GraniteMoeHybridForCausalLM": hybrid.GRANITE4,
        "GraniteMoeSharedForCausalLM": experts.GRANITE_MOE,
        "HeliumForCausalLM": llama.HELIUM,
        "HunYuanDenseV1ForCausalLM": llama.HUNYUAN,
        "Lfm2ForCausalLM": hybrid.LFM2,
        "Lfm2MoeForCausalLM": hybrid.LFM2_MOE,
        "Llama4ForCausalLM": experts.LLAMA4,
        "LlamaForCausalLM": llama.LLAMA,
        "MiniMaxM2ForCausalLM": experts.MINIMAX_M2,
        "Ministral3ForCausalLM": llama.MINISTRAL3,
        "MinistralForCausalLM": llama.LLAMA,
        "MistralForCausalLM": llama.LLAMA,
        "MixtralForCausalLM": experts.MIXTRAL,
        "NemotronForCausalLM": llama.NEMOTRON,
        "NemotronHForCausalLM": hybrid.NEMOTRON_H,
        "OPTForCausalLM": gpt.OPT,
        "Olmo2ForCausalLM": llama.OLMO2,
        "Olmo3ForCausalLM": llama.OLMO2,
        "OlmoHybridForCausalLM": hybrid.OLMO_HYBRID,
        "OlmoForCausalLM": llama.OLMO,
        "OlmoeForCausalLM": experts.OLMOE,
        "Phi3ForCausalLM": llama.PHI3,
        "PhiForCausalLM": llama.PHI,
        "PhimoeForCausalLM": experts.PHIMOE,
        "Qwen2ForCausalLM": llama.QWEN2,
        "Qwen2MoeForCausalLM": experts.QWEN2_MOE,
        "Qwen3ForCausalLM": llama.QWEN3,
        "Qwen3MoeForCausalLM": experts.QWEN3_MOE,
        "Qwen3NextForCausalLM": hybrid.QWEN3_NEXT,
        "Qwen3_5ForCausalLM": hybrid.QWEN3_5,
        "Qwen3_5MoeForCausalLM": hybrid.QWEN3_5_MOE,
        "SeedOssForCausalLM": llama.LLAMA,
        "SmolLM3ForCausalLM": llama.LLAMA,
        "StableLmForCausalLM": llama.STABLELM,
        "Starcoder2ForCausalLM": llama.STARCODER2,
    }
)


def architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names, or else the usual architecture of its model type."""
    match config.get("architectures"):
        case [str(named), *_]:
            return named
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    usual: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), "unnamed")
    return usual


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config's architecture, or None."""
    return FAMILIES.get(architecture(config))
