"""The Gemma families; the norms of the first three store the difference from 1."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np

from genserve.export.decoder import (
    AltUp,
    Attention,
    Decoder,
    Experts,
    HeadNorm,
    Layer,
    PerLayer,
    Rotary,
    Router,
)
from genserve.export.decoder_weights import TensorMap, TensorSource, half
from genserve.export.families.experts import stacked_experts
from genserve.export.families.family import Family, read_activation, read_rotary, require
from genserve.export.families.llama import HEAD_NORM_NAMES, LLAMA_NAMES, describe_llama, with_attention
from genserve.sampling.logits_array import FloatArray


def _norm(name: str) -> TensorSource:
    """Return a norm of Gemma, which stores the difference from 1."""
    return TensorSource((name,), kind="difference")


_GEMMA_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.norm": _norm("model.layers.{}.input_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.post_attention_layernorm"),
        "norm": _norm("model.norm"),
    }
)
# Gemma 2 also has norms after attention and MLP, and soft caps of scores.
_GEMMA2_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA_NAMES,
        "layers.{}.attention.post_norm": _norm("model.layers.{}.post_attention_layernorm"),
        "layers.{}.mlp.norm": _norm("model.layers.{}.pre_feedforward_layernorm"),
        "layers.{}.mlp.post_norm": _norm("model.layers.{}.post_feedforward_layernorm"),
    }
)
# Gemma 3 has norms of each query and key head instead of the soft caps.
_GEMMA3_NAMES: TensorMap = MappingProxyType(
    {
        **_GEMMA2_NAMES,
        "layers.{}.attention.query_norm": _norm("model.layers.{}.self_attn.q_norm"),
        "layers.{}.attention.key_norm": _norm("model.layers.{}.self_attn.k_norm"),
    }
)


def _describe_gemma(config: Any) -> Decoder:
    bidirectional = bool(getattr(config, "use_bidirectional_attention", False))
    require(not bidirectional, found="use_bidirectional_attention", known="attention to earlier tokens")
    return replace(describe_llama(config), embedding_scale=math.sqrt(config.hidden_size))


def _describe_gemma2(config: Any) -> Decoder:
    scale, softcap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
    decoder = with_attention(_describe_gemma(config), scale=scale, softcap=softcap)
    return replace(decoder, logits_softcap=config.final_logit_softcapping)


def _describe_gemma3(config: Any) -> Decoder:
    return with_attention(_describe_gemma2(config), head_norm=HeadNorm())


GEMMA = Family(name="gemma", describe=_describe_gemma, names=_GEMMA_NAMES, prefix="model.")
GEMMA2 = Family(name="gemma2", describe=_describe_gemma2, names=_GEMMA2_NAMES, prefix="model.")
GEMMA3 = Family(name="gemma3", describe=_describe_gemma3, names=_GEMMA3_NAMES, prefix="model.")


# Gemma 4: sizes of heads by the type of a layer, normed values, layers that share the cache of an earlier
# one, numbers of a token for each layer, a scale of each layer, and experts beside an MLP.
def _scaled(factor: float) -> Any:
    """Unpack a tensor times a factor."""
    return lambda tensor, _decoder: tensor * np.float32(factor)


def _router_norm(scale: FloatArray, decoder: Decoder) -> FloatArray:
    return scale * np.float32(decoder.hidden_size**-0.5)


_PER_LAYER_NAMES: TensorMap = MappingProxyType(
    {
        "per_layer.embedding": "model.embed_tokens_per_layer",
        "per_layer.projection": "model.per_layer_model_projection",
        "per_layer.norm": TensorSource(("model.per_layer_projection_norm",), unpack=_scaled(0.5**0.5)),
        "layers.{}.per_layer.gate": "model.layers.{}.per_layer_input_gate",
        "layers.{}.per_layer.output": "model.layers.{}.per_layer_projection",
        "layers.{}.per_layer.post_norm": "model.layers.{}.post_per_layer_input_norm",
    }
)
_GEMMA4_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        **HEAD_NORM_NAMES,
        **_PER_LAYER_NAMES,
        # Without values of their own, full attention has the keys as values.
        "layers.{}.attention.value": TensorSource(
            ("model.layers.{}.self_attn.v_proj", "model.layers.{}.self_attn.k_proj")
        ),
        "layers.{}.attention.post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.norm": "model.layers.{}.pre_feedforward_layernorm",
        "layers.{}.mlp.post_norm": "model.layers.{}.post_feedforward_layernorm",
        "layers.{}.mlp.own_post_norm": "model.layers.{}.post_feedforward_layernorm_1",
        "layers.{}.mlp.experts_norm": "model.layers.{}.pre_feedforward_layernorm_2",
        "layers.{}.mlp.experts_post_norm": "model.layers.{}.post_feedforward_layernorm_2",
        "layers.{}.mlp.router": "model.layers.{}.router.proj",
        "layers.{}.mlp.router_norm.weight": TensorSource(
            ("model.layers.{}.router.scale",), kind="tensor", unpack=_router_norm
        ),
        "layers.{}.mlp.expert_scales": TensorSource(
            ("model.layers.{}.router.per_expert_scale",), kind="tensor"
        ),
        **stacked_experts("model.layers.{}.experts", gate=half(0), up=half(1)),
        "layers.{}.scale": TensorSource(("model.layers.{}.layer_scalar",), kind="tensor"),
    }
)


def _per_layer(config: Any) -> PerLayer | None:
    size = getattr(config, "hidden_size_per_layer_input", None)
    if not size:
        return None
    # transformers scales the projection by hidden_size**-0.5 before its norm, and the sum by 0.5**0.5.
    epsilon = config.rms_norm_eps * config.hidden_size
    return PerLayer(size=size, embedding_scale=math.sqrt(size / 2), norm_epsilon=epsilon)


def _sources_of_caches(config: Any) -> list[int | None]:
    """Return the layer whose cache a layer shares, or None: the last of its type that has its own."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(config.layer_types[:first])}
    missing = sorted(set(config.layer_types[first:]) - last.keys())
    require(not missing, found=f"no cache for layers of the types {missing}", known="caches for all types")
    return [None] * first + [last[kind] for kind in config.layer_types[first:]]


