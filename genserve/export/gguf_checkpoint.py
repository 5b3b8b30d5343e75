"""GGUF checkpoint: reads a file of llama.cpp with the config and tensor names of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from genserve.errors import ExportError
from genserve.export.architectures import FAMILIES
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder_weights import tensor_sources
from genserve.export.gguf_file import GgufFile, GgufTensor
from genserve.export.gguf_tokenizer import tokenizer_files
from genserve.sampling.logits_array import FloatArray

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
# Optional in a file: transformers and llama.cpp have the same defaults.
_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """The translation of one `general.architecture` into the names of Hugging Face."""

    architecture: str                # as in config.json
    fields: Mapping[str, str]        # key of config.json: key of the metadata, without the architecture
    fixed: Mapping[str, Any]         # the other fields of config.json
    # Undoes the converter's change to the tensor of this name, in a model with this config.
    undo: Callable[[FloatArray, str, Mapping[str, Any]], FloatArray]


def _unchanged(tensor: FloatArray, _name: str, _config: Mapping[str, Any]) -> FloatArray:
    return tensor


def _rotary_halves(tensor: FloatArray, name: str, config: Mapping[str, Any]) -> FloatArray:
    """Undo the permutation of rotary dimensions, which pairs neighbours where Llama pairs halves.

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py; this is its inverse.
    """
    heads = config["num_attention_heads"]
    rotary = {".q_proj.": heads, ".k_proj.": config.get("num_key_value_heads", heads)}
    for part, count in rotary.items():
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


ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            architecture="LlamaForCausalLM",
            fields=_LLAMA_FIELDS | {"head_dim": "rope.dimension_count"},
            fixed={"model_type": "llama"},
            undo=_rotary_halves,
        ),
        "qwen2": GgufArchitecture(
            architecture="Qwen2ForCausalLM",
            fields=_LLAMA_FIELDS,
            fixed={"model_type": "qwen2"},
            undo=_unchanged,
        ),
        "qwen3": GgufArchitecture(
            architecture="Qwen3ForCausalLM",
            fields=_LLAMA_FIELDS | {"head_dim": "attention.key_length"},
            fixed={"model_type": "qwen3"},
            undo=_unchanged,
        ),
        "gpt2": GgufArchitecture(
            architecture="GPT2LMHeadModel",
            fields={
                "n_positions": "context_length",
                "n_embd": "embedding_length",
                "n_inner": "feed_forward_length",
                "n_layer": "block_count",
                "n_head": "attention.head_count",
                "layer_norm_epsilon": "attention.layer_norm_epsilon",
            },
            # The converter writes a tied head as another tensor.
            fixed={"model_type": "gpt2", "tie_word_embeddings": True},
            undo=_conv1d,
        ),
        "bloom": GgufArchitecture(
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


def read_gguf(path: Path, *, source: str) -> Checkpoint:
    """Open a GGUF file of one of the architectures in `ARCHITECTURES`; `source` is its name in messages.

    Raises:
        ExportError: the file is broken, or its architecture or rotary scaling is not supported.
    """
    try:
        file = GgufFile.open(path)
    except (ValueError, OSError) as error:
        raise ExportError(
            f"{path} is not a readable GGUF file: {error}", remedy="download it again"
        ) from error
    metadata, tensors = file.metadata, file.tensors
    _reject_unknown(metadata, tensors=tensors, source=source)
    try:
        config = _config(metadata, tensors=tensors)
        tensors = _by_hugging_face_names(metadata, tensors=tensors)
    except KeyError as error:
        raise ExportError(f"{path} lacks {error}", remedy="download the file again") from error
    return Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset(tensors),
        load=partial(_load, tensors, config=config, translation=_architecture(metadata)),
        tokenizer_files=tokenizer_files(metadata, source=source),
    )


def _architecture(metadata: Mapping[str, Any]) -> GgufArchitecture:
    return ARCHITECTURES[metadata["general.architecture"]]


def _reject_unknown(metadata: Mapping[str, Any], *, tensors: Mapping[str, GgufTensor], source: str) -> None:
    architecture = metadata.get("general.architecture")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if architecture not in ARCHITECTURES or scaling != "none" or "rope_freqs.weight" in tensors:
        known = architecture in ARCHITECTURES
        feature = "scaled rotary positions" if known else f"architecture {architecture!r}"
        raise ExportError(
            f"{source} has {feature}, which is not supported in GGUF files",
            remedy="export from the original checkpoint folder (config.json and safetensors)",
        )


def _config(metadata: Mapping[str, Any], *, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    translation, prefix = _architecture(metadata), metadata["general.architecture"]
    keys = {
        key: f"{prefix}.{field}"
        for key, field in translation.fields.items()
        if field not in _OPTIONAL or f"{prefix}.{field}" in metadata
    }
    return {
        "architectures": [translation.architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **{key: metadata[field] for key, field in keys.items()},
        **translation.fixed,
    }


def _by_hugging_face_names(
    metadata: Mapping[str, Any], *, tensors: Mapping[str, GgufTensor]
) -> dict[str, GgufTensor]:
    """Rename the tensors to the names in a Hugging Face folder; tensors without such a name keep theirs."""
    architecture, family = metadata["general.architecture"], FAMILIES[_architecture(metadata).architecture]
    num_layers = metadata[f"{architecture}.block_count"]
    [number] = [number for number, name in MODEL_ARCH_NAMES.items() if name == architecture]
    known, names = get_tensor_name_map(number, num_layers), {}
    for source in tensor_sources(family.names, num_layers=num_layers).values():
        # llama.cpp knows the names of some architectures only without their prefix.
        gguf_name = known.get_name(source.name) or known.get_name(source.name.removeprefix(family.prefix))
        names[gguf_name] = source.name
    return {_renamed(name, names): tensor for name, tensor in tensors.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{names.get(stem, stem)}.{kind}"


def _load(
    tensors: Mapping[str, GgufTensor],
    name: str,
    *,
    config: Mapping[str, Any],
    translation: GgufArchitecture,
) -> FloatArray:
    return translation.undo(tensors[name].read(), name, config)
