"""GGUF tokenizer: builds the tokenizer files of a Hugging Face folder from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from genserve.errors import ExportError
from genserve.export.gguf.pre_tokenizers import PRE_TOKENIZERS

_SPACE = "\u2581"   # SentencePiece writes a space as this character

# Tokens that end a turn of a chat, for files that do not name one. Source: llama.cpp, `llama-vocab.cpp`.
_TURN_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<EOT>",
        "_<EOT>", "[EOT]", "<|END_OF_TURN_TOKEN|>",
    }
)  # fmt: skip


def tokenizer_files(metadata: Mapping[str, Any], *, source: str) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint folder, by name.

    Raises:
        ExportError: the kind of the tokenizer or its pre-tokenizer is not known, or the tokenizer is
            incomplete or inconsistent.
    """
    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    ggml["model"] = str(ggml.get("model"))
    _require_supported(ggml, source=source)
    kind = "gemma4" if ggml["model"] == "gpt2" and ggml.get("pre") in _WITH_SPACES else ggml["model"]
    try:
        tokenizer = _KINDS[kind](ggml)
        names = {name: _token(ggml, f"{name}_token_id") for name in ("bos", "eos")}
        names["pad"] = _token(ggml, "padding_token_id")
        _add_tokens(tokenizer, ggml, architecture=str(metadata.get("general.architecture")))
        added = _added_around(ggml, kind=kind)
    except Exception as error:  # the library raises bare Exception
        raise ExportError(
            f"the tokenizer of {source} is broken: {error}", remedy="download the file again"
        ) from error
    if any(added):
        before, after = added
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, ggml["tokens"].index(token)) for token in {*before, *after}],
        )
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(
            {f"{name}_token": text for name, text in names.items()}
            | {"add_bos_token": bool(added[0]), "add_eos_token": bool(added[1])}
        ),
        "generation_config.json": _json(
            {"bos_token_id": ggml.get("bos_token_id"), "eos_token_id": _ends(ggml) or None}
        ),
    }
    if template := _chat_template(metadata):
        files["chat_template.jinja"] = template.encode()
    return files


def _require_supported(ggml: Mapping[str, Any], *, source: str) -> None:
    model, pre = ggml["model"], ggml.get("pre", "default")
    remedy = "export from the original checkpoint folder (config.json, safetensors, tokenizer.json)"
    if model not in _KINDS:
        raise ExportError(
            f"{source} has a tokenizer of the kind {model!r}; known: {', '.join(sorted(_KINDS))}",
            remedy=remedy,
        )
    if model == "gpt2" and pre not in PRE_TOKENIZERS and pre not in _WITH_SPACES:
        raise ExportError(
            f"{source} has the pre-tokenizer {pre!r}; known: {', '.join(sorted(PRE_TOKENIZERS))}",
            remedy=remedy,
        )
    for key in _NEEDED[model]:
        if key not in ggml:
            raise ExportError(f"{source} lacks 'tokenizer.ggml.{key}'", remedy="download the file again")


# Pre-tokenizers of the kind "gpt2" that write spaces as SentencePiece does, and have no words.
_WITH_SPACES = frozenset({"gemma4", "sarvam-moe"})


