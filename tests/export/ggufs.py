"""GGUF files: a checkpoint folder written the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoConfig

from tests.support.tiny_llama import SPECIAL_TOKENS

__all__ = ["write_gguf"]


def write_gguf(folder: Path, path: Path, *, pre: str = "smollm", **metadata: Any) -> Path:
    """Write the checkpoint in `folder`, unquantized; `metadata` adds or replaces string fields."""
    config = AutoConfig.from_pretrained(folder)
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    length = "seq_length" if architecture == "bloom" else "max_position_embeddings"
    writer.add_context_length(getattr(config, length))
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture in {"gpt2", "bloom"}:
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    _add_tokenizer(writer, folder, pre=pre)
    for name, value in metadata.items():
        writer.add_string(name, value)
    _add_tensors(writer, folder, config=config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: gguf.GGUFWriter, folder: Path, *, config: Any) -> None:
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        # Of BLOOM, llama.cpp converts the model without its head.
        theirs = names.get_name(name, (".weight", ".bias")) or names.get_name(
            name.removeprefix("transformer."), (".weight", ".bias")
        )
        writer.add_tensor(theirs, np.ascontiguousarray(_converted(tensor, name, config=config)))
        if theirs == "token_embd.weight" and config.model_type in {"gpt2", "bloom"}:
            writer.add_tensor("output.weight", tensor)


def _converted(tensor: NDArray[np.float32], name: str, *, config: Any) -> NDArray[np.float32]:
    """The tensor as the model classes of llama.cpp's convert_hf_to_gguf.py leave it."""
    heads = config.num_attention_heads
    if config.model_type == "llama" and name.split(".")[-2] in {"q_proj", "k_proj"}:
        return _permute(tensor, heads if "q_proj" in name else config.num_key_value_heads)
    if config.model_type == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    if config.model_type == "bloom" and ".query_key_value." in name:
        size = config.hidden_size // heads
        apart = tensor.reshape(heads, 3, size, *tensor.shape[1:])
        return np.concatenate([apart[:, part].reshape(heads * size, *tensor.shape[1:]) for part in range(3)])
    return tensor


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, *, pre: str) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(model["vocab"]))
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in model["vocab"]])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if (folder / "tokenizer_config.json").exists():
        writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def _permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, word for word."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )
