"""Llama, and those with its layers: Mistral, SmolLM3, Qwen 2 and 3, Phi-3."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder, Rotary
from genserve.export.decoder_weights import TensorMap, PackedTensor, half, packed, stacked
from genserve.export.family import Family, read_activation, read_rotary, require, rotary_limit

__all__ = ["LLAMA", "LLAMA_NAMES", "PHI3", "QWEN2", "QWEN3", "describe_llama"]


LLAMA_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "layers.{}.attention.norm": "model.layers.{}.input_layernorm",
        "layers.{}.attention.query": "model.layers.{}.self_attn.q_proj",
        "layers.{}.attention.key": "model.layers.{}.self_attn.k_proj",
        "layers.{}.attention.value": "model.layers.{}.self_attn.v_proj",
        "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj",
        "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
        "layers.{}.mlp.up": "model.layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }
)


def describe_llama(config: Any, *, partial: bool = False) -> Decoder:
    """The decoder of a config with the fields of Llama's, and perhaps `layer_types` and `sliding_window`.

    With `partial`, transformers honours a `partial_rotary_factor`.
    """
    size = _head_dim(config)
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=rotary_limit(config),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=size,
        attentions=_attentions(config, partial=partial),
        attention_scale=size**-0.5,
        norm="rms",
        norm_epsilon=config.rms_norm_eps,
        activation=read_activation(getattr(config, "hidden_activation", None) or config.hidden_act),
        tied=config.tie_word_embeddings,
    )


def _head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _attentions(config: Any, *, partial: bool) -> tuple[Attention, ...]:
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [everywhere] * num_layers
    turning = getattr(config, "no_rope_layers", None) or [1] * num_layers
    rotaries = {kind: _rotary(config, layer_type=kind, partial=partial) for kind in set(types)}
    return tuple(
        Attention(
            rotary=rotaries[kind] if turns else None,
            window=window if kind == "sliding_attention" else None,
        )
        for kind, turns in zip(types, turning, strict=True)
    )


def _rotary(config: Any, *, layer_type: str, partial: bool) -> Rotary:
    own = layer_type in config.rope_parameters
    parameters = config.rope_parameters[layer_type] if own else config.rope_parameters
    share = parameters.get("partial_rotary_factor", 1.0)
    require(partial or share == 1.0, found=f"partial_rotary_factor {share}", known="1.0")
    turning = int(_head_dim(config) * share)
    return read_rotary(config, num_dims=turning, layer_type=layer_type if own else None)


LLAMA = Family(
    name="llama",
    describe=describe_llama,
    names=LLAMA_NAMES,
    prefix="model.",
    ignored=("rotary_emb.inv_freq",),
)


_QWEN3_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    }
)

QWEN2 = Family(name="qwen2", describe=describe_llama, names=LLAMA_NAMES, prefix="model.")
QWEN3 = Family(name="qwen3", describe=describe_llama, names=_QWEN3_NAMES, prefix="model.")


_PHI3_NAMES: TensorMap = MappingProxyType(
    {
        **LLAMA_NAMES,
        **packed("model.layers.{}.self_attn.qkv_proj", stacked),
        "layers.{}.mlp.gate": PackedTensor(name="model.layers.{}.mlp.gate_up_proj", take=half(0)),
        "layers.{}.mlp.up": PackedTensor(name="model.layers.{}.mlp.gate_up_proj", take=half(1)),
    }
)

PHI3 = Family(name="phi3", describe=partial(describe_llama, partial=True), names=_PHI3_NAMES, prefix="model.")
