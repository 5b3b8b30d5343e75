"""GGUF tokenizer: the tokenizer of a GGUF file, converted to Hugging Face's tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genserve.errors import ExportError

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


def tokenizer_files(metadata: Mapping[str, Any], *, source: str) -> dict[str, bytes]:
    """The tokenizer files of a checkpoint folder, by name, from the metadata of a GGUF file.

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
