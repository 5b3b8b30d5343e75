"""GGUF tokenizer: the vocabulary in a GGUF file written as Hugging Face's tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gguf import ReaderField, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genserve.errors import ExportError

__all__ = ["tokenizer_files"]

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Words that a pattern matches, as bytes."""
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


def tokenizer_files(fields: Mapping[str, ReaderField], *, source: str) -> dict[str, bytes]:
    """The tokenizer files of a checkpoint folder, by name, from the metadata of a GGUF file.

    Raises:
        ExportError: not a byte-level BPE, or with a pre-tokenizer that is not in the table; or its parts are
            missing, or do not belong together.
    """
    metadata = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    about = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    _refuse_unknown(about, source=source)
    try:
        tokenizer = _byte_level_bpe(about)
        names = {kind: _token(about, f"{kind}_token_id") for kind in ("bos", "eos")}
        names["pad"] = _token(about, "padding_token_id")
    except Exception as error:  # the library raises bare Exception
        raise ExportError(
            f"the tokenizer of {source} is broken: {error}", remedy="download the file again"
        ) from error
    add_bos = bool(about.get("add_bos_token", about.get("pre") == "llama-bpe"))
    if add_bos and names["bos"]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[names["bos"], "$A"],
            special_tokens=[(names["bos"], about["bos_token_id"])],
        )
    ends = [about[key] for key in ("eos_token_id", "eot_token_id") if key in about]
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(
            {f"{kind}_token": text for kind, text in names.items()} | {"add_bos_token": add_bos}
        ),
        "generation_config.json": _json(
            {"bos_token_id": about.get("bos_token_id"), "eos_token_id": sorted(set(ends)) or None}
        ),
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = metadata["tokenizer.chat_template"].encode()
    return files


def _refuse_unknown(about: Mapping[str, Any], *, source: str) -> None:
    remedy = "export from the original checkpoint folder (config.json, safetensors, tokenizer.json)"
    if about.get("model") != "gpt2":
        raise ExportError(
            f"{source} has a {about.get('model')!r} tokenizer; of GGUF only byte-level BPE (gpt2) is read",
            remedy=remedy,
        )
    if about.get("pre", "default") not in _PRE_TOKENIZERS:
        raise ExportError(
            f"{source} splits words like {about['pre']!r}; known are {', '.join(sorted(_PRE_TOKENIZERS))}",
            remedy=remedy,
        )
    for key in ("tokens", "merges"):
        if key not in about:
            raise ExportError(f"{source} lacks 'tokenizer.ggml.{key}'", remedy="download the file again")


def _byte_level_bpe(about: Mapping[str, Any]) -> Tokenizer:
    tokens, merges = about["tokens"], [tuple(merge.split(" ")) for merge in about["merges"]]
    pre = about.get("pre", "default")
    # Llama 3 takes a word that is a token as it is, though no row of merges may lead to it.
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
    )
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    types = about.get("token_type", [])
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        texts = [token for token, found in zip(tokens, types, strict=False) if found == kind]
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    return tokenizer


def _token(about: Mapping[str, Any], key: str) -> str | None:
    return about["tokens"][about[key]] if key in about else None


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
