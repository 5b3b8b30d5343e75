"""GGUF architectures: the metadata of a GGUF file as the config.json of a Hugging Face folder.

The keys and their defaults are those of llama.cpp (`load_arch_hparams` of its models), the changes to tensors
those of its convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.export.families.family import require
from genserve.export.gguf.gguf_file import GgufTensor
from genserve.sampling.logits_array import FloatArray

Config = dict[str, Any]
# Returns the order of a tensor's rows in a Hugging Face folder, given its name there; None: as in the file.
RowOrder = Callable[[str, Mapping[str, Any]], NDArray[np.int64] | None]
_PartRows = Callable[[Mapping[str, Any]], NDArray[np.int64]]    # of config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The metadata and the tensors of a file, which are read only when they are needed."""

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def __getitem__(self, key: str) -> Any:
        """Return a field of the architecture.

        Raises:
            KeyError: the file does not have it.
        """
        return self.metadata[f"{self.architecture}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field of the architecture, or the default."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def has(self, tensor: str) -> bool:
        """Whether a layer, or the file, has a tensor."""
        layers = range(self["block_count"])
        return tensor in self.tensors or any(f"blk.{layer}.{tensor}" in self.tensors for layer in layers)

    @property
    def head_dim(self) -> int:
        """The size of the keys of a head."""
        size, heads = self["embedding_length"], self["attention.head_count"]
        stated: int = self.get("attention.key_length", size // heads)
        return stated

    def outputs(self, tensor: str) -> int:
        """Return the outputs of a linear layer, or of one of the experts of a stack, in the first such layer.

        Raises:
            KeyError: no layer has the tensor.
        """
        names = (f"blk.{layer}.{tensor}.weight" for layer in range(self["block_count"]))
        size: int = next((self.tensors[name].shape[-2] for name in names if name in self.tensors), 0)
        if not size:
            raise KeyError(tensor)
        return size

    @property
    def num_kv_heads(self) -> int:
        """The heads of keys, by default as many as of queries; of the layers that have attention."""
        count: int | list[int] = self.get("attention.head_count_kv", self["attention.head_count"])
        return max(count) if isinstance(count, list) else count

    def layer_types(self, *, period: int) -> list[str]:
        """Return the types of the layers: the last of each period has attention to all tokens.

        The file may state another period, or a boolean for each layer.
        """
        pattern, num_layers = self.get("attention.sliding_window_pattern", period), self["block_count"]
        if not self.get("attention.sliding_window"):
            pattern = 1
        if isinstance(pattern, int):
            pattern = [index % pattern < pattern - 1 for index in range(num_layers)]
        return ["sliding_attention" if slides else "full_attention" for slides in pattern[:num_layers]]

    def rotary(self) -> Config:
        """Return `rope_parameters` of config.json."""
        return {
            "rope_theta": self.get("rope.freq_base", 10_000.0),
            "partial_rotary_factor": self.get("rope.dimension_count", self.head_dim) / self.head_dim,
            **self._scaling(),
        }

    def _scaling(self) -> Config:
        length = self["context_length"]
        if (factors := self.tensors.get("rope_freqs.weight")) is not None:
            # The factors by which llama3 divides the frequencies; transformers has them in longrope only.
            divisors = factors.read().tolist()
            return _longrope(short=divisors, long=divisors, original=length, factor=1.0, scale=1.0)
        original = self.get("rope.scaling.original_context_length", length)
        if (short := self.tensors.get("rope_factors_short.weight")) is not None:
            return _longrope(
                short=short.read().tolist(),
                long=self.tensors["rope_factors_long.weight"].read().tolist(),
                original=original,
                factor=length / original,
                scale=self.get("rope.scaling.attn_factor", 1.0),
            )
        # Files that are older than the type have this factor only.
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear", 1.0))
        kind = self.get("rope.scaling.type", "linear" if factor != 1.0 else "none")
        if kind == "yarn":
            parts = {
                "attention_factor": self.get("rope.scaling.yarn_attn_factor"),
                "beta_fast": self.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": self.get("rope.scaling.yarn_beta_slow"),
            }
            stated = {key: value for key, value in parts.items() if value is not None}
            stated |= {"rope_type": kind, "factor": factor}
            return stated | {"original_max_position_embeddings": original}
        return {"rope_type": kind, "factor": factor} if kind == "linear" else {"rope_type": "default"}


def _longrope(*, short: list[float], long: list[float], original: int, factor: float, scale: float) -> Config:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "factor": factor,
        "attention_factor": scale,
    }


def _as_in_the_file(_name: str, _config: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """The translation of one `general.architecture`."""

    architecture: str                           # as in config.json
    config: Callable[[GgufHeader], Config]      # the fields of config.json but those of `common_config`
    row_order: RowOrder = _as_in_the_file
    column_order: RowOrder = _as_in_the_file    # which column each column in the file is
    transposed: tuple[str, ...] = ()            # ends of the names of tensors that are stored transposed
    # The modules of a layer that are one in the file, by its name there, each with its rows there.
    parts: Mapping[str, Mapping[str, _PartRows]] = field(default_factory=dict)
    # Returns the tensors that are metadata in the file, by their names in a Hugging Face folder.
    tensors: Callable[[GgufHeader], Mapping[str, FloatArray]] = lambda _header: {}


def common_config(header: GgufHeader) -> Config:
    """Return the fields of config.json that all architectures have."""
    return {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "pad_token_id": None,   # some architectures have one that is outside of a small vocabulary
    }


def _llama(
    header: GgufHeader,
    *,
    model_type: str,
    epsilon: str = "rms_norm_eps",
    of: Callable[[GgufHeader], Config] = lambda _header: {},
) -> Config:
    """Return the config of an architecture with Llama's fields, and with those that `of` returns.

    `epsilon` is the name of the epsilon of norms; `rms_norm_eps` is that of RMS norms, others of layer norms.
    """
    kind = "rms_epsilon" if epsilon == "rms_norm_eps" else "epsilon"
    return {
        "model_type": model_type,
        "max_position_embeddings": header["context_length"],
        "hidden_size": header["embedding_length"],
        "intermediate_size": header["feed_forward_length"],
        "num_hidden_layers": header["block_count"],
        "num_attention_heads": header["attention.head_count"],
        "num_key_value_heads": header.num_kv_heads,
        "head_dim": header.head_dim,
        epsilon: header[f"attention.layer_norm_{kind}"],
        "rope_parameters": header.rotary(),
        "attention_bias": header.has("attn_q.bias"),
        "mlp_bias": header.has("ffn_up.bias"),
        **of(header),
    }


def _smollm3(header: GgufHeader) -> Config:
    return {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(header["block_count"])]}


def _phi3(header: GgufHeader) -> Config:
    original = header.get("rope.scaling.original_context_length", header["context_length"])
    window = header.get("attention.sliding_window") or None     # 0: none
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _gemma2(header: GgufHeader) -> Config:
    return {
        "sliding_window": header.get("attention.sliding_window", 4096),
        "layer_types": header.layer_types(period=2),
        "query_pre_attn_scalar": _query_scalar(header, largest=46),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
    }


def _gemma3(header: GgufHeader) -> Config:
    window = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10_000.0)}
    full = {"rope_theta": header.get("rope.freq_base", 1_000_000.0)}
    return {
        "sliding_window": header.get("attention.sliding_window") or header["context_length"],
        "layer_types": header.layer_types(period=6),
        "query_pre_attn_scalar": _query_scalar(header, largest=62),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "rope_parameters": {"sliding_attention": window, "full_attention": header.rotary() | full},
    }


