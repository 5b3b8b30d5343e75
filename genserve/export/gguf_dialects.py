"""GGUF dialects: what llama.cpp's converter makes of the checkpoints of each architecture, and how back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from genserve.export.checkpoint import FloatArray

__all__ = ["DIALECTS", "Dialect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the files of one `general.architecture` are told in the words of Hugging Face."""

    architecture: str                # as in config.json
    fields: Mapping[str, str]        # key of config.json: key of the metadata, behind the architecture
    fixed: Mapping[str, Any]         # of config.json
    # Undoes what the converter did to the tensor of this name, in a model with this config.
    undo: Callable[[FloatArray, str, Mapping[str, Any]], FloatArray]


def _nothing(tensor: FloatArray, _name: str, _config: Mapping[str, Any]) -> FloatArray:
    return tensor


def _halves_apart(tensor: FloatArray, name: str, config: Mapping[str, Any]) -> FloatArray:
    """Undo the order of the rotary dimensions, which pairs neighbours where Llama pairs halves.

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py; this is its inverse.
    """
    heads = config["num_attention_heads"]
    turning = {".q_proj.": heads, ".k_proj.": config.get("num_key_value_heads", heads)}
    for part, count in turning.items():
        if part in name:
            pairs = tensor.reshape(count, -1, 2, *tensor.shape[1:])
            return pairs.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _conv1d(tensor: FloatArray, name: str, _config: Mapping[str, Any]) -> FloatArray:
    """Undo the transposition of linear layers to [outputs, inputs]. Source: `GPT2Model`, in the same file."""
    return tensor.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else tensor


def _head_by_head(tensor: FloatArray, name: str, config: Mapping[str, Any]) -> FloatArray:
    """Undo the stacking of queries, keys and values. Source: `BloomModel`, in the same file."""
    if ".query_key_value." not in name:
        return tensor
    stack = tensor.reshape(3, config["n_head"], -1, *tensor.shape[1:])
    return stack.swapaxes(0, 1).reshape(tensor.shape)


_LLAMA_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "llama": Dialect(
            architecture="LlamaForCausalLM",
            fields=_LLAMA_FIELDS | {"head_dim": "rope.dimension_count"},
            fixed={"model_type": "llama"},
            undo=_halves_apart,
        ),
        "qwen2": Dialect(
            architecture="Qwen2ForCausalLM",
            fields=_LLAMA_FIELDS,
            fixed={"model_type": "qwen2"},
            undo=_nothing,
        ),
        "qwen3": Dialect(
            architecture="Qwen3ForCausalLM",
            fields=_LLAMA_FIELDS | {"head_dim": "attention.key_length"},
            fixed={"model_type": "qwen3"},
            undo=_nothing,
        ),
        "gpt2": Dialect(
            architecture="GPT2LMHeadModel",
            fields={
                "n_positions": "context_length",
                "n_embd": "embedding_length",
                "n_inner": "feed_forward_length",
                "n_layer": "block_count",
                "n_head": "attention.head_count",
                "layer_norm_epsilon": "attention.layer_norm_epsilon",
            },
            # The converter writes the embedding again as head.
            fixed={"model_type": "gpt2", "tie_word_embeddings": True},
            undo=_conv1d,
        ),
        "bloom": Dialect(
            architecture="BloomForCausalLM",
            fields={
                "seq_length": "context_length",
                "hidden_size": "embedding_length",
                "n_layer": "block_count",
                "n_head": "attention.head_count",
                "layer_norm_epsilon": "attention.layer_norm_epsilon",
            },
            fixed={"model_type": "bloom", "tie_word_embeddings": True},
            undo=_head_by_head,
        ),
    }
)
