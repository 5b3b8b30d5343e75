"""GPT-NeoX and Pythia: layer norms, partial rotary positions, attention and MLP in parallel."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from genserve.export.decoder import Attention, Decoder
from genserve.export.decoder_weights import TensorMap, interleaved, packed
from genserve.export.family import Family, read_activation, read_rotary

_NAMES: TensorMap = MappingProxyType(
    {
        "embedding": "gpt_neox.embed_in",
        "layers.{}.attention.norm": "gpt_neox.layers.{}.input_layernorm",
        **packed("gpt_neox.layers.{}.attention.query_key_value", interleaved),
        "layers.{}.attention.output": "gpt_neox.layers.{}.attention.dense",
        "layers.{}.mlp.norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "layers.{}.mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    }
)


def _describe(config: Any) -> Decoder:
    head_dim = config.hidden_size // config.num_attention_heads
    num_dims = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    rotary = read_rotary(config, num_dims=num_dims)
    return Decoder(
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        attentions=(Attention(rotary=rotary),) * config.num_hidden_layers,
        attention_scale=head_dim**-0.5,
        norm="layer",
        norm_epsilon=config.layer_norm_eps,
        activation=read_activation(config.hidden_act),
        parallel=config.use_parallel_residual,
        tied=config.tie_word_embeddings,
    )


GPT_NEOX = Family(
    name="gpt_neox",
    describe=_describe,
    names=_NAMES,
    prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    renamed=MappingProxyType({"embed_out.": "lm_head."}),
)