def _gemma3n(header: GgufHeader) -> Config:
    num_layers = header["block_count"]
    # A share of the gates of a layer is cut off, and the file has the standard deviations that cut it off.
    cutoffs = header.get("activation_sparsity_scale", [])
    shares = [round(NormalDist().cdf(cutoff), 6) for cutoff in cutoffs] or [0.0] * num_layers
    return {
        **_gemma_with_caches(header),
        "rope_parameters": _rotary_by_type(header) | {"full_attention": _plain_rotary(header)},
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", max(num_layers - 20, 0)),
        "altup_num_inputs": header.get("altup.num_inputs", 4),
        "altup_active_idx": header.get("altup.active_idx", 0),
        "laurel_rank": header.outputs("laurel_l"),
        "activation_sparsity_pattern": shares,
    }


def _gemma4(header: GgufHeader) -> Config:
    types, heads = header.layer_types(period=6), header.get("attention.head_count_kv")
    inner = header["feed_forward_length"]
    lengths = inner if isinstance(inner, list) else [inner]
    own = next(index for index, kind in enumerate(types) if kind == "full_attention")
    by_layer = heads if isinstance(heads, list) else [heads] * len(types)
    config = _gemma_with_caches(header) | {
        "head_dim": header["attention.key_length_swa"],
        "global_head_dim": header["attention.key_length"],
        "num_key_value_heads": next(
            (count for count, kind in zip(by_layer, types, strict=False) if kind != "full_attention"),
            by_layer[own],
        ),
        "num_global_key_value_heads": by_layer[own],
        "attention_k_eq_v": f"blk.{own}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", 0),
        "intermediate_size": lengths[0],
        "use_double_wide_mlp": lengths[-1] > lengths[0],
        "rope_parameters": _rotary_by_type(header),
    }
    if not header.get("expert_count"):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": header["expert_count"],
        "top_k_experts": header["expert_used_count"],
        "moe_intermediate_size": header["expert_feed_forward_length"],
    }


def _gemma_with_caches(header: GgufHeader) -> Config:
    """Return the fields that Gemma 3n and 4 share."""
    table = header.tensors.get("per_layer_token_embd.weight")
    return {
        "sliding_window": header["attention.sliding_window"],
        "layer_types": header.layer_types(period=5),
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
        "final_logit_softcapping": header.get("final_logit_softcapping"),
    }


def _plain_rotary(header: GgufHeader) -> Config:
    return {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 1_000_000.0)}


def _rotary_by_type(header: GgufHeader) -> Config:
    """Return the rotary positions of Gemma 4; the file divides frequencies that do not rotate by 1e30."""
    divisors = header.tensors.get("rope_freqs.weight")
    share = 1.0 if divisors is None else float((divisors.read() < 2).mean())
    full = _plain_rotary(header) | {"rope_type": "proportional", "partial_rotary_factor": share}
    window = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10_000.0)}
    return {"sliding_attention": window, "full_attention": full}


def _llama4(header: GgufHeader) -> Config:
    """Return the fields of Llama 4, some of which llama.cpp has in its code only."""
    num_layers, has_chunks = header["block_count"], header.get("attention.sliding_window") != 0
    period = header.get("attention.sliding_window_pattern", 4) if has_chunks else num_layers + 1
    return {
        **_local_experts(header),
        "intermediate_size_mlp": header["feed_forward_length"],
        "interleave_moe_layer_step": header["interleave_moe_layer_step"],
        "no_rope_layers": [int((index + 1) % period != 0) for index in range(num_layers)],
        "attention_chunk_size": 8192 if has_chunks else None,
        "use_qk_norm": header["expert_count"] != 128,
    }


def _query_scalar(header: GgufHeader, *, largest: int) -> int:
    """Return the number whose root divides the scores of Gemma.

    `largest` is the number of layers of the 27B model, which alone does not divide by the size of a head.
    """
    if header["block_count"] == largest:
        size: int = header["embedding_length"] // header["attention.head_count"]
        return size
    return header.head_dim


def _gpt2(header: GgufHeader) -> Config:
    return {
        "model_type": "gpt2",
        "n_positions": header["context_length"],
        "n_embd": header["embedding_length"],
        "n_inner": header["feed_forward_length"],
        "n_layer": header["block_count"],
        "n_head": header["attention.head_count"],
        "layer_norm_epsilon": header["attention.layer_norm_epsilon"],
        "tie_word_embeddings": True,    # the converter writes a tied head as another tensor
    }


def _bloom(header: GgufHeader) -> Config:
    return {
        "model_type": "bloom",
        "seq_length": header["context_length"],
        "hidden_size": header["embedding_length"],
        "n_layer": header["block_count"],
        "n_head": header["attention.head_count"],
        "layer_norm_epsilon": header["attention.layer_norm_epsilon"],
        "tie_word_embeddings": True,
    }


def _gptneox(header: GgufHeader) -> Config:
    return {
        "model_type": "gpt_neox",
        "max_position_embeddings": header["context_length"],
        "hidden_size": header["embedding_length"],
        "intermediate_size": header["feed_forward_length"],
        "num_hidden_layers": header["block_count"],
        "num_attention_heads": header["attention.head_count"],
        "layer_norm_eps": header["attention.layer_norm_epsilon"],
        "rope_parameters": header.rotary(),
        "use_parallel_residual": header["use_parallel_residual"],
        "attention_bias": header.has("attn_qkv.bias"),
    }


def _windows(header: GgufHeader) -> Config:
    window = header.get("attention.sliding_window") or None
    return {"sliding_window": window, "layer_types": header.layer_types(period=4)}


def _granite(header: GgufHeader) -> Config:
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: header.get(key, 1.0) for name, key in scales.items()} | {
        "attention_multiplier": header.get("attention.scale", header.head_dim**-0.5)
    }


def _olmo2(header: GgufHeader) -> Config:
    if not header.get("attention.sliding_window"):
        return {}
    rotary = header.rotary()    # which llama.cpp does not scale in a window
    window = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", rotary["rope_theta"])}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {"sliding_attention": window, "full_attention": rotary},
        **_windows(header),
    }


def _llama_or_mixtral(header: GgufHeader) -> Config:
    if not header.get("expert_count"):
        return {}
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        **_local_experts(header),
    }