def _byte_level_bpe(ggml: Mapping[str, Any]) -> Tokenizer:
    pre = PRE_TOKENIZERS[ggml.get("pre", "default")]
    bpe = models.BPE(vocab=_vocabulary(ggml), merges=_merges(ggml), ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(bpe)
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(ggml: Mapping[str, Any]) -> Tokenizer:
    """Build the BPE of SentencePiece, whose scores are the ranks of the merges.

    Source: `LlamaConverter` and `generate_merges` of transformers' convert_slow_tokenizer.py.
    """
    vocabulary, scores = _vocabulary(ggml), ggml["scores"]
    normal = {
        token: vocabulary[token]
        for token, kind in zip(ggml["tokens"], _types(ggml), strict=True)
        if kind == TokenType.NORMAL
    }
    merges = [
        (token[:length], token[length:])
        for token in sorted(normal, key=lambda token: -scores[normal[token]])
        for length in _cuts(token, normal)
    ]
    return _with_spaces(ggml, merges=merges, prefix=bool(ggml.get("add_space_prefix", True)))


def _cuts(token: str, tokens: Mapping[str, int]) -> list[int]:
    """Return where a token can be cut into two tokens, those with the smallest ids first."""
    cuts = (cut for cut in range(1, len(token)) if token[:cut] in tokens and token[cut:] in tokens)
    return sorted(cuts, key=lambda cut: (tokens[token[:cut]], tokens[token[cut:]]))


def _bpe_with_spaces(ggml: Mapping[str, Any]) -> Tokenizer:
    return _with_spaces(ggml, merges=_merges(ggml), prefix=bool(ggml.get("add_space_prefix", False)))


def _with_spaces(ggml: Mapping[str, Any], *, merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    unknown = ggml["tokens"][ggml.get("unknown_token_id", 0)]
    bpe = models.BPE(
        vocab=_vocabulary(ggml), merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _unigram(ggml: Mapping[str, Any]) -> Tokenizer:
    """Build a Unigram model of SentencePiece. Source: `SpmConverter`, in the same file."""
    pieces = list(zip(ggml["tokens"], ggml["scores"], strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=ggml.get("unknown_token_id", 2), byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    if rules := ggml.get("precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(rule % 256 for rule in rules)))
    if ggml.get("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if ggml.get("add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return tokenizer


def _wordpiece(ggml: Mapping[str, Any]) -> Tokenizer:
    """Build BERT's WordPiece, in which GGUF marks the first pieces of words instead of the others."""
    normal = zip(ggml["tokens"], _types(ggml), strict=True)
    pieces = (
        token if kind != TokenType.NORMAL else token[1:] if token.startswith(_SPACE) else f"##{token}"
        for token, kind in normal
    )
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    unknown = ggml["tokens"][ggml.get("unknown_token_id", 100)]
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=1024))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Tokenizer]] = MappingProxyType(
    {
        "gpt2": _byte_level_bpe,
        "llama": _sentencepiece,
        "gemma4": _bpe_with_spaces,
        "t5": _unigram,
        "bert": _wordpiece,
    }
)
_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt2": ("tokens", "merges"),
        "llama": ("tokens", "scores"),
        "gemma4": ("tokens", "merges"),
        "t5": ("tokens", "scores"),
        "bert": ("tokens",),
    }
)


def _vocabulary(ggml: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(ggml["tokens"])}


def _types(ggml: Mapping[str, Any]) -> list[int]:
    tokens: list[str] = ggml["tokens"]
    return ggml.get("token_type") or [int(TokenType.NORMAL)] * len(tokens)


def _merges(ggml: Mapping[str, Any]) -> list[tuple[str, str]]:
    # A space separates the two tokens; in a vocabulary with spaces as they are, one may begin a token.
    return [(merge[:cut], merge[cut + 1 :]) for merge in ggml["merges"] for cut in [merge.index(" ", 1)]]


def _add_tokens(tokenizer: Tokenizer, ggml: Mapping[str, Any], *, architecture: str) -> None:
    """Add the tokens that are found in a text before it is split."""
    # The special tokens of Phi-3 include the white space behind them; llama.cpp recognises the model too.
    includes_space = architecture == "phi3" and ggml["model"] == "llama"
    tokens = [
        AddedToken(
            token,
            special=kind == TokenType.CONTROL,
            normalized=False,
            rstrip=includes_space and kind == TokenType.CONTROL and token not in _PHI3_PLAIN,
        )
        for token, kind in zip(ggml["tokens"], _types(ggml), strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    for special in (True, False):
        tokenizer.add_tokens([token for token in tokens if token.special == special])


_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def _added_around(ggml: Mapping[str, Any], *, kind: str) -> tuple[list[str], list[str]]:
    """Return the tokens that are added before and after each text."""
    if kind == "bert":
        first = _token(ggml, "bos_token_id") or _token(ggml, "cls_token_id")
        last = _token(ggml, "seperator_token_id") or _token(ggml, "eos_token_id")  # spelled so in GGUF
    else:
        first, last = _token(ggml, "bos_token_id"), _token(ggml, "eos_token_id")
    pre = PRE_TOKENIZERS.get(ggml.get("pre", "default"))
    by_default = pre is not None and pre.add_bos if kind == "gpt2" else kind in ("llama", "bert")
    adds_first = ggml.get("add_bos_token", by_default)
    adds_last = ggml.get("add_eos_token", kind == "t5")
    if kind == "bert":
        adds_last = ggml.get("add_sep_token", True)
    return [first] if adds_first and first else [], [last] if adds_last and last else []


def _ends(ggml: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    named = {ggml[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in ggml}
    if "eot_token_id" not in ggml:
        named |= set(_turn_ends(ggml))
    return sorted(named)


def _turn_ends(ggml: Mapping[str, Any]) -> Iterator[int]:
    for index, (token, kind) in enumerate(zip(ggml["tokens"], _types(ggml), strict=True)):
        if token in _TURN_ENDS and kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            yield index


def _chat_template(metadata: Mapping[str, Any]) -> str | None:
    """Return the default template, or else the first of the named ones."""
    default, first = "tokenizer.chat_template", "tokenizer.chat_template."
    named = (str(value) for key, value in metadata.items() if key.startswith(first))
    return metadata.get(default) or next(named, None)


def _token(ggml: Mapping[str, Any], key: str) -> str | None:
    return ggml["tokens"][ggml[key]] if key in ggml else None


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
