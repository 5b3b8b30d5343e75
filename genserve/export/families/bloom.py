"""BLOOM: layer norms, also of the embeddings, and ALiBi instead of positions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder
from genserve.export.decoder_weights import TensorMap, interleaved, packed
from genserve.export.family import Family, require

_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "layers.{}.attention.norm": "transformer.h.{}.input_layernorm",
        **packed("transformer.h.{}.self_attention.query_key_value", interleaved),
        "layers.{}.attention.output": "transformer.h.{}.self_attention.dense",
        "layers.{}.mlp.norm": "transformer.h.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "transformer.h.{}.mlp.dense_h_to_4h",
        "layers.{}.mlp.down": "transformer.h.{}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
)


def _describe(config: Any) -> Decoder:
    after_norm = config.apply_residual_connection_post_layernorm
    require(not after_norm, found="apply_residual_connection_post_layernorm", known="a plain residual")
    head_dim = config.hidden_size // config.n_head
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=getattr(config, "seq_length", 2048),  # of the training; ALiBi has no limit
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_dim=head_dim,
        attentions=(Attention(),) * config.n_layer,
        attention_scale=head_dim**-0.5,
        alibi=True,
        norm="layer",
        norm_epsilon=config.layer_norm_epsilon,
        activation="gelu_tanh",
        tied=config.tie_word_embeddings,
    )


BLOOM = Family(name="bloom", describe=_describe, names=_NAMES, prefix="transformer.")
