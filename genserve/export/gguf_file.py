"""GGUF file: checkpoints in the format of llama.cpp, told in the words of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.gguf_tokenizer import tokenizer_files

__all__ = ["read_gguf"]

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path, *, source: str) -> Checkpoint:
    """Open a GGUF file of the architecture `llama`.

    Raises:
        ExportError: the file is broken, or of another architecture or rotary scaling.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ExportError(f"{path} is no readable GGUF file: {error}", remedy="download it again") from error
    fields = {name: field for name, field in reader.fields.items() if name.startswith(("general.", "llama."))}
    metadata = {name: field.contents() for name, field in fields.items()}
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    try:
        config = _config(metadata, tensors=tensors, source=source)
    except KeyError as error:
        raise ExportError(f"{path} lacks {error}", remedy="download the file again") from error
    return Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset(tensors),
        load=partial(_load, tensors, heads=_heads(metadata)),
        tokenizer_files=tokenizer_files(reader.fields, source=source),
    )


def _config(
    metadata: Mapping[str, Any], *, tensors: Mapping[str, ReaderTensor], source: str
) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if architecture != "llama" or scaling != "none" or "rope_freqs.weight" in tensors:
        what = f"architecture {architecture!r}" if architecture != "llama" else "scaled rotary positions"
        raise ExportError(
            f"{source} has {what}, which is not read from GGUF files",
            remedy="export from the original checkpoint folder (config.json and safetensors)",
        )
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[1]),
        "max_position_embeddings": metadata["llama.context_length"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }


def _hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        number, part = layer.groups()
        return f"model.layers.{number}.{_LAYER_NAMES.get(part, part)}.{kind}"
    return f"{_GLOBAL_NAMES.get(stem, stem)}.{kind}"


def _heads(metadata: Mapping[str, Any]) -> dict[str, int]:
    heads = metadata.get("llama.attention.head_count", 1)
    return {"q_proj": heads, "k_proj": metadata.get("llama.attention.head_count_kv", heads)}


def _load(tensors: Mapping[str, ReaderTensor], name: str, *, heads: Mapping[str, int]) -> FloatArray:
    tensor = tensors[name]
    # Writable, as torch wants it: what is float32 in the file comes as a view of the file.
    array: FloatArray = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, "W")
    for projection, count in heads.items():
        if f".{projection}." in name:
            return _halves_apart(array, num_heads=count)
    return array


def _halves_apart(weight: FloatArray, *, num_heads: int) -> FloatArray:
    """Undo llama.cpp's order of the rotary dimensions, which pairs neighbours where Llama pairs halves.

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py; this is its inverse.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
