"""GGUF checkpoint: reads a file of llama.cpp as the config, tensors and tokenizer of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import MODEL_ARCH_NAMES, TokenType, get_tensor_name_map
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder_weights import tensor_sources
from genserve.export.families import FAMILIES
from genserve.export.gguf_file import GgufFile, GgufTensor
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
        tokenizer_files=_tokenizer_files(metadata, source=source),
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


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split text into the matches of a pattern, then into bytes."""
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt4_words(digits: str) -> pre_tokenizers.PreTokenizer:
    return _words(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# By `tokenizer.ggml.pre`; the names are llama.cpp's.
_PRE_TOKENIZERS: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "default": _BYTES,
    "gpt-2": _BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
    "llama-bpe": _gpt4_words(r"\p{N}{1,3}"),
    "qwen2": _gpt4_words(r"\p{N}"),
    "bloom": _words(r" ?[^(\s|[.,!?…。，、।۔،])]+"),  # noqa: RUF001
}


def _tokenizer_files(metadata: Mapping[str, Any], *, source: str) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint folder, by name, from the metadata of a GGUF file.

    Raises:
        ExportError: the tokenizer is not a byte-level BPE with a known pre-tokenizer, or is incomplete or
            inconsistent.
    """
    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    _require_supported(ggml, source=source)
    try:
        tokenizer = _byte_level_bpe(ggml)
        names = {kind: _token(ggml, f"{kind}_token_id") for kind in ("bos", "eos")}
        names["pad"] = _token(ggml, "padding_token_id")
    except Exception as error:  # the library raises bare Exception
        raise ExportError(
            f"the tokenizer of {source} is broken: {error}", remedy="download the file again"
        ) from error
    add_bos = bool(ggml.get("add_bos_token", ggml.get("pre") == "llama-bpe"))
    if add_bos and names["bos"]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[names["bos"], "$A"], special_tokens=[(names["bos"], ggml["bos_token_id"])]
        )
    ends = [ggml[key] for key in ("eos_token_id", "eot_token_id") if key in ggml]
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(
            {f"{kind}_token": text for kind, text in names.items()} | {"add_bos_token": add_bos}
        ),
        "generation_config.json": _json(
            {"bos_token_id": ggml.get("bos_token_id"), "eos_token_id": sorted(set(ends)) or None}
        ),
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = metadata["tokenizer.chat_template"].encode()
    return files


def _require_supported(ggml: Mapping[str, Any], *, source: str) -> None:
    remedy = "export from the original checkpoint folder (config.json, safetensors, tokenizer.json)"
    if ggml.get("model") != "gpt2":
        raise ExportError(
            f"{source} has a {ggml.get('model')!r} tokenizer; GGUF files need a byte-level BPE (gpt2)",
            remedy=remedy,
        )
    if ggml.get("pre", "default") not in _PRE_TOKENIZERS:
        raise ExportError(
            f"{source} has the pre-tokenizer {ggml['pre']!r}; known: {', '.join(sorted(_PRE_TOKENIZERS))}",
            remedy=remedy,
        )
    for key in ("tokens", "merges"):
        if key not in ggml:
            raise ExportError(f"{source} lacks 'tokenizer.ggml.{key}'", remedy="download the file again")


def _byte_level_bpe(ggml: Mapping[str, Any]) -> Tokenizer:
    tokens, merges = ggml["tokens"], [tuple(merge.split(" ")) for merge in ggml["merges"]]
    pre = ggml.get("pre", "default")
    # Llama 3 encodes a word that is a token as that token, even if no sequence of merges leads to it.
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
    )
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    types = ggml.get("token_type", [])
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        texts = [token for token, found in zip(tokens, types, strict=False) if found == kind]
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    return tokenizer


def _token(ggml: Mapping[str, Any], key: str) -> str | None:
    return ggml["tokens"][ggml[key]] if key in ggml else None


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
