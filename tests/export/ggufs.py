"""GGUF files: a checkpoint folder written the way llama.cpp's converter does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoConfig

from genserve.kernels.blocks import BLOCK_FORMATS
from tests.kernels.linear_calls import HALVES, random_rows
from tests.support.tiny_llama import SPECIAL_TOKENS

__all__ = ["write_gguf", "write_gguf_adapter"]

Tensor = NDArray[np.float32]

# The architectures by model_type, where they differ.
_ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm": "chatglm",
    "llama4_text": "llama4",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_PERMUTED = {
    "arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "nemotron_h", "nemotron_h_moe",
    "olmo", "smollm3",
}  # fmt: skip
_STACKED = {"bloom", "gptneox"}
_WITH_WINDOWS = {"cohere2", "exaone4", "olmo2"}


def write_gguf(
    folder: Path,
    path: Path,
    *,
    pre: str = "smollm",
    kind: str | Callable[[str], str] = "F32",
    whole: bool = False,
    fused: bool = False,
    fused_qkv: bool = False,
    **metadata: Any,
) -> Path:
    """Write the checkpoint in `folder`.

    Args:
        folder: a checkpoint folder.
        path: the file.
        pre: the pre-tokenizer.
        kind: the number format of matrices whose rows are whole blocks, or a function that returns that of a
            tensor's name; others are F32. The package gguf does not quantize to k-quants, so that these have
            random codes of about the same size.
        whole: leaves together what the first converters of an architecture did not take apart.
        fused: joins gates and values of experts, as the converter's `--fuse-gate-up-exps` does.
        fused_qkv: joins queries, keys and values, as its `--fuse-qkv` does.
        metadata: adds or replaces fields: strings, booleans, numbers or lists of them; None leaves one out.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    fields = {f"{architecture}.{key}": value for key, value in _fields(config, architecture).items()}
    for name, value in (fields | metadata).items():
        _add(writer, name, value)
    _add_tokenizer(writer, folder, pre=pre, replaced=metadata)
    tensors = _tensors(folder, config, architecture=architecture, whole=whole)
    for name in [name for name in tensors if fused and name.endswith(".ffn_gate_exps.weight")]:
        halves = [tensors.pop(name.replace("gate", part)) for part in ("gate", "up")]
        tensors[name.replace("gate", "gate_up")] = np.concatenate(halves, axis=1)
    for name in [name for name in tensors if fused_qkv and ".attn_k." in name]:
        parts = [name.replace("attn_k", f"attn_{part}") for part in "qkv"]
        if all(part in tensors for part in parts):
            joined = np.concatenate([tensors.pop(part) for part in parts])
            tensors[name.replace("attn_k", "attn_qkv")] = joined
    for name, tensor in tensors.items():
        number = GGMLQuantizationType[kind if isinstance(kind, str) else kind(name)]
        block, _ = gguf.GGML_QUANT_SIZES[number]
        if tensor.ndim < 2 or tensor.shape[-1] % block or "ffn_gate_inp" in name:
            number = GGMLQuantizationType.F32
        values = np.ascontiguousarray(tensor)
        is_super = number.name.endswith("_K")
        blocks = _random_blocks(values, number.name) if is_super else gguf.quantize(values, number)
        writer.add_tensor(name, blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_adapter(adapter: Path, base: Path, path: Path) -> Path:
    """Convert an adapter in the format of PEFT as convert_lora_to_gguf.py does."""
    config = AutoConfig.from_pretrained(base)
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    alpha = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for own_name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, part = own_name.removeprefix("base_model.model.").rpartition(".lora_")
        name = _name(f"{module}.weight", config=config, architecture=architecture)
        match part:
            case "A.weight":
                writer.add_tensor(f"{name}.lora_a", tensor)
            case "B.weight":
                rows = _converted(tensor, f"{module}.weight", config=config, architecture=architecture)
                writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(rows))
            case "embedding_A":
                writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(tensor.T))
            case "embedding_B":
                writer.add_tensor(f"{name}.lora_b", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(config: Any) -> str:
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        return "nemotron_h_moe"
    return _ARCHITECTURES.get(config.model_type, config.model_type)


def _random_blocks(tensor: Tensor, kind: str) -> NDArray[np.uint8]:
    outputs = tensor.size // tensor.shape[-1]
    rows: NDArray[np.uint8] = random_rows(
        np.random.default_rng(tensor.size), kind, outputs, tensor.shape[-1]
    )
    blocks = rows.reshape(len(rows), -1, BLOCK_FORMATS[kind].bytes)
    for at in HALVES[kind]:
        halves = blocks[:, :, at : at + 2].copy().view(np.float16)
        size = np.float16(0.1 / np.sqrt(tensor.shape[-1]))  # for codes, scales and minimums of any size
        blocks[:, :, at : at + 2] = (np.abs(halves) * size).view(np.uint8)
    return rows.reshape(*tensor.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case list():
            writer.add_array(name, value)
        case _:
            writer.add_string(name, value)


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    """The fields that `set_gguf_parameters` of the converter's model classes writes."""
    if architecture in ("gpt2", "bloom"):
        length = "seq_length" if architecture == "bloom" else "max_position_embeddings"
        return {
            "block_count": config.num_hidden_layers,
            "context_length": getattr(config, length),
            "embedding_length": config.hidden_size,
            "feed_forward_length": getattr(config, "n_inner", None) or 4 * config.hidden_size,
            "attention.head_count": config.num_attention_heads,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    heads = config.num_attention_heads
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // heads
    if architecture.startswith("nemotron_h"):
        return _nemotron_h_fields(config)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    inner = "ffn_hidden_size" if architecture == "falcon" else "intermediate_size"
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, inner),
        "attention.head_count": heads,
        "attention.key_length": head_dim,
        "rope.freq_base": float(rotary["rope_theta"]),
        "rope.dimension_count": int(head_dim * rotary.get("partial_rotary_factor", 1.0)),
        **_rope_scaling(rotary),
    }
    values = config.to_dict()
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in values:
            fields["attention.head_count_kv"] = values[name]
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            fields["attention.layer_norm_epsilon"] = getattr(config, name)
    if hasattr(config, "rms_norm_eps"):
        fields["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if hasattr(config, "use_parallel_residual"):
        fields["use_parallel_residual"] = config.use_parallel_residual
    if hasattr(config, "logit_scale"):
        fields["logit_scale"] = config.logit_scale
    if architecture in _WITH_WINDOWS and getattr(config, "sliding_window", None):
        fields["attention.sliding_window"] = config.sliding_window
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        fields["attention.sliding_window_pattern"] = pattern
    match architecture:
        case "gemma2":
            fields["attn_logit_softcapping"] = config.attn_logit_softcapping
            fields["final_logit_softcapping"] = config.final_logit_softcapping
            fields["attention.sliding_window"] = config.sliding_window
        case "gemma3":
            fields["attention.sliding_window"] = config.sliding_window
            fields["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
        case "gemma3n" | "gemma4":
            fields |= _gemma_fields(config, architecture)
        case "llama4":
            fields["feed_forward_length"] = config.intermediate_size_mlp
            fields["expert_feed_forward_length"] = config.intermediate_size
            fields["interleave_moe_layer_step"] = config.interleave_moe_layer_step
        case "granite" | "granitehybrid" | "granitemoe":
            fields["attention.scale"] = config.attention_multiplier
            fields["embedding_scale"] = config.embedding_multiplier
            fields["residual_scale"] = config.residual_multiplier
            fields["logit_scale"] = config.logits_scaling
        case "olmo":
            fields |= {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config.clip_qkv}
        case "mistral3":
            fields["attention.temperature_scale"] = rotary["llama_4_scaling_beta"]
            fields["rope.scaling.yarn_log_multiplier"] = rotary["mscale_all_dim"]
        case "phi3":
            fields["attention.sliding_window"] = config.sliding_window or 0
            fields["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return fields | _expert_fields(config, architecture) | _state_fields(config, architecture)


def _nemotron_h_fields(config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    inner = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]
    fields = {
        "block_count": len(kinds),
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.dimension_count": config.head_dim,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.group_count": config.n_groups,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if "moe" not in kinds:
        return fields
    return fields | {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
    }


def _gemma_fields(config: Any, architecture: str) -> dict[str, Any]:
    types, shared = config.layer_types, config.num_kv_shared_layers
    fields = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if architecture == "gemma3n":
        return fields | {
            "feed_forward_length": config.intermediate_size,
            "altup.active_idx": config.altup_active_idx,
            "altup.num_inputs": config.altup_num_inputs,
            "activation_sparsity_scale": [
                float(torch.distributions.Normal(0, 1).icdf(torch.tensor(share)))
                for share in config.activation_sparsity_pattern
            ],
        }
    inner, count = config.intermediate_size, config.num_hidden_layers
    wide = 2 * inner if config.use_double_wide_mlp else inner
    full = next(config.per_layer_config[i] for i, kind in enumerate(types) if kind == "full_attention")
    fields |= {
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.to_dict()["head_dim"],
        "attention.value_length_swa": config.to_dict()["head_dim"],
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.to_dict()["head_dim"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "feed_forward_length": [inner] * (count - shared) + [wide] * shared,
    }
    if config.attention_k_eq_v:
        fields["attention.head_count_kv"] = [
            config.per_layer_config[index].num_key_value_heads for index in range(count)
        ]
    if config.enable_moe_block:
        fields |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return fields


def _state_fields(config: Any, architecture: str) -> dict[str, Any]:
    if architecture.startswith("lfm2"):
        heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
        fields = {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}
        fields["attention.layer_norm_rms_epsilon"] = config.norm_eps
        return fields | ({"leading_dense_block_count": 1} if architecture == "lfm2moe" else {})
    if architecture.startswith(("qwen35", "qwen3next")):
        return {
            "full_attention_interval": 2,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }
    if architecture in ("falcon-h1", "granitehybrid"):
        own: dict[str, Any] = {}
        if architecture == "granitehybrid":
            heads = [config.num_key_value_heads if "full" in kind else 0 for kind in config.layer_types]
            own = {"attention.head_count_kv": heads, "rope.scaling.finetuned": False}
        return own | {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.state_size": config.mamba_d_state,
            "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        }
    return {}


def _expert_fields(config: Any, architecture: str) -> dict[str, Any]:
    if architecture == "gemma4":
        return {}
    names = ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    if not count:
        return {}
    fields = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    match architecture:
        case "ernie4_5-moe":
            fields["interleave_moe_layer_step"] = config.moe_layer_interval
            fields["leading_dense_block_count"] = config.moe_layer_start_index
            fields["expert_shared_count"] = config.moe_num_shared_experts
        case "glm4moe":
            fields["block_count"] = config.num_hidden_layers + config.num_nextn_predict_layers
            fields["nextn_predict_layers"] = config.num_nextn_predict_layers
            fields["leading_dense_block_count"] = config.first_k_dense_replace
            fields["expert_shared_count"] = config.n_shared_experts
            fields["expert_weights_scale"] = config.routed_scaling_factor
            fields["expert_weights_norm"] = config.norm_topk_prob
            fields["expert_group_count"] = config.n_group
            fields["expert_group_used_count"] = config.topk_group
        case "gpt-oss":
            fields["attention.sliding_window"] = config.sliding_window
        case "deepseek2":
            fields["attention.head_count_kv"] = 1
            fields["attention.key_length"] = config.kv_lora_rank + config.qk_rope_head_dim
            fields["attention.value_length"] = config.kv_lora_rank
            fields["attention.key_length_mla"] = config.qk_nope_head_dim + config.qk_rope_head_dim
            fields["attention.value_length_mla"] = config.v_head_dim
            fields["attention.kv_lora_rank"] = config.kv_lora_rank
            fields["attention.q_lora_rank"] = config.q_lora_rank
            fields["rope.dimension_count"] = config.qk_rope_head_dim
            fields["leading_dense_block_count"] = config.first_k_dense_replace
            fields["expert_feed_forward_length"] = config.moe_intermediate_size
            fields["expert_shared_count"] = config.n_shared_experts
            fields["expert_weights_scale"] = config.routed_scaling_factor
            fields["expert_weights_norm"] = getattr(config, "norm_topk_prob", None) or None
            fields["expert_group_count"] = config.n_group
            fields["expert_group_used_count"] = config.topk_group
            is_v2 = config.model_type == "deepseek_v2"
            kind = gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID
            fields["expert_gating_func"] = int(kind)
            if (exponent := config.rope_parameters.get("mscale_all_dim")) is not None:
                fields["rope.scaling.yarn_log_multiplier"] = 0.1 * exponent
        case "qwen3next":
            fields["expert_feed_forward_length"] = config.moe_intermediate_size
            fields["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return fields


def _rope_scaling(rotary: Mapping[str, Any]) -> dict[str, Any]:
    match rotary:
        case {"rope_type": "linear", "factor": factor}:
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}:
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": factor,
                "rope.scaling.original_context_length": original,
            }
        case {"rope_type": "longrope", "factor": factor, "original_max_position_embeddings": original}:
            scale = math.sqrt(1 + math.log(factor) / math.log(original))
            return {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": scale}
    return {}


def _tensors(folder: Path, config: Any, *, architecture: str, whole: bool) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in _stacked(load_file(folder / "model.safetensors")).items():
        if ".act_fn." in name:
            continue
        if architecture in ("gemma3n", "gemma4", "llama4"):
            tensors |= _of_gemma_or_llama4(tensor, name, config=config, architecture=architecture)
            continue
        if ".experts.gate_up_proj" in name:     # of gpt-oss
            halves = tensor[..., 0::2], tensor[..., 1::2]
            for half, part in zip(halves, ("gate", "up"), strict=True):
                is_bias = name.endswith("_bias")
                own = f"blk.{name.split('.')[2]}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}"
                tensors[own] = half if is_bias else half.swapaxes(1, 2)
            continue
        if ".block_sparse_moe.input_linear." in name:
            for half, part in zip(np.split(tensor, 2, axis=1), ("gate", "up"), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half
            continue
        if ".shared_mlp." in name:
            end = "_shexp" if config.num_local_experts else ""
            halves = np.split(tensor, 2) if ".input_linear." in name else [tensor]
            for half, part in zip(halves, ("gate", "up") if len(halves) == 2 else ("down",), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight"] = half
            continue
        if config.model_type == "gpt_oss" and ".experts.down_proj" in name:
            tensor = tensor if name.endswith("_bias") else tensor.swapaxes(1, 2)
            name = name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight"
        if name.endswith(".sinks"):
            name = f"{name}.weight"
        if name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt.bias" if ".mixer." in name else ".dt_proj.bias")
        if ".kv_b_proj." in name and not whole:
            heads = tensor.reshape(config.num_attention_heads, -1, tensor.shape[1])
            layer, keys = name.split(".")[2], config.qk_nope_head_dim
            tensors[f"blk.{layer}.attn_k_b.weight"] = heads[:, :keys].swapaxes(1, 2)
            tensors[f"blk.{layer}.attn_v_b.weight"] = heads[:, keys:]
            continue
        if ".in_proj_qkvz." in name and not whole:
            layer, keys = name.split(".")[2], 2 * config.linear_key_head_dim
            values = config.linear_num_value_heads // config.linear_num_key_heads
            values *= config.linear_value_head_dim
            heads = tensor.reshape(config.linear_num_key_heads, -1, tensor.shape[1])
            sizes = (keys // 2, keys, keys + values)
            parts = [part.reshape(-1, tensor.shape[1]) for part in np.split(heads, sizes, axis=1)]
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts[:3])
            tensors[f"blk.{layer}.attn_gate.weight"] = parts[3]
            continue
        if name.endswith(".feed_forward.expert_bias"):
            name = f"{name}.bias"
        if ".conv1d." in name or ".conv.conv." in name:
            tensor = tensor.squeeze(1) if tensor.ndim == 3 else tensor
        if name.endswith((".mamba.A_log", ".mixer.A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            groups = config.n_groups if ".mixer." in name else config.mamba_n_groups
            tensor = tensor.reshape(groups, -1)
        if config.model_type.startswith("qwen3_5") and ".linear_attn." in name:
            tensor = _tiled(tensor, name, config=config)
        if name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        if ".mlp.experts.gate_up_proj" in name:
            for half, part in zip(np.split(tensor, 2, axis=1), ("gate", "up"), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half
            continue
        if name.endswith(".mlp.experts.down_proj"):
            name = f"{name}.weight"
        if name.endswith(".e_score_correction_bias"):
            name, tensor = name.replace("_bias", ".bias"), tensor.squeeze()
        if name.endswith(".shared_expert_gate.weight") and architecture == "qwen2moe":     # in old files
            tensor = tensor.squeeze()
        theirs = _name(name, config=config, architecture=architecture)
        tensors[theirs] = _converted(tensor, name, config=config, architecture=architecture)
    if architecture == "gemma4":
        [share] = {config.rope_parameters["full_attention"]["partial_rotary_factor"]}
        [size] = {
            config.per_layer_config[index].head_dim
            for index, kind in enumerate(config.layer_types)
            if kind == "full_attention"
        }
        rotated = int(size * share / 2)
        divisors = np.full(size // 2, 1e30, np.float32)
        divisors[:rotated] = 1
        tensors["rope_freqs.weight"] = divisors
    if architecture in ("gpt2", "bloom"):
        tensors["output.weight"] = tensors["token_embd.weight"]
    rotary = getattr(config, "rope_parameters", None) or {}
    match rotary.get("rope_type"):
        case "llama3":
            tensors["rope_freqs.weight"] = _llama3_divisors(config)
        case "longrope":
            for length in ("short", "long"):
                factors = np.array(rotary[f"{length}_factor"], np.float32)
                tensors[f"rope_factors_{length}.weight"] = factors
    return tensors


def _of_gemma_or_llama4(
    tensor: Tensor, name: str, *, config: Any, architecture: str
) -> dict[str, Tensor]:
    """The tensors of a file that become of one of a folder."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if architecture == "llama4" and name.endswith(".experts.gate_up_proj"):
        halves = zip(np.split(tensor.swapaxes(1, 2), 2, axis=1), ("gate", "up"), strict=True)
        return {f"blk.{layer}.ffn_{part}_exps.weight": half for half, part in halves}
    if name.endswith(".router.scale"):
        return {f"blk.{layer}.ffn_gate_inp.scale": tensor}
    if name.endswith(".per_expert_scale"):
        return {f"blk.{layer}.ffn_down_exps.scale": tensor}
    if name.endswith("projections.weight"):
        return {_name(name, config=config, architecture=architecture): tensor}
    if architecture == "llama4" and name.endswith(".experts.down_proj"):
        tensor = tensor.swapaxes(1, 2)
    if name.endswith(("down_proj", "gate_up_proj", "layer_scalar", "_scale")):
        name = f"{name}.weight"
    return {_name(name, config=config, architecture=architecture): tensor}


def _tiled(tensor: Tensor, name: str, *, config: Any) -> Tensor:
    """`_LinearAttentionVReorderBase`: heads of values alternate by heads of keys."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys, size = 2 * groups * config.linear_key_head_dim, config.linear_value_head_dim

    def reordered(part: Tensor, size: int) -> Tensor:
        apart = part.reshape(groups, heads // groups, size, *part.shape[1:])
        return apart.swapaxes(0, 1).reshape(part.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        return np.concatenate([tensor[:keys], reordered(tensor[keys:], size)])
    if ".in_proj_z." in name:
        return reordered(tensor, size)
    if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_proj.bias")):
        return reordered(tensor, 1)
    if ".out_proj." in name:
        return np.ascontiguousarray(reordered(np.ascontiguousarray(tensor.T), size).T)
    return tensor


def _name(name: str, *, config: Any, architecture: str) -> str:
    """The name of a tensor in a file."""
    [number] = [number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture]
    names, parts = gguf.get_tensor_name_map(number, config.num_hidden_layers), (".weight", ".bias")
    # For BLOOM, llama.cpp converts the model without its head.
    name = re.sub(r"backbone(.*)\.mixer\.experts\.", r"model\1.mlp.experts.", name)
    alone = [name.removeprefix(prefix) for prefix in ("", "transformer.", "model.")]
    alone.append(f"backbone.{alone[-1]}")
    found = next(filter(None, (names.get_name(each, parts) for each in alone)), None)
    assert found is not None
    return found


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of the experts as stacks."""
    experts: dict[str, dict[int, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (found := re.fullmatch(r"(.*\.experts|.*projections)\.(\d+)\.(.*)", name)) is None:
            others[name] = tensor
        else:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
    stacks = {name: np.stack([own[index] for index in range(len(own))]) for name, own in experts.items()}
    return others | stacks


def _llama3_divisors(config: Any) -> Tensor:
    """`LlamaModel.generate_extra_tensors`: by how much llama3 divides the frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_parameters["rope_theta"] ** -exponents
    divisors: Tensor = (plain / scaled.numpy()).astype(np.float32)
    return divisors


def _converted(tensor: Tensor, name: str, *, config: Any, architecture: str) -> Tensor:
    """The tensor as `modify_tensors` of the converter's model classes leaves it."""
    heads = config.num_attention_heads
    part = name.split(".")[-2] if "." in name else ""
    if architecture in _PERMUTED and part in {"q_proj", "k_proj"}:
        return _permute(tensor, heads if part == "q_proj" else config.num_key_value_heads)
    if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    if architecture in _STACKED and part == "query_key_value":
        size = config.hidden_size // heads
        apart = tensor.reshape(heads, 3, size, *tensor.shape[1:])
        return np.concatenate([apart[:, i].reshape(heads * size, *tensor.shape[1:]) for i in range(3)])
    if architecture == "falcon" and part == "query_key_value":
        size = config.hidden_size // heads
        groups = tensor.reshape(config.num_kv_heads, -1, size, *tensor.shape[1:])
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    is_difference = architecture in ("nemotron", "qwen3next") or architecture.startswith(("gemma", "qwen35"))
    if is_difference and name.endswith("norm.weight") and ".linear_attn." not in name:
        return tensor + np.float32(1)
    return tensor


def _add_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, *, pre: str, replaced: Mapping[str, Any]
) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    if "tokenizer.ggml.model" not in replaced:
        writer.add_tokenizer_model("gpt2")
    if "tokenizer.ggml.pre" not in replaced:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(model["vocab"]))
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in model["vocab"]])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if (folder / "tokenizer_config.json").exists():
        writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def _permute(weight: Tensor, num_heads: int) -> Tensor:
    """`LlamaModel.permute`."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )
