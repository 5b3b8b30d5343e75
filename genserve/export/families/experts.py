"""The families with a mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from genserve.export.decoder import Decoder, Experts, Groups, HeadNorm, Latent, QueryScale, Router
from genserve.export.decoder_weights import (
    TensorMap,
    TensorSource,
    Unpack,
    half,
    latent_keys,
    latent_queries,
    latent_values,
    latents,
)
from genserve.export.families.family import Family, require
from genserve.export.families.llama import (
    HEAD_NORM_NAMES,
    LLAMA_NAMES,
    describe_granite,
    describe_llama,
    with_attention,
    without_names,
)
from genserve.sampling.logits_array import FloatArray

# A layer without experts has the MLP of Llama.
EXPERTS_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
        "layers.{}.mlp.experts.{e}.gate": "model.layers.{}.mlp.experts.{e}.gate_proj",
        "layers.{}.mlp.experts.{e}.up": "model.layers.{}.mlp.experts.{e}.up_proj",
        "layers.{}.mlp.experts.{e}.down": "model.layers.{}.mlp.experts.{e}.down_proj",
    }
)


def shared_names(module: str) -> TensorMap:
    """Return the names of the expert of all tokens."""
    return {f"layers.{{}}.mlp.shared.{part}": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


def choice_name(tensor: str) -> TensorMap:
    """Return the name of what is added to the scores for the choice."""
    source = TensorSource((tensor,), kind="tensor", unpack=lambda bias, _decoder: bias.reshape(-1))
    return {"layers.{}.mlp.choice": source}


def with_experts(decoder: Decoder, experts: Experts, *, dense: Container[int] = ()) -> Decoder:
    """Return the decoder with experts in all layers but those with the indices `dense`."""
    layers = (
        layer if index in dense else replace(layer, experts=experts)
        for index, layer in enumerate(decoder.layers)
    )
    return replace(decoder, layers=tuple(layers))


def softmax(count: int, config: Any, *, normalised: bool, shared: bool = False) -> Experts:
    """Return experts that are chosen by their softmax."""
    router = Router(score="softmax", normalise=0.0 if normalised else None)
    return Experts(count=count, top_k=config.num_experts_per_tok, router=router, shared=shared)


# Mixtral
def _describe_mixtral(config: Any) -> Decoder:
    return with_experts(describe_llama(config), softmax(config.num_local_experts, config, normalised=True))


_MIXTRAL_PARTS = {
    ".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."
}

MIXTRAL = Family(
    name="mixtral",
    describe=_describe_mixtral,
    names=EXPERTS_NAMES,
    prefix="model.",
    renamed=MappingProxyType(_MIXTRAL_PARTS),
)


# Qwen 2 and 3: some layers may have one MLP; Qwen 2 has an expert of all tokens, with a score.
def dense_layers(config: Any) -> frozenset[int]:
    """Return the layers of a Qwen config that have one MLP."""
    step, listed = config.decoder_sparse_step, config.mlp_only_layers
    return frozenset(
        index for index in range(config.num_hidden_layers) if index in listed or (index + 1) % step
    )


def _describe_qwen(config: Any, *, shared: bool, head_norm: HeadNorm | None) -> Decoder:
    decoder = with_attention(describe_llama(config), head_norm=head_norm)
    experts = softmax(config.num_experts, config, normalised=config.norm_topk_prob, shared=shared)
    return with_experts(decoder, experts, dense=dense_layers(config))


QWEN2_MOE = Family(
    name="qwen2_moe",
    describe=partial(_describe_qwen, shared=True, head_norm=None),
    names=MappingProxyType(
        {
            **EXPERTS_NAMES,
            **shared_names("model.layers.{}.mlp.shared_expert"),
            "layers.{}.mlp.shared.score": "model.layers.{}.mlp.shared_expert_gate",
        }
    ),
    prefix="model.",
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    describe=partial(_describe_qwen, shared=False, head_norm=HeadNorm()),
    names=MappingProxyType({**EXPERTS_NAMES, **HEAD_NORM_NAMES}),
    prefix="model.",
)


# OLMoE: norms of the queries and keys of all heads.
def _describe_olmoe(config: Any) -> Decoder:
    decoder = with_attention(describe_llama(config), head_norm=HeadNorm(joint=True), clip=config.clip_qkv)
    return with_experts(decoder, softmax(config.num_experts, config, normalised=config.norm_topk_prob))


OLMOE = Family(
    name="olmoe",
    describe=_describe_olmoe,
    names=MappingProxyType({**EXPERTS_NAMES, **HEAD_NORM_NAMES}),
    prefix="model.",
)


def _whole(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return tensor


def stacked_experts(module: str, *, gate: Unpack, up: Unpack, down: Unpack = _whole) -> TensorMap:
    """Return the names of experts that a checkpoint in safetensors has as stacks, and how to unpack them."""
    unpacking = {"gate": gate, "up": up, "down": down}
    stacks = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
    return {
        f"layers.{{}}.mlp.experts.{{e}}.{part}": TensorSource(
            (f"{module}.{{e}}.{part}_proj", f"{module}.{stack}"), kind="stack", unpack=unpacking[part]
        )
        for part, stack in stacks.items()
    }


def _transposed_half(index: Literal[0, 1]) -> Unpack:
    """Unpack the first or the second half of the outputs of a weight that is transposed."""

    def unpack(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
        middle = (tensor.shape[-1] + 1) // 2
        return tensor.T[:middle] if index == 0 else tensor.T[middle:]

    return unpack


def _every(start: int, step: int) -> Unpack:
    """Unpack some rows of a weight that is transposed, or some numbers of a bias."""
    return lambda tensor, _decoder: tensor.T[start::step]


# Granite: stacks of all experts, optionally with an expert of all tokens.
_HALVES: Mapping[str, Literal[0, 1]] = MappingProxyType({"gate": 0, "up": 1})
_GRANITE_SHARED = "model.layers.{}.shared_mlp"
_GRANITE_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.router",
        **stacked_experts("model.layers.{}.block_sparse_moe.experts", gate=half(0), up=half(1)),
        **{
            f"layers.{{}}.mlp.shared.{part}": TensorSource(
                (f"{_GRANITE_SHARED}.{part}_proj", f"{_GRANITE_SHARED}.input_linear.weight"),
                unpack=half(index),
                kind="stack",
            )
            for part, index in _HALVES.items()
        },
        "layers.{}.mlp.shared.down": f"{_GRANITE_SHARED}.output_linear",
    }
)


def granite_experts(config: Any) -> Experts:
    """Return the experts of a Granite config."""
    return Experts(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=Router(score="softmax_of_top"),
        shared=getattr(config, "shared_intermediate_size", 0) > 0,
    )


def _describe_granite(config: Any) -> Decoder:
    return with_experts(describe_granite(config), granite_experts(config))


GRANITE_MOE = Family(
    name="granitemoe",
    describe=_describe_granite,
    names=_GRANITE_NAMES,
    prefix="model.",
    renamed=MappingProxyType(
        {
            ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
            ".router.layer.": ".router.",
        }
    ),
)


# Phi-3.5-MoE: layer norms, and its own choice of two experts.
def _describe_phimoe(config: Any) -> Decoder:
    decoder = describe_llama(config, norm="layer")
    parameters = config.rope_parameters
    if parameters["rope_type"] != "default":
        scaled = replace(decoder.rotaries[0], scale=parameters["short_mscale"])
        decoder = with_attention(decoder, rotary=scaled)
    router = Router(score="sparsemixer", jitter=config.router_jitter_noise)
    count, top_k = config.num_local_experts, config.num_experts_per_tok
    return with_experts(decoder, Experts(count=count, top_k=top_k, router=router))


PHIMOE = Family(
    name="phimoe",
    describe=_describe_phimoe,
    names=MappingProxyType({**EXPERTS_NAMES, "layers.{}.mlp.router": "model.layers.{}.mlp.router"}),
    prefix="model.",
    renamed=MappingProxyType({**_MIXTRAL_PARTS, ".mlp.gate.": ".mlp.router."}),
)


def sigmoid_in_groups(config: Any) -> Router:
    """Return the router of a config with the fields of DeepSeek V3."""
    groups = Groups(count=config.n_group, kept=config.topk_group, top=2) if config.n_group > 1 else None
    return Router(
        score="sigmoid",
        groups=groups,
        normalise=1e-20 if config.norm_topk_prob else None,
        scale=config.routed_scaling_factor,
    )


def routed_experts(config: Any, router: Router) -> Experts:
    """Return the experts of a config with the fields of DeepSeek, one of which reads all tokens."""
    count, top_k = config.n_routed_experts, config.num_experts_per_tok
    return Experts(count=count, top_k=top_k, router=router, shared=True)


# GLM 4.5: groups of experts, which are chosen by their scores plus a bias; the first layers have one MLP.
def _describe_glm4_moe(config: Any) -> Decoder:
    decoder = describe_llama(config, partial_rotary=True)
    if config.use_qk_norm:
        decoder = with_attention(decoder, head_norm=HeadNorm())
    experts = routed_experts(config, sigmoid_in_groups(config))
    return with_experts(decoder, experts, dense=range(config.first_k_dense_replace))


GLM4_MOE = Family(
    name="glm4_moe",
    describe=_describe_glm4_moe,
    names=MappingProxyType(
        {
            **EXPERTS_NAMES,
            **HEAD_NORM_NAMES,
            **shared_names("model.layers.{}.mlp.shared_experts"),
            **choice_name("model.layers.{}.mlp.gate.e_score_correction_bias"),
        }
    ),
    prefix="model.",
)


# ERNIE 4.5: the choice by softmax plus a bias; some layers have one MLP.
def _describe_ernie(config: Any) -> Decoder:
    has_experts = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    dense = [
        index
        for index in range(config.num_hidden_layers)
        if index not in has_experts or (index + 1) % config.moe_layer_interval
    ]
    experts = softmax(config.num_experts, config, normalised=True, shared=config.moe_num_shared_experts > 0)
    return with_experts(describe_llama(config, neighbours=True), experts, dense=dense)


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    describe=_describe_ernie,
    names=MappingProxyType(
        {
            **EXPERTS_NAMES,
            **shared_names("model.layers.{}.mlp.shared_experts"),
            **choice_name("model.layers.{}.mlp.gate.moe_statics.e_score_correction_bias"),
        }
    ),
    prefix="model.",
    renamed=MappingProxyType({".mlp.moe_statics.": ".mlp.gate.moe_statics."}),
)


# gpt-oss: sinks, limited activations, biases everywhere, and transposed stacks in which gates and the values
# that they scale alternate.
_GPT_OSS_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.sinks": TensorSource(("model.layers.{}.self_attn.sinks",), kind="tensor"),
        "layers.{}.mlp.router": "model.layers.{}.mlp.router",
        **stacked_experts(
            "model.layers.{}.mlp.experts", gate=_every(0, 2), up=_every(1, 2), down=_every(0, 1)
        ),
    }
)


def _describe_gpt_oss(config: Any) -> Decoder:
    limits = config.swiglu_alpha, config.swiglu_limit
    require(limits == (1.702, 7.0), found=f"swiglu_alpha and swiglu_limit {limits}", known="1.702 and 7.0")
    decoder = describe_llama(config)
    experts = Experts(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=Router(score="softmax_of_top"),
    )
    layers = (replace(layer, activation="clamped_swiglu") for layer in decoder.layers)
    return with_experts(replace(decoder, layers=tuple(layers)), experts)


GPT_OSS = Family(
    name="gpt_oss",
    describe=_describe_gpt_oss,
    names=_GPT_OSS_NAMES,
    prefix="model.",
    transposed_stacks="in turn",
)


# Llama 4: chunks, except in every fourth layer, which has no rotary positions but growing queries; experts
# whose weights, the sigmoids of the router's logits, multiply what they read; and an expert of all tokens.
_LLAMA4_MLP = "model.layers.{}.feed_forward"
_LLAMA4_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        **{
            f"layers.{{}}.attention.{part}_norm": TensorSource(("",), kind="ones")
            for part in ("query", "key")
        },
        **{f"layers.{{}}.mlp.{part}": f"{_LLAMA4_MLP}.{part}_proj" for part in ("gate", "up", "down")},
        **shared_names(f"{_LLAMA4_MLP}.shared_expert"),
        "layers.{}.mlp.router": f"{_LLAMA4_MLP}.router",
        **stacked_experts(
            f"{_LLAMA4_MLP}.experts", gate=_transposed_half(0), up=_transposed_half(1), down=_every(0, 1)
        ),
    }
)
_LLAMA4_CONTEXT = 1 << 18   # tokens; the tables of angles of all 10,485,760 of Scout would take 5.4 GB


def _describe_llama4(config: Any) -> Decoder:
    config.layer_types = None   # they follow from the other fields, and name no windows
    decoder = describe_llama(config, neighbours=True)
    scale = None
    if config.attn_temperature_tuning:
        scale = QueryScale(beta=config.attn_scale, length=config.floor_scale, first=1)
    # The norm follows rotary positions; without a weight it is the same before them, where our kernel has it.
    norm = HeadNorm() if config.use_qk_norm else None
    layers = (
        replace(
            layer,
            attention=replace(attention, query_scale=scale)
            if attention.rotary is None
            else replace(attention, head_norm=norm, chunk=config.attention_chunk_size),
        )
        for layer in decoder.layers
        if (attention := layer.attention) is not None
    )
    experts = Experts(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        router=Router(score="sigmoid_of_top", scales_inputs=True),
        shared=True,
    )
    decoder = replace(
        decoder, layers=tuple(layers), context_length=min(decoder.context_length, _LLAMA4_CONTEXT)
    )
    dense = set(range(config.num_hidden_layers)) - set(config.moe_layers)
    return with_experts(decoder, experts, dense=dense)


LLAMA4 = Family(
    name="llama4",
    describe=_describe_llama4,
    names=_LLAMA4_NAMES,
    prefix="model.",
    transposed_stacks="halves",
)


# MiniMax M2: the choice by sigmoid plus a bias, and norms of the queries and keys of all heads.
def _describe_minimax_m2(config: Any) -> Decoder:
    decoder = describe_llama(config, partial_rotary=True)
    router = Router(score="sigmoid", normalise=0.0)
    count, top_k = config.num_local_experts, config.num_experts_per_tok
    experts = Experts(count=count, top_k=top_k, router=router)
    return with_experts(with_attention(decoder, head_norm=HeadNorm(joint=True)), experts)


MINIMAX_M2 = Family(
    name="minimax_m2",
    describe=_describe_minimax_m2,
    names=MappingProxyType(
        {
            **EXPERTS_NAMES,
            **HEAD_NORM_NAMES,
            **choice_name("model.layers.{}.mlp.e_score_correction_bias"),
        }
    ),
    prefix="model.",
    renamed=MappingProxyType(_MIXTRAL_PARTS),
)


_ATTENTION = "model.layers.{}.self_attn"


# DeepSeek: keys and values from one vector; groups of experts; the first layers have one MLP.
_DEEPSEEK_NAMES: TensorMap = MappingProxyType(
    {
        **without_names(
            EXPERTS_NAMES, *(f"layers.{{}}.attention.{part}" for part in ("query", "key", "value"))
        ),
        **shared_names("model.layers.{}.mlp.shared_experts"),
        "layers.{}.attention.latent_query": TensorSource(
            ("model.layers.{}.self_attn.q_proj",), unpack=latent_queries
        ),
        "layers.{}.attention.query_a": "model.layers.{}.self_attn.q_a_proj",
        "layers.{}.attention.query_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
        "layers.{}.attention.query_b": TensorSource(
            ("model.layers.{}.self_attn.q_b_proj",), unpack=latent_queries
        ),
        "layers.{}.attention.latent": TensorSource(
            ("model.layers.{}.self_attn.kv_a_proj_with_mqa",), unpack=latents
        ),
        "layers.{}.attention.latent_norm": "model.layers.{}.self_attn.kv_a_layernorm",
        **{
            f"layers.{{}}.attention.latent_{part}": TensorSource(
                (f"{_ATTENTION}.{part[0]}_b_proj", f"{_ATTENTION}.kv_b_proj.weight"),
                kind="stack",
                unpack=unpack,
            )
            for part, unpack in (("key", latent_keys), ("value", latent_values))
        },
    }
)


def _describe_deepseek(config: Any, router: Router) -> Decoder:
    decoder = describe_llama(config)
    rope, nope, rank = config.qk_rope_head_dim, config.qk_nope_head_dim, config.kv_lora_rank
    scale = (rope + nope) ** -0.5
    parameters = config.rope_parameters
    if parameters["rope_type"] != "default" and parameters.get("mscale_all_dim"):
        factor = parameters["factor"]
        scale *= (0.1 * parameters["mscale_all_dim"] * np.log(factor) + 1 if factor > 1 else 1.0) ** 2
    decoder = with_attention(
        decoder,
        num_kv_heads=1,
        head_dim=rope + rank,
        scale=float(scale),
        rotary=replace(decoder.rotaries[0], neighbours=getattr(config, "rope_interleave", True)),
        latent=Latent(
            rank=rank,
            rope=rope,
            nope=nope,
            value=config.v_head_dim,
            query_rank=config.q_lora_rank,
            norm_epsilon=1e-6,  # the default of transformers' norm; the config's field is for other norms
        ),
    )
    experts = routed_experts(config, router)
    return with_experts(decoder, experts, dense=range(config.first_k_dense_replace))


def _describe_deepseek_v2(config: Any) -> Decoder:
    method = config.topk_method
    known = ("greedy", "group_limited_greedy")
    require(method in known, found=f"topk_method {method!r}", known=" and ".join(known))
    groups = None
    if method == "group_limited_greedy":
        groups = Groups(count=config.n_group, kept=config.topk_group, top=1)
    return _describe_deepseek(
        config, Router(score="softmax", groups=groups, scale=config.routed_scaling_factor)
    )


def _describe_deepseek_v3(config: Any) -> Decoder:
    return _describe_deepseek(config, sigmoid_in_groups(config))


DEEPSEEK_V2 = Family(
    name="deepseek_v2", describe=_describe_deepseek_v2, names=_DEEPSEEK_NAMES, prefix="model."
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    describe=_describe_deepseek_v3,
    names=MappingProxyType(
        {**_DEEPSEEK_NAMES, **choice_name("model.layers.{}.mlp.gate.e_score_correction_bias")}
    ),
    prefix="model.",
)