def _local_experts(header: GgufHeader) -> Config:
    return {
        "num_local_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "intermediate_size": header.outputs("ffn_up_exps"),
    }


def _granite_moe(header: GgufHeader) -> Config:
    config = _granite(header) | _local_experts(header)
    if not header.has("ffn_up_shexp.weight"):
        return config
    return config | {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": header.outputs("ffn_up_shexp"),
    }


def _phimoe(header: GgufHeader) -> Config:
    rotary = header.rotary()
    if rotary["rope_type"] == "longrope":   # the scale of Phi-3.5-MoE, for which a file has another number
        rotary |= {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
    return {
        **_local_experts(header),
        "rope_parameters": rotary,
        "sliding_window": None,
        "lm_head_bias": header.has("output.bias"),
    }


def _deepseek2(header: GgufHeader) -> Config:
    """Return the fields of DeepSeek V3, or of V2, whose router is another."""
    rope = header["rope.dimension_count"]
    # Files with one tensor for keys and values state sizes that are not those of the cache.
    mla = "_mla" if header.get("attention.key_length_mla") else ""
    temperature = header.get("attention.temperature_scale")
    require(not temperature, found=f"attention.temperature_scale {temperature}", known="none")
    rotary = header.rotary() | {"partial_rotary_factor": 1.0}
    if exponent := header.get("rope.scaling.yarn_log_multiplier"):   # the converter multiplies it by 0.1
        rotary |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * exponent, 5))
    num_groups, inner = header.get("expert_group_count") or 1, header.outputs("ffn_up_exps")
    predictors = header.get("nextn_predict_layers", 0)
    config = {
        "num_hidden_layers": header["block_count"] - predictors,
        "num_nextn_predict_layers": predictors,
        "num_key_value_heads": header["attention.head_count"],
        "head_dim": rope,
        "q_lora_rank": header["attention.q_lora_rank"] if header.has("attn_q_a.weight") else None,
        "kv_lora_rank": header["attention.kv_lora_rank"],
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": header[f"attention.key_length{mla}"] - rope,
        "v_head_dim": header[f"attention.value_length{mla}"],
        "attention_bias": header.has("attn_kv_a_mqa.bias"),
        "rope_parameters": rotary,
        "first_k_dense_replace": header.get("leading_dense_block_count", 0),
        "n_routed_experts": header["expert_count"],
        "n_shared_experts": header.outputs("ffn_up_shexp") // inner,
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": inner,
        "routed_scaling_factor": header.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": header.get("expert_weights_norm", False),
        "n_group": num_groups,
        "topk_group": header.get("expert_group_used_count") or 1,
    }
    if header.has("exp_probs_b.bias"):
        return config
    require(not config["norm_topk_prob"], found="expert_weights_norm with softmax", known="without it")
    return config | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
    }


def _qwen_moe(header: GgufHeader, *, normalised: bool, shared: bool = False) -> Config:
    """Return the fields of experts; llama.cpp's code decides whether their weights are `normalised`."""
    config = {
        "num_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": header.outputs("ffn_up_exps"),
        "norm_topk_prob": header.get("expert_weights_norm", normalised),
    }
    if shared:
        config |= {
            "shared_expert_intermediate_size": header.outputs("ffn_up_shexp"),
            "qkv_bias": header.has("attn_q.bias"),
        }
    return config


def _olmoe(header: GgufHeader) -> Config:
    return {
        "num_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "intermediate_size": header.outputs("ffn_up_exps"),
        "norm_topk_prob": header.get("expert_weights_norm", False),
    }


def _glm4_moe(header: GgufHeader) -> Config:
    predictors = header.get("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": header["block_count"] - predictors,
        "num_nextn_predict_layers": predictors,
        "n_routed_experts": header["expert_count"],
        "n_shared_experts": header.get("expert_shared_count", 1),
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": header.outputs("ffn_up_exps"),
        "first_k_dense_replace": header.get("leading_dense_block_count", 0),
        "routed_scaling_factor": header.get("expert_weights_scale", 1.0),
        "norm_topk_prob": header.get("expert_weights_norm", True),
        "n_group": header.get("expert_group_count", 1),
        "topk_group": header.get("expert_group_used_count", 1),
        "use_qk_norm": header.has("attn_q_norm.weight"),
    }


def _ernie_moe(header: GgufHeader) -> Config:
    return {
        "moe_num_experts": header["expert_count"],
        "moe_k": header["expert_used_count"],
        "moe_intermediate_size": header.outputs("ffn_up_exps"),
        "moe_num_shared_experts": header.get("expert_shared_count", 0),
        "moe_layer_start_index": header.get("leading_dense_block_count", 0),
        "moe_layer_interval": header.get("interleave_moe_layer_step", 1),
        "use_bias": header.has("attn_q.bias"),
    }


