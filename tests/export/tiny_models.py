"""Tiny models: random checkpoints of the families, written by transformers as folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_llama import tiny_tokenizer

__all__ = ["TINY_MODELS", "tiny_checkpoint"]

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_BLOOM = {"model_type": "bloom", "n_layer": 2, "seq_length": 128}
_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_LLAMA = _GROUPED | {"model_type": "llama"}
_GEMMA = _GROUPED | {"head_dim": 32}
_GEMMA2 = _GEMMA | {"sliding_window": 16, "query_pre_attn_scalar": 24}
_CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Configs for `tiny_checkpoint`, by name.
TINY_MODELS: Mapping[str, Mapping[str, Any]] = {
    "bloom_4_heads": _BLOOM | {"hidden_size": 64, "n_head": 4},
    "bloom_6_heads": _BLOOM | {"hidden_size": 96, "n_head": 6},
    "gemma": _GEMMA | {"model_type": "gemma"},
    "gemma2": _GEMMA2 | _CAPPED | {"model_type": "gemma2"},
    "gemma3": _GEMMA2 | {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": _GPT2,
    "gpt2_untied": _GPT2 | {"tie_word_embeddings": False, "scale_attn_weights": False, "n_embd": 96},
    "gpt_neox": _SIZES | {"model_type": "gpt_neox", "hidden_size": 256, "tie_word_embeddings": False},
    "gpt_neox_serial": _SIZES | {"model_type": "gpt_neox", "rotary_pct": 1.0, "use_parallel_residual": False},
    "llama": _LLAMA,
    # Odd sizes: heads of 20 numbers, 14 of which are rotated.
    "gpt2_odd": _GPT2 | {"n_embd": 100, "n_head": 5, "n_inner": 170},
    "gpt_neox_odd": _SIZES
    | {"model_type": "gpt_neox", "hidden_size": 100, "num_attention_heads": 5, "rotary_pct": 0.7},
    "llama_biases": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama_dynamic_rope": _LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama_linear_rope": _LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama_llama3_rope": _LLAMA | {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500.0},
    "llama_one_layer": _LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True},
    "llama_yarn_rope": _LLAMA
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral": _GROUPED | {"model_type": "mistral", "sliding_window": 24},
    "opt": {
        "model_type": "opt",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
    },
    "phi3": _GROUPED | {"model_type": "phi3", "original_max_position_embeddings": 128},
    "phi3_longrope": _GROUPED
    | {
        "model_type": "phi3",
        "hidden_size": 256,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "partial_rotary_factor": 0.75,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1 + i / 24 for i in range(24)],
            "long_factor": [4.0] * 24,
        },
    },
    "qwen2": _GROUPED
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": _GROUPED | {"model_type": "qwen3", "head_dim": 32},
    "smollm3": _GROUPED | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
}


def tiny_checkpoint(folder: Path, *, model_type: str, **config: Any) -> Path:
    """Write a model with random weights, which depend only on its shapes; returns the folder.

    The vocabulary is that of `tiny_tokenizer`, 320 tokens; `config` has the rest.
    """
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    known = AutoConfig.for_model(model_type, **{"vocab_size": 320} | ends | config)
    model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    # Unlike the usual initialisation, with which attention is nearly a mean and all norm weights are 1.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    tiny_tokenizer(vocab_size=known.vocab_size).save(str(folder / "tokenizer.json"))
    return folder