def _describe_gemma4(config: Any) -> Decoder:
    bidirectional = config.use_bidirectional_attention == "all"
    require(not bidirectional, found="use_bidirectional_attention", known="attention to earlier tokens")
    rotaries = {kind: _gemma4_rotary(config, kind) for kind in set(config.layer_types)}
    experts = None
    if getattr(config, "enable_moe_block", False):
        experts = Experts(
            count=config.num_experts,
            top_k=config.top_k_experts,
            router=Router(score="softmax", normalise=0.0),
            beside_mlp=True,
        )
    activation = read_activation(config.hidden_activation, gated=True)

    def attention(index: int, source: int | None) -> Attention:
        kind, own = config.layer_types[index], config.per_layer_config[index]
        return Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=own.num_key_value_heads,
            head_dim=own.head_dim,
            scale=1.0,
            rotary=rotaries[kind],
            window=config.sliding_window if kind == "sliding_attention" else None,
            head_norm=HeadNorm(),
            value_norm=True,
            cache_of=source,
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.max_position_embeddings,
        layers=tuple(
            Layer(attention=attention(index, source), activation=activation, experts=experts)
            for index, source in enumerate(_sources_of_caches(config))
        ),
        norm="rms",
        norm_epsilon=config.rms_norm_eps,
        embedding_scale=math.sqrt(config.hidden_size),
        logits_softcap=config.final_logit_softcapping,
        tied=config.tie_word_embeddings,
        per_layer=_per_layer(config),
    )