def _gpt_oss(header: GgufHeader) -> Config:
    return {
        **_local_experts(header),
        "sliding_window": header["attention.sliding_window"],
        "layer_types": header.layer_types(period=2),
        "rope_parameters": header.rotary() | {"truncate": False},
    }


def _cohere(header: GgufHeader) -> Config:
    return {"logit_scale": header["logit_scale"], "use_qk_norm": header.has("attn_q_norm.weight")}


def _cohere2(header: GgufHeader) -> Config:
    return {"logit_scale": header["logit_scale"], **_windows(header)}


def _mistral3(header: GgufHeader) -> Config:
    beta = header.get("attention.temperature_scale")
    if not beta:    # the text part of Mistral Small 3.1, which is a Mistral
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    exponent = header.get("rope.scaling.yarn_log_multiplier", 1.0)
    scales = {"mscale": exponent, "mscale_all_dim": exponent, "llama_4_scaling_beta": beta}
    return {"rope_parameters": header.rotary() | scales, "sliding_window": None}


def _stablelm(header: GgufHeader) -> Config:
    return {
        "use_qkv_bias": header.has("attn_q.bias"),
        "qk_layernorm": header.has("attn_q_norm.weight"),
        "use_parallel_residual": header.get("use_parallel_residual", not header.has("ffn_norm.weight")),
    }


def _falcon(header: GgufHeader) -> Config:
    heads, groups = header["attention.head_count"], header.num_kv_heads
    two_norms = header.has("attn_norm_2.weight")
    return {
        "model_type": "falcon",
        "max_position_embeddings": header["context_length"],
        "hidden_size": header["embedding_length"],
        "ffn_hidden_size": header["feed_forward_length"],
        "num_hidden_layers": header["block_count"],
        "num_attention_heads": heads,
        "num_kv_heads": groups,
        "layer_norm_epsilon": header["attention.layer_norm_epsilon"],
        "rope_parameters": header.rotary(),
        "new_decoder_architecture": two_norms or groups not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "multi_query": groups == 1,
        "parallel_attn": True,
        "bias": header.has("attn_qkv.bias"),
        "alibi": False,
    }


