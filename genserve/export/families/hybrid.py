"""The families with recurrent states in some layers, in place of attention or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from genserve.export.decoder import (
    Attention,
    Decoder,
    Experts,
    HeadNorm,
    Layer,
    LinearAttention,
    Router,
    ShortConv,
)
from genserve.export.decoder_weights import TensorMap, TensorSource, Unpack, half
from genserve.export.families.experts import (
    GRANITE_MOE,
    choice_name,
    dense_layers,
    granite_experts,
    routed_experts,
    shared_names,
    sigmoid_in_groups,
    softmax,
    stacked_experts,
    with_experts,
)
from genserve.export.families.family import Family, read_activation, require
from genserve.export.families.llama import (
    HEAD_NORM_NAMES,
    LLAMA_NAMES,
    describe_granite,
    describe_llama,
    with_attention,
    without_names,
)
from genserve.sampling.logits_array import FloatArray

_ATTENTION = ("attention", "full_attention")
_MIXERS = ("conv", "linear_attention", "mamba")


def _with_mixers(
    decoder: Decoder, kinds: Sequence[str], mixer: ShortConv | LinearAttention
) -> Decoder:
    """Return the decoder with a mixer in place of attention in the layers that have none."""
    others = sorted(set(kinds).difference(_ATTENTION, _MIXERS))
    require(not others, found=f"layers of type {', '.join(others)}", known=", ".join(_ATTENTION + _MIXERS))
    layers = (
        layer if kind in _ATTENTION else replace(layer, attention=None, mixer=mixer)
        for layer, kind in zip(decoder.layers, kinds, strict=True)
    )
    return replace(decoder, layers=tuple(layers))


def _channels(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    """Unpack the weight [channels, 1, kernel_size] of a convolution of each channel, or its bias."""
    return tensor.reshape(len(tensor), -1) if tensor.ndim == 3 else tensor


# LFM 2: a short convolution in most layers.
_LFM2_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.norm": "model.layers.{}.operator_norm",
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_layernorm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_layernorm",
        "layers.{}.attention.output": "model.layers.{}.self_attn.out_proj",
        "layers.{}.mixer.norm": "model.layers.{}.operator_norm",
        "layers.{}.mixer.input": "model.layers.{}.conv.in_proj",
        "layers.{}.mixer.conv": TensorSource(("model.layers.{}.conv.conv",), unpack=_channels),
        "layers.{}.mixer.output": "model.layers.{}.conv.out_proj",
        "layers.{}.mlp.norm": "model.layers.{}.ffn_norm",
        "layers.{}.mlp.gate": "model.layers.{}.feed_forward.w1",
        "layers.{}.mlp.up": "model.layers.{}.feed_forward.w3",
        "layers.{}.mlp.down": "model.layers.{}.feed_forward.w2",
        "norm": "model.embedding_norm",
    }
)


def _describe_lfm2(config: Any) -> Decoder:
    config.hidden_act = "silu"      # transformers' code has it; the config has no field for it
    decoder = with_attention(describe_llama(config, epsilon="norm_eps"), head_norm=HeadNorm())
    return _with_mixers(decoder, config.layer_types, ShortConv(kernel_size=config.conv_L_cache))


LFM2 = Family(name="lfm2", describe=_describe_lfm2, names=_LFM2_NAMES, prefix="model.")


# LFM 2 with experts: the choice by sigmoid plus a bias; the first layers have one MLP.
def _describe_lfm2_moe(config: Any) -> Decoder:
    router = Router(
        score="sigmoid",
        normalise=1e-6 if config.norm_topk_prob else None,
        scale=config.routed_scaling_factor,
    )
    experts = Experts(count=config.num_experts, top_k=config.num_experts_per_tok, router=router)
    require(config.use_expert_bias, found="use_expert_bias false", known="true")
    return with_experts(_describe_lfm2(config), experts, dense=range(config.num_dense_layers))


LFM2_MOE = Family(
    name="lfm2_moe",
    describe=_describe_lfm2_moe,
    names=MappingProxyType(
        {
            **_LFM2_NAMES,
            "layers.{}.mlp.router": "model.layers.{}.feed_forward.gate",
            **choice_name("model.layers.{}.feed_forward.expert_bias"),
            "layers.{}.mlp.experts.{e}.gate": "model.layers.{}.feed_forward.experts.{e}.w1",
            "layers.{}.mlp.experts.{e}.up": "model.layers.{}.feed_forward.experts.{e}.w3",
            "layers.{}.mlp.experts.{e}.down": "model.layers.{}.feed_forward.experts.{e}.w2",
        }
    ),
    prefix="model.",
)


# The parts of stacked projections and convolutions, in their order.
_QKV = ("query", "key", "value")
_QKVZ = ("query", "key", "value", "gate")
_BA = ("beta", "step")
_MAMBA2 = ("gate", "value", "key", "query", "step")
_MAMBA2_CONV = ("value", "key", "query")


def _mixer_of(decoder: Decoder) -> LinearAttention:
    return next(layer.mixer for layer in decoder.layers if isinstance(layer.mixer, LinearAttention))


def _rows(stack: Sequence[str], part: str, *, by_head: bool = False) -> Unpack:
    """Unpack a part of stacked rows; with `by_head`, the rows of a head of keys follow those of the other."""

    def unpack(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        mixer = _mixer_of(decoder)
        keys, heads = mixer.num_key_heads * mixer.key_dim, mixer.num_heads
        values = heads * mixer.value_dim
        sizes = {
            "query": keys, "key": keys, "value": values, "gate": values, "step": heads, "beta": heads
        }
        groups = mixer.num_key_heads if by_head else 1
        start = sum(sizes[before] for before in stack[: stack.index(part)]) // groups
        grouped = tensor.reshape(groups, -1, *tensor.shape[1:])[:, start : start + sizes[part] // groups]
        return _channels(grouped.reshape(-1, *tensor.shape[1:]), decoder)

    return unpack


def _stack(module: str, stack: Sequence[str], *, by_head: bool = False, ending: str = "") -> TensorMap:
    """Return the roles of the parts of one module."""
    return {
        f"layers.{{}}.mixer.{part}{ending}": TensorSource(
            (module,), unpack=_rows(stack, part, by_head=by_head)
        )
        for part in stack
    }


def _exponential(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return np.exp(tensor)


def _recurrence(module: str, conv: Sequence[str]) -> TensorMap:
    """Return the roles of what all linear attentions have, and the parts of their convolution."""
    return {
        **_stack(f"{module}.conv1d", conv, ending="_conv"),
        "layers.{}.mixer.rate": TensorSource((f"{module}.A_log",), unpack=_exponential, kind="tensor"),
        "layers.{}.mixer.step_bias": TensorSource((f"{module}.dt_bias",), kind="tensor"),
        "layers.{}.mixer.skip": TensorSource((f"{module}.D",), kind="tensor"),
        "layers.{}.mixer.out_norm": f"{module}.norm",
        "layers.{}.mixer.output": f"{module}.out_proj",
    }


def _require_silu(activation: str) -> None:
    """Reject another activation of the convolution before a linear attention."""
    require(activation == "silu", found=f"convolutions with the activation {activation!r}", known="silu")


def _gated_delta(config: Any, **options: Any) -> LinearAttention:
    _require_silu(config.hidden_act)
    value_dim = config.linear_value_head_dim
    return LinearAttention(
        rule="gated_delta",
        num_heads=config.linear_num_value_heads,
        num_key_heads=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=value_dim,
        kernel_size=config.linear_conv_kernel_dim,
        norm="norm_then_gate",
        norm_size=value_dim,
        **{"norm_epsilon": config.rms_norm_eps, **options},
    )


# Qwen 3 Next, 3.5 and 3.6: gated delta rule in three of four layers, and gates of attention.
def _gated_queries(part: int) -> Unpack:
    """Unpack queries (0) or gates (1), of which each head has both."""

    def unpack(tensor: FloatArray, decoder: Decoder) -> FloatArray:
        heads = tensor.reshape(-1, 2, decoder.attentions[0].head_dim, *tensor.shape[1:])
        return heads[:, part].reshape(-1, *tensor.shape[1:])

    return unpack


def _differences(names: TensorMap, *roles: str) -> TensorMap:
    """Return the names of norms that store the difference of their weight from 1."""
    return {role: TensorSource((str(names[role]),), kind="difference") for role in roles}


_QWEN_ATTENTION_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        **_differences(LLAMA_NAMES, "layers.{}.attention.norm", "layers.{}.mlp.norm", "norm"),
        **_differences(HEAD_NORM_NAMES, *HEAD_NORM_NAMES),
        "layers.{}.mixer.norm": TensorSource(("model.layers.{}.input_layernorm",), kind="difference"),
        "layers.{}.attention.query": TensorSource(
            ("model.layers.{}.self_attn.q_proj",), unpack=_gated_queries(0)
        ),
        "layers.{}.attention.gate": TensorSource(
            ("model.layers.{}.self_attn.q_proj",), unpack=_gated_queries(1)
        ),
        **_recurrence("model.layers.{}.linear_attn", _QKV),
    }
)
_QWEN3_5_NAMES: TensorMap = MappingProxyType(
    {
        **_QWEN_ATTENTION_NAMES,
        **_stack("model.layers.{}.linear_attn.in_proj_qkv", _QKV),
        "layers.{}.mixer.gate": "model.layers.{}.linear_attn.in_proj_z",
        "layers.{}.mixer.step": "model.layers.{}.linear_attn.in_proj_a",
        "layers.{}.mixer.beta": "model.layers.{}.linear_attn.in_proj_b",
    }
)
_QWEN_EXPERTS_NAMES: TensorMap = MappingProxyType(
    {
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
        **stacked_experts("model.layers.{}.mlp.experts", gate=half(0), up=half(1)),
        **shared_names("model.layers.{}.mlp.shared_expert"),
        "layers.{}.mlp.shared.score": "model.layers.{}.mlp.shared_expert_gate",
    }
)


def _describe_qwen3_5(config: Any) -> Decoder:
    decoder = with_attention(describe_llama(config, partial_rotary=True), head_norm=HeadNorm(), gated=True)
    return _with_mixers(decoder, config.layer_types, _gated_delta(config))


def _describe_qwen3_5_moe(config: Any) -> Decoder:
    experts = softmax(config.num_experts, config, normalised=True, shared=True)
    return with_experts(_describe_qwen3_5(config), experts)


def _describe_qwen3_next(config: Any) -> Decoder:
    experts = softmax(config.num_experts, config, normalised=config.norm_topk_prob, shared=True)
    dense = dense_layers(config) if config.num_experts else range(config.num_hidden_layers)
    return with_experts(_describe_qwen3_5(config), experts, dense=dense)


QWEN3_5 = Family(name="qwen3_5", describe=_describe_qwen3_5, names=_QWEN3_5_NAMES, prefix="model.")
QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    describe=_describe_qwen3_5_moe,
    names=MappingProxyType({**_QWEN3_5_NAMES, **_QWEN_EXPERTS_NAMES}),
    prefix="model.",
)
QWEN3_NEXT = Family(
    name="qwen3_next",
    describe=_describe_qwen3_next,
    names=MappingProxyType(
        {
            **_QWEN_ATTENTION_NAMES,
            **_stack("model.layers.{}.linear_attn.in_proj_qkvz", _QKVZ, by_head=True),
            **_stack("model.layers.{}.linear_attn.in_proj_ba", _BA, by_head=True),
            **_QWEN_EXPERTS_NAMES,
        }
    ),
    prefix="model.",
)


# Mamba 2
def _mamba2_names(module: str) -> TensorMap:
    return {**_stack(f"{module}.in_proj", _MAMBA2), **_recurrence(module, _MAMBA2_CONV)}


def _mamba2(config: Any, *, width: int, limits: Sequence[float] | None, **options: Any) -> LinearAttention:
    """Return the linear attention of a config with Bamba's fields; `width` is that of the values."""
    _require_silu(config.hidden_act)
    least, most = limits or (0.0, float("inf"))
    return LinearAttention(
        rule="gated",
        num_heads=config.mamba_n_heads,
        num_key_heads=config.mamba_n_groups,
        key_dim=config.mamba_d_state,
        value_dim=width // config.mamba_n_heads,
        kernel_size=config.mamba_d_conv,
        norm_epsilon=config.rms_norm_eps,
        step_limits=(float(least), float(most)),
        **{"norm": "gate_then_norm", "norm_size": width // config.mamba_n_groups, **options},
    )


# Granite 4: Mamba 2 in most layers, optionally; experts, or one MLP with the names of their shared one.
_GRANITE4_NAMES: TensorMap = MappingProxyType(
    {
        **GRANITE_MOE.names,
        "layers.{}.mixer.norm": "model.layers.{}.input_layernorm",
        **_mamba2_names("model.layers.{}.mamba"),
        **{
            f"layers.{{}}.mlp.{part}": GRANITE_MOE.names[f"layers.{{}}.mlp.shared.{part}"]
            for part in ("gate", "up", "down")
        },
    }
)


def _describe_granite4(config: Any) -> Decoder:
    decoder = describe_granite(config)
    if config.position_embedding_type != "rope":
        decoder = with_attention(decoder, rotary=None)
    if config.num_local_experts:
        decoder = with_experts(decoder, granite_experts(config))
    if set(config.layer_types) <= set(_ATTENTION):
        return decoder
    width = config.mamba_expand * config.hidden_size
    mixer = _mamba2(config, width=width, limits=config.time_step_limit)
    return _with_mixers(decoder, config.layer_types, mixer)


GRANITE4 = Family(
    name="granite4",
    describe=_describe_granite4,
    names=_GRANITE4_NAMES,
    prefix="model.",
    renamed=GRANITE_MOE.renamed,
)


# Falcon H1: Mamba 2 beside attention, and a scale of each projection.
_FALCON_H1_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.mixer.norm": "model.layers.{}.input_layernorm",
        **_mamba2_names("model.layers.{}.mamba"),
        "layers.{}.mlp.norm": "model.layers.{}.pre_ff_layernorm",
        "layers.{}.mlp.gate": "model.layers.{}.feed_forward.gate_proj",
        "layers.{}.mlp.up": "model.layers.{}.feed_forward.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.feed_forward.down_proj",
        "norm": "model.final_layernorm",
    }
)


def _describe_falcon_h1(config: Any) -> Decoder:
    width = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    norm = "norm_then_gate" if config.mamba_norm_before_gate else "gate_then_norm"
    mixer = _mamba2(
        config, width=width, limits=config.time_step_limit, norm=norm if config.mamba_rms_norm else ""
    )
    decoder = describe_llama(config)
    gate, down = config.mlp_multipliers
    # A factor of a module's input scales its weight; a factor of its output scales its bias as well.
    inputs = dict.fromkeys(("query", "key", "value"), config.attention_in_multiplier)
    outputs = {
        "attention.key": config.key_multiplier,
        "attention.output": config.attention_out_multiplier,
        "mixer.output": config.ssm_out_multiplier,
        "mlp.gate": gate,
        "mlp.down": down,
        **{f"mixer.{part}": scale for part, scale in zip(_MAMBA2, config.ssm_multipliers, strict=True)},
    }
    inputs_of = {f"attention.{part}": scale for part, scale in inputs.items()}
    inputs_of |= {f"mixer.{part}": config.ssm_in_multiplier for part in _MAMBA2}
    weights = {part: inputs_of.get(part, 1.0) * outputs.get(part, 1.0) for part in inputs_of | outputs}
    return replace(
        decoder,
        layers=tuple(replace(layer, mixer=mixer) for layer in decoder.layers),
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
        scales={
            **{f"{part}.weight": scale for part, scale in weights.items()},
            **{f"{part}.bias": scale for part, scale in outputs.items()},
        },
    )