def _gemma4_rotary(config: Any, kind: str) -> Rotary:
    if config.rope_parameters[kind]["rope_type"] != "proportional":
        return read_rotary(config, num_dims=config.per_layer_config[kind].head_dim, layer_type=kind)
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own = config.per_layer_config[kind]
    frequencies, scale = ROPE_INIT_FUNCTIONS["proportional"](own, torch.device("cpu"), layer_type=kind)
    # The pairs that are not rotated have the frequency zero; tables are as much smaller without them.
    rotated = tuple(frequency for frequency in frequencies.tolist() if frequency)
    return Rotary(frequencies=rotated, scale=scale, distance=own.head_dim // 2)


GEMMA4 = Family(
    name="gemma4",
    describe=_describe_gemma4,
    names=_GEMMA4_NAMES,
    prefix="model.",
    # Layers that share a cache have keys and values in checkpoints, which transformers ignores too.
    ignored=(".k_proj.weight", ".v_proj.weight", ".k_norm.weight"),
)


# Gemma 3n: the attention and the numbers for each layer of Gemma 4, with one size of heads; several streams,
# a low-rank layer beside attention, and gates of which few count.
_ALTUP = "model.layers.{}.altup"


def _rows(tensor: FloatArray, _decoder: Decoder) -> FloatArray:
    return tensor.reshape(-1, tensor.shape[-1])


def _altup_norm(weight: FloatArray, decoder: Decoder) -> FloatArray:
    return weight / np.float32(decoder.hidden_size)


_GEMMA3N_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        **HEAD_NORM_NAMES,
        **_PER_LAYER_NAMES,
        "layers.{}.attention.post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.attention.laurel_left": "model.layers.{}.laurel.linear_left",
        "layers.{}.attention.laurel_right": "model.layers.{}.laurel.linear_right",
        "layers.{}.attention.laurel_norm": "model.layers.{}.laurel.post_laurel_norm",
        "layers.{}.mlp.norm": "model.layers.{}.pre_feedforward_layernorm",
        "layers.{}.mlp.post_norm": "model.layers.{}.post_feedforward_layernorm",
        "altup.input": TensorSource(("model.altup_projections.{n}",), unpack=_rows),
        "altup.output": TensorSource(("model.altup_unembed_projections.{n}",), unpack=_rows),
        "layers.{}.altup.norm": TensorSource((f"{_ALTUP}.router_norm",), unpack=_altup_norm),
        "layers.{}.altup.router": f"{_ALTUP}.modality_router",
        "layers.{}.altup.predict": f"{_ALTUP}.prediction_coefs",
        "layers.{}.altup.correct": f"{_ALTUP}.correction_coefs",
        "layers.{}.altup.scale": TensorSource((f"{_ALTUP}.correct_output_scale",), kind="tensor"),
    }
)


def _describe_gemma3n(config: Any) -> Decoder:
    active = config.altup_active_idx
    require(active == 0, found=f"altup_active_idx {active}", known="0")
    require(config.altup_correct_scale, found="altup_correct_scale false", known="true")
    rotaries = {
        kind: read_rotary(config, num_dims=config.head_dim, layer_type=kind)
        for kind in set(config.layer_types)
    }
    activation = read_activation(config.hidden_activation, gated=True)
    layers = (
        Layer(
            attention=Attention(
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                scale=1.0,
                rotary=rotaries[kind],
                window=config.sliding_window if kind == "sliding_attention" else None,
                head_norm=HeadNorm(),
                value_norm=True,
                cache_of=source,
            ),
            activation=activation,
            gate_cutoff=NormalDist().inv_cdf(share) if share > 0 else None,
        )
        for kind, source, share in zip(
            config.layer_types, _sources_of_caches(config), config.activation_sparsity_pattern, strict=True
        )
    )
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.max_position_embeddings,
        layers=tuple(layers),
        norm="rms",
        norm_epsilon=config.rms_norm_eps,
        embedding_scale=math.sqrt(config.hidden_size),
        logits_softcap=config.final_logit_softcapping,
        tied=config.tie_word_embeddings,
        per_layer=_per_layer(config),
        altup=AltUp(num_streams=config.altup_num_inputs),
    )


GEMMA3N = Family(
    name="gemma3n",
    describe=_describe_gemma3n,
    names=_GEMMA3N_NAMES,
    prefix="model.",
    ignored=GEMMA4.ignored,
)
