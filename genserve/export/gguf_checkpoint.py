"""GGUF checkpoint: a file of llama.cpp, with the config and the tensor names that Hugging Face gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFReader, ReaderTensor, dequantize, get_tensor_name_map

from genserve.errors import ExportError
from genserve.export.architectures import FAMILIES
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder_weights import tensor_sources
from genserve.export.gguf_tokenizer import tokenizer_files

__all__ = ["DIALECTS", "Dialect", "read_gguf"]


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


# What a file may leave out: transformers and llama.cpp take the same value then.
_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base")


def read_gguf(path: Path, *, source: str) -> Checkpoint:
    """Open a GGUF file of an architecture of `gguf_dialects.py`.

    Raises:
        ExportError: the file is broken, or of another architecture or rotary scaling.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ExportError(f"{path} is no readable GGUF file: {error}", remedy="download it again") from error
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    metadata = {name: field.contents() for name, field in fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _refuse_unknown(metadata, tensors=tensors, source=source)
    try:
        config = _config(metadata, tensors=tensors)
        tensors = _by_hugging_face_names(metadata, tensors=tensors)
    except KeyError as error:
        raise ExportError(f"{path} lacks {error}", remedy="download the file again") from error
    return Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset(tensors),
        load=partial(_load, tensors, config=config, dialect=_dialect(metadata)),
        tokenizer_files=tokenizer_files(reader.fields, source=source),
    )


def _dialect(metadata: Mapping[str, Any]) -> Dialect:
    return DIALECTS[metadata["general.architecture"]]


def _refuse_unknown(
    metadata: Mapping[str, Any], *, tensors: Mapping[str, ReaderTensor], source: str
) -> None:
    architecture = metadata.get("general.architecture")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if architecture not in DIALECTS or scaling != "none" or "rope_freqs.weight" in tensors:
        what = "scaled rotary positions" if architecture in DIALECTS else f"architecture {architecture!r}"
        raise ExportError(
            f"{source} has {what}, which is not read from GGUF files",
            remedy="export from the original checkpoint folder (config.json and safetensors)",
        )


def _config(metadata: Mapping[str, Any], *, tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    dialect, prefix = _dialect(metadata), metadata["general.architecture"]
    keys = {
        key: f"{prefix}.{field}"
        for key, field in dialect.fields.items()
        if field not in _OPTIONAL or f"{prefix}.{field}" in metadata
    }
    return {
        "architectures": [dialect.architecture],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **{key: metadata[field] for key, field in keys.items()},
        **dialect.fixed,
    }


def _by_hugging_face_names(
    metadata: Mapping[str, Any], *, tensors: Mapping[str, ReaderTensor]
) -> dict[str, ReaderTensor]:
    """Name the tensors as a checkpoint folder does; those that it would not have keep their names."""
    architecture, family = metadata["general.architecture"], FAMILIES[_dialect(metadata).architecture]
    num_layers = metadata[f"{architecture}.block_count"]
    [number] = [number for number, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known, names = get_tensor_name_map(number, num_layers), {}
    for part in tensor_sources(family.names, num_layers=num_layers).values():
        # Of some architectures llama.cpp knows the names without their prefix only.
        theirs = known.get_name(part.name) or known.get_name(part.name.removeprefix(family.prefix))
        names[theirs] = part.name
    return {_renamed(name, names): tensor for name, tensor in tensors.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{names.get(stem, stem)}.{kind}"


def _load(
    tensors: Mapping[str, ReaderTensor], name: str, *, config: Mapping[str, Any], dialect: Dialect
) -> FloatArray:
    tensor = tensors[name]
    # Writable, as torch wants it: what is float32 in the file comes as a view of the file.
    array: FloatArray = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, "W")
    return dialect.undo(array, name, config)
