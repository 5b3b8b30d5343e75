"""Tiny models: random checkpoints of the families, written by transformers as folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_llama import tiny_tokenizer

__all__ = ["HYBRID_TYPES", "OWN_TYPES", "REPRESENTATIVES", "TINY_MODELS", "randomize", "tiny_checkpoint"]

# Between them they have the parts of all families.
REPRESENTATIVES = {
    "bloom_4_heads", "cohere_head_norms", "falcon", "gemma2", "gpt2", "granite4", "llama", "olmo3", "phi",
    "phi3_longrope", "mixtral", "gpt_oss", "deepseek_v3", "falcon_h1", "lfm2", "qwen3_5", "gemma4",
    "gemma3n", "gemma4_experts", "llama4",
}  # fmt: skip

# The model types with recurrent states; Granite 4 may have none.
HYBRID_TYPES = {
    "falcon_h1", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next",
}  # fmt: skip

# Further model types whose attention only genserve's operators compute.
OWN_TYPES = {"gemma3n_text", "gemma4_text", "gemma4_unified_text", "llama4_text"}

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
_GEMMA4 = _GROUPED | {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 3.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
_GRANITE4 = _GRANITE | {
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["attention", "attention"],
}

_EXPERTS = _GROUPED | {"num_experts_per_tok": 2}
_LOCAL_EXPERTS = _EXPERTS | {"num_local_experts": 6}

_LLAMA4 = _LOCAL_EXPERTS | {
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size_mlp": 112,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.3,
    "attention_bias": True,
}

# Recurrent states
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention"],
}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
    "head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
_QWEN_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}

_LATENT = _EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}

# Buffers with numbers of a checkpoint: what is added to the scores of experts for the choice, and scales.
_BUFFERS = ("correction_bias", "expert_bias", "layer_scalar")

# Configs for `tiny_checkpoint`, by name.
TINY_MODELS: Mapping[str, Mapping[str, Any]] = {
    "bloom_4_heads": _BLOOM | {"hidden_size": 64, "n_head": 4},
    "bloom_6_heads": _BLOOM | {"hidden_size": 96, "n_head": 6},
    "gemma": _GEMMA | {"model_type": "gemma"},
    "gemma2": _GEMMA2 | _CAPPED | {"model_type": "gemma2"},
    "gemma3": _GEMMA2 | {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n": _GROUPED
    | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 300,
        "laurel_rank": 32,
        "activation_sparsity_pattern": [0.9, 0.0, 0.8, 0.0, 0.0, 0.0],
        "final_logit_softcapping": 3.0,
    },
    "gemma4": _GEMMA4
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma4_experts": _GEMMA4
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "gemma4_unified": _GEMMA4
    | {
        "model_type": "gemma4_unified_text",
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "gpt2": _GPT2,
    "gpt2_untied": _GPT2 | {"tie_word_embeddings": False, "scale_attn_weights": False, "n_embd": 96},
    "gpt_neox": _SIZES | {"model_type": "gpt_neox", "hidden_size": 256, "tie_word_embeddings": False},
    "gpt_neox_serial": _SIZES | {"model_type": "gpt_neox", "rotary_pct": 1.0, "use_parallel_residual": False},
    "falcon_h1": _GROUPED
    | _MAMBA
    | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "head_dim": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.3, 0.5, 0.7, 0.9, 1.1],
        "key_multiplier": 0.8,
        "mlp_multipliers": [0.9, 0.7],
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "falcon_h1_no_norm": _GROUPED
    | _MAMBA
    | {"model_type": "falcon_h1", "mamba_d_ssm": 128, "head_dim": 16, "time_step_limit": [0.4, 1.5]},
    "granite4_h": _GROUPED
    | _MAMBA
    | _GRANITE4
    | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_proj_bias": True},
    "granite4_h_experts": _LOCAL_EXPERTS
    | _MAMBA
    | _GRANITE
    | {
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 6,
    },
    "nemotron_h": _EXPERTS
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        **_NEMOTRON,
    },
    "nemotron_h_experts": _EXPERTS
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["moe", "mamba", "attention", "moe"],
        **_NEMOTRON,
        "use_bias": True,
    },
    "olmo_hybrid": _GROUPED
    | {
        "model_type": "olmo_hybrid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 24,
    },
    "qwen3_5": _GROUPED | _DELTA | {"model_type": "qwen3_5_text", "head_dim": 32},
    "qwen3_5_moe": _EXPERTS | _DELTA | _QWEN_EXPERTS | {"model_type": "qwen3_5_moe_text", "head_dim": 32},
    "qwen3_next": _EXPERTS
    | _DELTA
    | _QWEN_EXPERTS
    | {"model_type": "qwen3_next", "head_dim": 16, "mlp_only_layers": [0]},
    "lfm2_moe": _EXPERTS
    | {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "moe_intermediate_size": 40,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "lfm2": _GROUPED
    | {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
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
    "apertus": _GROUPED | {"model_type": "apertus", "rope_scaling": _LLAMA3_ROPE, "attention_bias": True},
    "arcee": _GROUPED | {"model_type": "arcee", "attention_bias": True, "mlp_bias": True},
    "cohere": _GROUPED | {"model_type": "cohere", "logit_scale": 2.0, "attention_bias": True},
    "cohere_head_norms": _GROUPED | {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 2.0},
    "cohere2": _GROUPED | {"model_type": "cohere2", **_WINDOWS, "logit_scale": 2.0, "attention_bias": True},
    "ernie4_5": _GROUPED | {"model_type": "ernie4_5", "head_dim": 32, "use_bias": True},
    "exaone4": _GROUPED | {"model_type": "exaone4", **_WINDOWS},
    "exaone4_full": _GROUPED
    | {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "falcon": _SIZES | {"model_type": "falcon", "bias": True},
    "falcon_grouped": _SIZES | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_serial": _SIZES | {"model_type": "falcon", "multi_query": False, "parallel_attn": False},
    "glm": _GROUPED | {"model_type": "glm", "head_dim": 32},
    "glm4": _GROUPED | {"model_type": "glm4", "head_dim": 32},
    "granite": _GROUPED | {"model_type": "granite", **_GRANITE, "attention_bias": True, "mlp_bias": True},
    "granite4": _GROUPED | {"model_type": "granitemoehybrid", **_GRANITE4, "position_embedding_type": "rope"},
    "granite4_nope": _GROUPED | {"model_type": "granitemoehybrid", **_GRANITE4, "attention_bias": True},
    "helium": _GROUPED | {"model_type": "helium", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "hunyuan": _GROUPED
    | {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 32,
        "attention_bias": True,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "ministral": _GROUPED | {"model_type": "ministral", "head_dim": 32, **_WINDOWS},
    "ministral3": _GROUPED
    | {
        "model_type": "ministral3",
        "head_dim": 32,
        "sliding_window": 24,
        "rope_parameters": _YARN | {"rope_theta": 1e6, "mscale": 1.0, "llama_4_scaling_beta": 0.3},
    },
    "nemotron": _GROUPED | {"model_type": "nemotron", "attention_bias": True, "mlp_bias": True},
    "olmo": _GROUPED | {"model_type": "olmo", "clip_qkv": 0.5, "attention_bias": True},
    "olmo2": _GROUPED | {"model_type": "olmo2", "attention_bias": True},
    "olmo3": _GROUPED | {"model_type": "olmo3", **_WINDOWS, "rope_scaling": _YARN},
    "phi": _GROUPED | {"model_type": "phi", "qk_layernorm": True},
    "phi_plain": _SIZES | {"model_type": "phi", "num_key_value_heads": None},
    "seed_oss": _GROUPED
    | {"model_type": "seed_oss", "head_dim": 32, "attention_out_bias": True, "mlp_bias": True},
    "stablelm": _GROUPED | {"model_type": "stablelm", "use_qkv_bias": True},
    "stablelm_parallel": _GROUPED
    | {"model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": _GROUPED | {"model_type": "starcoder2", "sliding_window": 24},
    "smollm3": _GROUPED | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "deepseek_v2": _LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "num_experts_per_tok": 3,   # the best two are in the best two groups
        "attention_bias": True,
        "topk_method": "group_limited_greedy",
        "rope_parameters": _YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": _LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 24, "attention_bias": True},
    "ernie4_5_moe": _EXPERTS
    | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 1,
        "use_bias": True,
    },
    "glm4_moe": _EXPERTS
    | {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": _LOCAL_EXPERTS
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        **_WINDOWS,
        "rope_parameters": _YARN | {"rope_theta": 1e4, "truncate": False},
    },
    "granitemoe": _LOCAL_EXPERTS | {"model_type": "granitemoe", **_GRANITE},
    "granitemoe_shared": _LOCAL_EXPERTS
    | {"model_type": "granitemoeshared", **_GRANITE, "shared_intermediate_size": 48},
    "llama4": _LLAMA4
    | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "interleave_moe_layer_step": 2},
    "llama4_plain": _LLAMA4
    | {
        "num_experts_per_tok": 1,
        "no_rope_layers": [0, 1],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_bias": False,
    },
    "minimax_m2": _LOCAL_EXPERTS | {"model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8},
    "mixtral": _LOCAL_EXPERTS | {"model_type": "mixtral", "sliding_window": 24},
    "olmoe": _EXPERTS | {"model_type": "olmoe", "num_experts": 6, "clip_qkv": 0.8, "attention_bias": True},
    "phimoe": _LOCAL_EXPERTS
    | {"model_type": "phimoe", "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": _EXPERTS
    | {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": _EXPERTS
    | {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
}


def tiny_checkpoint(folder: Path, *, model_type: str, **config: Any) -> Path:
    """Write a model with random weights, which depend only on its shapes; returns the folder.

    The vocabulary is that of `tiny_tokenizer`, 320 tokens; `config` has the rest.
    """
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    known = AutoConfig.for_model(model_type, **{"vocab_size": 320} | ends | config)
    with torch.random.fork_rng():
        torch.manual_seed(0)    # the sinks of attention begin with random numbers
        model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    tiny_tokenizer(vocab_size=known.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Give all parameters random values.

    With the usual initialisation, attention is nearly a mean and all norm weights are 1.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(_BUFFERS))
        for name, parameter in (*model.named_parameters(), *buffers):
            if parameter.dim() == 1 or name.endswith(_BUFFERS):
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