FALCON_H1 = Family(name="falcon_h1", describe=_describe_falcon_h1, names=_FALCON_H1_NAMES, prefix="model.")


# Nemotron H: each layer has one of Mamba 2, attention, an MLP and experts.
_NEMOTRON_H_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.embeddings",
        **{f"layers.{{}}.{part}.norm": "model.layers.{}.norm" for part in ("attention", "mixer", "mlp")},
        **{
            f"layers.{{}}.attention.{part}": f"model.layers.{{}}.mixer.{name}_proj"
            for part, name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
        },
        **_mamba2_names("model.layers.{}.mixer"),
        "layers.{}.mlp.up": "model.layers.{}.mixer.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.mixer.down_proj",
        "layers.{}.mlp.router": "model.layers.{}.mixer.gate",
        **choice_name("model.layers.{}.mixer.gate.e_score_correction_bias"),
        "layers.{}.mlp.experts.{e}.up": "model.layers.{}.mixer.experts.{e}.up_proj",
        "layers.{}.mlp.experts.{e}.down": "model.layers.{}.mixer.experts.{e}.down_proj",
        "layers.{}.mlp.shared.up": "model.layers.{}.mixer.shared_experts.up_proj",
        "layers.{}.mlp.shared.down": "model.layers.{}.mixer.shared_experts.down_proj",
        "norm": "model.norm_f",
        "head": "lm_head",
    }
)