def _lfm2(header: GgufHeader) -> Config:
    return {
        "norm_eps": header["attention.layer_norm_rms_epsilon"],
        "conv_L_cache": header["shortconv.l_cache"],
        "conv_bias": header.has("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
        # A layer without heads of keys has no attention.
        "layer_types": ["full_attention" if count else "conv" for count in header["attention.head_count_kv"]],
    }


def _lfm2_moe(header: GgufHeader) -> Config:
    return _lfm2(header) | {
        "num_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": header.outputs("ffn_up_exps"),
        "num_dense_layers": header["leading_dense_block_count"],
    }


def _qwen35(header: GgufHeader) -> Config:
    num_layers = header["block_count"] - header.get("nextn_predict_layers", 0)
    period, heads = header.get("full_attention_interval", 4), header["ssm.time_step_rank"]
    has_state = [index % period != period - 1 for index in range(num_layers)]
    has_state = header.get("attention.recurrent_layers", has_state)[:num_layers]
    return {
        "num_hidden_layers": num_layers,
        "layer_types": ["linear_attention" if state else "full_attention" for state in has_state],
        "linear_conv_kernel_dim": header["ssm.conv_kernel"],
        "linear_num_key_heads": header["ssm.group_count"],
        "linear_key_head_dim": header["ssm.state_size"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": header["ssm.inner_size"] // heads,
    }


def _qwen35_moe(header: GgufHeader) -> Config:
    return _qwen35(header) | {
        "num_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": header.outputs("ffn_up_exps"),
        "shared_expert_intermediate_size": header.outputs("ffn_up_shexp"),
    }


def _falcon_h1(header: GgufHeader) -> Config:
    """Return the fields of Mamba 2; the converter has multiplied the weights by the scales."""
    return _mamba2(header) | {
        "mamba_d_ssm": header["ssm.inner_size"],
        "projectors_bias": header.has("ssm_out.bias"),
        "mamba_rms_norm": header.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _mamba2(header: GgufHeader) -> Config:
    heads = header["ssm.time_step_rank"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": header["ssm.inner_size"] // heads,
        "mamba_d_state": header["ssm.state_size"],
        "mamba_n_groups": header["ssm.group_count"],
        "mamba_d_conv": header["ssm.conv_kernel"],
        "mamba_conv_bias": header.has("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has("ssm_in.bias"),
    }


def _granite_hybrid(header: GgufHeader) -> Config:
    has_experts = bool(header.get("expert_count"))
    return {
        **_granite(header),
        **_mamba2(header),
        "mamba_expand": header["ssm.inner_size"] // header["embedding_length"],
        "layer_types": ["attention" if count else "mamba" for count in header["attention.head_count_kv"]],
        "position_embedding_type": "rope" if header.get("rope.scaling.finetuned") else "nope",
        "shared_intermediate_size": header.outputs("ffn_up_shexp" if has_experts else "ffn_up"),
        **(_local_experts(header) if has_experts else {"num_local_experts": 0}),
    }


def _nemotron_h(header: GgufHeader) -> Config:
    """Return the fields of Nemotron H.

    A file has no least step, and llama.cpp none; transformers' default is that of the checkpoints.
    """
    predictors = header.get("nextn_predict_layers", 0)
    num_layers = header["block_count"] - predictors
    parts = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    kinds = [
        next((kind for part, kind in parts.items() if f"blk.{layer}.{part}.weight" in header.tensors), "mlp")
        for layer in range(num_layers)
    ]
    heads = header["ssm.time_step_rank"]
    config = {
        "model_type": "nemotron_h",
        "max_position_embeddings": header["context_length"],
        "hidden_size": header["embedding_length"],
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": predictors,
        "layers_block_type": kinds,
        "num_attention_heads": header["attention.head_count"],
        "num_key_value_heads": header.num_kv_heads,
        "head_dim": header.head_dim,
        # The converter writes the epsilon of its RMS norms under the name of layer norms.
        "layer_norm_epsilon": header["attention.layer_norm_epsilon"],
        "attention_bias": header.has("attn_q.bias"),
        "mlp_bias": header.has("ffn_up.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": header["ssm.inner_size"] // heads,
        "ssm_state_size": header["ssm.state_size"],
        "n_groups": header["ssm.group_count"],
        "conv_kernel": header["ssm.conv_kernel"],
        "use_conv_bias": header.has("ssm_conv1d.bias"),
        "use_bias": header.has("ssm_in.bias"),
    }
    if "mlp" in kinds:
        config["intermediate_size"] = header.outputs("ffn_up")
    if "moe" not in kinds:
        return config
    return config | {
        "n_routed_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": header.outputs("ffn_up_exps"),
        "moe_shared_expert_intermediate_size": header.outputs("ffn_up_shexp"),
        "moe_latent_size": header.get("moe_latent_size"),
        "routed_scaling_factor": header.get("expert_weights_scale", 1.0),
        "norm_topk_prob": header.get("expert_weights_norm", False),
        "n_group": header.get("expert_group_count") or 1,
        "topk_group": header.get("expert_group_used_count") or 1,
    }


def _xielu(header: GgufHeader) -> Mapping[str, FloatArray]:
    """Return the parameters of Apertus' activation, which are metadata."""
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": np.array([value] if name != "beta" else value, np.float32)
        for name in ("alpha_p", "alpha_n", "beta")
        for layer, value in enumerate(header.metadata[f"xielu.{name}"])
    }


def _pairs_to_halves(name: str, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Undo the permutation of rotary dimensions, which pairs neighbours where Llama pairs halves.

    Source: `LlamaModel.permute`; this is its inverse.
    """
    heads = {".q_proj.": config["num_attention_heads"], ".k_proj.": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:
            rows = np.arange(count * config["head_dim"]).reshape(count, -1, 2)
            return rows.swapaxes(1, 2).reshape(-1)
    return None


def _head_by_head(
    name: str, config: Mapping[str, Any], *, num_heads: str = "num_attention_heads", num_kv_heads: str = ""
) -> NDArray[np.int64] | None:
    """Undo the stacking of queries, keys and values, which alternate by heads of keys in the folder.

    Source: `BloomModel`, `GPTNeoXModel` and `FalconModel`.
    """
    if ".query_key_value." not in name:
        return None
    heads = config[num_heads]
    groups, size = config[num_kv_heads] if num_kv_heads else heads, config["hidden_size"] // heads
    parts, first = [], 0
    for count in (heads, groups, groups):
        parts.append(np.arange(first, first + count * size).reshape(groups, -1))
        first += count * size
    return np.concatenate(parts, axis=1).reshape(-1)


def _tiled_rows(name: str, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Undo the order of heads of values, which follow each other by heads of keys in a folder.

    Source: `_LinearAttentionVReorderBase`.
    """
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, keys = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]

    def by_group(size: int) -> NDArray[np.int64]:
        return np.arange(heads * size).reshape(-1, groups, size).swapaxes(0, 1).reshape(-1)

    match name.partition(".linear_attn.")[2].split("."):
        case ["in_proj_qkv" | "conv1d", _]:
            return np.concatenate([np.arange(keys), keys + by_group(size)])
        case ["in_proj_z", _]:
            return by_group(size)
        case ["in_proj_a" | "in_proj_b", _] | ["A_log" | "dt_bias"]:
            return by_group(1)
    return None


def _tiled_columns(name: str, config: Mapping[str, Any]) -> NDArray[np.int64] | None:
    groups, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    if ".linear_attn.out_proj." not in name:
        return None
    columns = np.arange(config["linear_num_value_heads"] * size)
    return columns.reshape(groups, -1, size).swapaxes(0, 1).reshape(-1)


def _by_head_of_keys(config: Mapping[str, Any], sizes: Sequence[int], parts: slice) -> NDArray[np.int64]:
    """Return the rows of some parts, each of all heads, where the rows of a head follow those of the other.

    `sizes` are the rows of each part in a head.
    """
    heads, ends = config["linear_num_key_heads"], np.cumsum(sizes)
    rows = np.arange(heads * ends[-1]).reshape(heads, -1)
    by_part = np.split(rows, ends[:-1], axis=1)[parts]
    return np.concatenate([part.reshape(-1) for part in by_part])


def _betas_and_steps(config: Mapping[str, Any], *, parts: slice) -> NDArray[np.int64]:
    heads = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    return _by_head_of_keys(config, (heads, heads), parts)


def _keys_and_values(config: Mapping[str, Any], *, parts: slice) -> NDArray[np.int64]:
    keys, heads = config["linear_key_head_dim"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"] // config["linear_num_key_heads"]
    return _by_head_of_keys(config, (keys, keys, values, values), parts)


# Qwen 3 Next has these in one module, head by head, and Qwen 3.5 has them in two. The first files had
# queries, keys, values and gates in one tensor too.
_QWEN3_NEXT_PARTS = MappingProxyType(
    {
        "ssm_ba": {
            "linear_attn.in_proj_b": partial(_betas_and_steps, parts=slice(1)),
            "linear_attn.in_proj_a": partial(_betas_and_steps, parts=slice(1, 2)),
        },
        "ssm_in": {
            "linear_attn.in_proj_qkv": partial(_keys_and_values, parts=slice(3)),
            "linear_attn.in_proj_z": partial(_keys_and_values, parts=slice(3, 4)),
        },
    }
)


def _row(
    architecture: str,
    *,
    model_type: str,
    pairs: bool = False,
    tensors: Callable[[GgufHeader], Mapping[str, FloatArray]] = lambda _header: {},
    **options: Any,
) -> GgufArchitecture:
    """Return an architecture with Llama's fields. `pairs`: the converter permutes queries and keys."""
    return GgufArchitecture(
        architecture=f"{architecture}ForCausalLM",
        config=partial(_llama, model_type=model_type, **options),
        row_order=_pairs_to_halves if pairs else _as_in_the_file,
        tensors=tensors,
    )


_NEMOTRON_H = GgufArchitecture(
    architecture="NemotronHForCausalLM", config=_nemotron_h, row_order=_pairs_to_halves
)

GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "apertus": _row("Apertus", model_type="apertus", tensors=_xielu),
        "arcee": _row("Arcee", model_type="arcee", pairs=True),
        "bloom": GgufArchitecture(
            architecture="BloomForCausalLM",
            config=_bloom,
            row_order=partial(_head_by_head, num_heads="n_head"),
        ),
        "chatglm": _row("Glm", model_type="glm"),
        "cohere2": _row("Cohere2", model_type="cohere2", epsilon="layer_norm_eps", of=_cohere2),
        "command-r": _row("Cohere", model_type="cohere", epsilon="layer_norm_eps", of=_cohere),
        "deepseek2": _row("DeepseekV3", model_type="deepseek_v3", of=_deepseek2),
        "ernie4_5": _row(
            "Ernie4_5", model_type="ernie4_5", of=lambda header: {"use_bias": header.has("attn_q.bias")}
        ),
        "ernie4_5-moe": _row("Ernie4_5_Moe", model_type="ernie4_5_moe", of=_ernie_moe),
        "exaone4": _row("Exaone4", model_type="exaone4", of=_windows),
        "falcon": GgufArchitecture(
            architecture="FalconForCausalLM",
            config=_falcon,
            row_order=partial(_head_by_head, num_kv_heads="num_kv_heads"),
        ),
        "falcon-h1": _row("FalconH1", model_type="falcon_h1", of=_falcon_h1),
        "gemma": _row("Gemma", model_type="gemma"),
        "gemma2": _row("Gemma2", model_type="gemma2", of=_gemma2),
        "gemma3": _row("Gemma3", model_type="gemma3_text", of=_gemma3),
        "gemma3n": _row("Gemma3n", model_type="gemma3n_text", of=_gemma3n),
        "gemma4": _row("Gemma4", model_type="gemma4_text", of=_gemma4),
        "glm4": _row("Glm4", model_type="glm4"),
        "glm4moe": _row("Glm4Moe", model_type="glm4_moe", of=_glm4_moe),
        "gpt-oss": _row("GptOss", model_type="gpt_oss", of=_gpt_oss),
        "gpt2": GgufArchitecture(
            architecture="GPT2LMHeadModel",
            config=_gpt2,
            transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        ),
        "gptneox": GgufArchitecture(
            architecture="GPTNeoXForCausalLM", config=_gptneox, row_order=_head_by_head
        ),
        "granite": _row("Granite", model_type="granite", pairs=True, of=_granite),
        "granitemoe": _row("GraniteMoe", model_type="granitemoe", pairs=True, of=_granite_moe),
        "granitehybrid": _row(
            "GraniteMoeHybrid", model_type="granitemoehybrid", pairs=True, of=_granite_hybrid
        ),
        "hunyuan-dense": _row("HunYuanDenseV1", model_type="hunyuan_v1_dense"),
        "lfm2": _row("Lfm2", model_type="lfm2", of=_lfm2),
        "lfm2moe": _row("Lfm2Moe", model_type="lfm2_moe", of=_lfm2_moe),
        "llama": _row("Llama", model_type="llama", pairs=True, of=_llama_or_mixtral),
        "llama4": _row("Llama4", model_type="llama4_text", of=_llama4),
        "minimax-m2": _row(
            "MiniMaxM2",
            model_type="minimax_m2",
            of=lambda header: _local_experts(header) | {"rotary_dim": header["rope.dimension_count"]},
        ),
        "mistral3": _row("Ministral3", model_type="ministral3", pairs=True, of=_mistral3),
        "nemotron": _row("Nemotron", model_type="nemotron", epsilon="norm_eps"),
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H,
        "olmo": _row(
            "Olmo",
            model_type="olmo",
            pairs=True,
            epsilon="layer_norm_eps",
            of=lambda header: {"clip_qkv": header.get("attention.clamp_kqv")},
        ),
        "olmo2": _row("Olmo2", model_type="olmo2", of=_olmo2),
        "olmoe": _row("Olmoe", model_type="olmoe", of=_olmoe),
        "phi2": _row("Phi", model_type="phi", epsilon="layer_norm_eps"),
        "phi3": _row("Phi3", model_type="phi3", of=_phi3),
        "phimoe": _row("Phimoe", model_type="phimoe", of=_phimoe),
        "qwen2": _row("Qwen2", model_type="qwen2"),
        "qwen2moe": _row(
            "Qwen2Moe", model_type="qwen2_moe", of=partial(_qwen_moe, normalised=False, shared=True)
        ),
        "qwen3": _row("Qwen3", model_type="qwen3"),
        "qwen3moe": _row("Qwen3Moe", model_type="qwen3_moe", of=partial(_qwen_moe, normalised=True)),
        # A Qwen 3 Next whose parts are apart is a Qwen 3.5, as in llama.cpp, whose router it has too.
        "qwen3next": replace(
            _row("Qwen3_5Moe", model_type="qwen3_5_moe_text", of=_qwen35_moe), parts=_QWEN3_NEXT_PARTS
        ),
        "qwen35": replace(
            _row("Qwen3_5", model_type="qwen3_5_text", of=_qwen35),
            row_order=_tiled_rows,
            column_order=_tiled_columns,
        ),
        "qwen35moe": replace(
            _row("Qwen3_5Moe", model_type="qwen3_5_moe_text", of=_qwen35_moe),
            row_order=_tiled_rows,
            column_order=_tiled_columns,
        ),
        "seed_oss": _row(
            "SeedOss",
            model_type="seed_oss",
            of=lambda header: {"attention_out_bias": header.has("attn_output.bias")},
        ),
        "smollm3": _row("SmolLM3", model_type="smollm3", pairs=True, of=_smollm3),
        "stablelm": _row("StableLm", model_type="stablelm", epsilon="layer_norm_eps", of=_stablelm),
        "starcoder2": _row(
            "Starcoder2",
            model_type="starcoder2",
            epsilon="norm_epsilon",
            of=lambda header: {"use_bias": header.has("attn_q.bias"), "sliding_window": None},
        ),
    }
)
