"""OPT: layer norms and learned positions, the first two of which belong to padding."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder
from genserve.export.decoder_weights import PackedTensor, TensorMap, skip_rows
from genserve.export.family import Family, read_activation, require

_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "model.decoder.embed_tokens",
        "positions": PackedTensor(name="model.decoder.embed_positions", unpack=skip_rows(2)),
        "layers.{}.attention.norm": "model.decoder.layers.{}.self_attn_layer_norm",
        "layers.{}.attention.query": "model.decoder.layers.{}.self_attn.q_proj",
        "layers.{}.attention.key": "model.decoder.layers.{}.self_attn.k_proj",
        "layers.{}.attention.value": "model.decoder.layers.{}.self_attn.v_proj",
        "layers.{}.attention.output": "model.decoder.layers.{}.self_attn.out_proj",
        "layers.{}.mlp.norm": "model.decoder.layers.{}.final_layer_norm",
        "layers.{}.mlp.up": "model.decoder.layers.{}.fc1",
        "layers.{}.mlp.down": "model.decoder.layers.{}.fc2",
        "norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    }
)


def _describe(config: Any) -> Decoder:
    first = config.do_layer_norm_before and not config._remove_final_layer_norm
    require(first, found="do_layer_norm_before false", known="norms before attention and MLP")
    projected = config.word_embed_proj_dim != config.hidden_size
    found = f"word_embed_proj_dim {config.word_embed_proj_dim}"
    require(not projected, found=found, known=f"hidden_size, {config.hidden_size}")
    head_dim = config.hidden_size // config.num_attention_heads
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        attentions=(Attention(),) * config.num_hidden_layers,
        attention_scale=head_dim**-0.5,
        norm="layer",
        norm_epsilon=1e-5,  # the default of torch.nn.LayerNorm; the config has no field for it
        activation=read_activation(config.activation_function),
        tied=config.tie_word_embeddings,
    )


OPT = Family(name="opt", describe=_describe, names=_NAMES, prefix="model.")