def _describe_nemotron_h(config: Any) -> Decoder:
    latent = config.moe_latent_size
    require(latent is None, found=f"moe_latent_size {latent}", known="none")
    require(config.sliding_window is None, found=f"sliding_window {config.sliding_window}", known="none")
    _require_silu(config.mamba_hidden_act)
    width, groups = config.mamba_num_heads * config.mamba_head_dim, config.n_groups
    mixer = LinearAttention(
        rule="gated",
        num_heads=config.mamba_num_heads,
        num_key_heads=groups,
        key_dim=config.ssm_state_size,
        value_dim=config.mamba_head_dim,
        kernel_size=config.conv_kernel,
        norm="gate_then_norm",
        norm_size=width // groups,
        norm_epsilon=config.layer_norm_epsilon,
        step_limits=(config.time_step_min, float("inf")),
    )
    attention = Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
    )
    activation = read_activation(config.mlp_hidden_act)
    experts = routed_experts(config, sigmoid_in_groups(config))
    layers = {
        "linear_attention": Layer(attention=None, activation=None, mixer=mixer),
        "full_attention": Layer(attention=attention, activation=None),
        "mlp": Layer(attention=None, activation=activation),
        "moe": Layer(attention=None, activation=activation, experts=experts),
    }
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.max_position_embeddings,
        layers=tuple(layers[kind] for kind in config.layers_block_type),
        norm="rms",
        norm_epsilon=config.layer_norm_epsilon,
        tied=config.tie_word_embeddings,
    )


NEMOTRON_H = Family(
    name="nemotron_h",
    describe=_describe_nemotron_h,
    names=_NEMOTRON_H_NAMES,
    prefix="model.",
    renamed=MappingProxyType({"backbone.": "model."}),
)


# OLMo Hybrid: gated delta rule with norms before its parts, and attention with norms after them.
_OLMO_HYBRID_NAMES: TensorMap = MappingProxyType(
    {
        **without_names(LLAMA_NAMES, "layers.{}.attention.norm"),
        **HEAD_NORM_NAMES,
        "layers.{}.attention.post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.post_norm": "model.layers.{}.post_feedforward_layernorm",
        **_recurrence("model.layers.{}.linear_attn", _QKV),
        "layers.{}.mixer.norm": "model.layers.{}.input_layernorm",
        **{
            f"layers.{{}}.mixer.{part}": f"model.layers.{{}}.linear_attn.{name}_proj"
            for part, name in (
                ("query", "q"), ("key", "k"), ("value", "v"), ("gate", "g"), ("step", "a"), ("beta", "b"),
                ("output", "o"),
            )
        },
        **{
            f"layers.{{}}.mixer.{part}_conv": TensorSource(
                (f"model.layers.{{}}.linear_attn.{part[0]}_conv1d",), unpack=_channels
            )
            for part in _QKV
        },
        "layers.{}.mixer.out_norm": "model.layers.{}.linear_attn.o_norm",
    }
)


def _describe_olmo_hybrid(config: Any) -> Decoder:
    has_rotary = (config.rope_parameters or {}).get("rope_theta") is not None
    if not has_rotary:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    decoder = with_attention(describe_llama(config), head_norm=HeadNorm(joint=True))
    if not has_rotary:
        decoder = with_attention(decoder, rotary=None)
    scale = 2.0 if config.linear_allow_neg_eigval else 1.0
    mixer = _gated_delta(config, beta_scale=scale, norm_epsilon=1e-5)   # transformers' code has the epsilon
    decoder = _with_mixers(decoder, config.layer_types, mixer)
    layers = (
        replace(layer, norms="after" if layer.mixer is None else "before") for layer in decoder.layers
    )
    return replace(decoder, layers=tuple(layers))


OLMO_HYBRID = Family(
    name="olmo_hybrid",
    describe=_describe_olmo_hybrid,
    names=_OLMO_HYBRID_NAMES,
    prefix="model.",
    renamed=MappingProxyType(
        {
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        }
    ),
)
