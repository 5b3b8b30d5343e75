"""Tokenizer files: reads the folder of a tokenizer stage, whose file names are Hugging Face's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from genserve.errors import InvalidRequest, RepositoryError
from genserve.files import read_regular_text
from genserve.sampling.defaults import default_sampling_params
from genserve.text.chat_template import ChatTemplate

GENERATION_CONFIG = "generation_config.json"
_MAX_BYTES = 256 << 20   # the largest vocabularies have about 30 MB
REMEDY = "copy the file from the model's checkpoint, or export the model again with --overwrite"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The contents of the tokenizer's files, checked against each other."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]          # the texts of `bos_token`, `eos_token` ...
    add_bos_token: bool                     # prepend the bos token to prompts even if tokenizer.json does not
    eos_token_ids: frozenset[int]           # empty: only the length limit ends a text
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None = None   # for chats with tools, if the model has two templates
    config: dict[str, Any] = field(default_factory=dict)    # tokenizer_config.json


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files in `folder`; chat_template.jinja and generation_config.json are optional.

    Raises:
        RepositoryError: a file is missing or broken; the message names it.
    """
    backend = _read_backend(folder / "tokenizer.json")
    config_file = folder / "tokenizer_config.json"
    config = _read_json(config_file)
    special_tokens = _special_tokens(config)
    for key in ("bos_token", "eos_token"):
        text = special_tokens.get(key)
        if text is not None and backend.token_to_id(text) is None:
            raise RepositoryError(f"{config_file}: {key} {text!r} is not in the vocabulary", remedy=REMEDY)
    chat_template, tool_template = _chat_templates(folder, config=config, special_tokens=special_tokens)
    return TokenizerFiles(
        backend=backend,
        config=config,
        special_tokens=special_tokens,
        add_bos_token=config.get("add_bos_token") is True,
        eos_token_ids=_eos_token_ids(folder, backend=backend, eos_token=special_tokens.get("eos_token")),
        chat_template=chat_template,
        tool_template=tool_template,
    )


def recommended_sampling_params(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters of generation_config.json in the folder of a tokenizer stage, if any.

    Raises:
        RepositoryError: the file is broken, or a value is out of range.
    """
    try:
        return default_sampling_params(_read_generation_config(folder))
    except InvalidRequest as error:
        raise RepositoryError(
            f"{folder / GENERATION_CONFIG}: {error.message}", remedy="correct the value, or remove it"
        ) from None


def _read_generation_config(folder: Path) -> dict[str, Any]:
    file = folder / GENERATION_CONFIG
    return _read_json(file) if file.exists() else {}


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode_batch_fast([""])     # panics if the post-processor adds a token that does not exist
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception; its panics are no Exception
        raise RepositoryError(f"{file} cannot be read: {error}", remedy=REMEDY) from None
    # The file may have settings of the training run, which would silently truncate prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_text(file: Path) -> str:
    try:
        return read_regular_text(file, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise RepositoryError(f"{file} cannot be read: {error.strerror}", remedy=REMEDY) from None


def _read_json(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RepositoryError(f"{file} cannot be read: {error}", remedy=REMEDY) from None
    if not isinstance(value, dict):
        raise RepositoryError(f"{file} must be a JSON object", remedy=REMEDY)
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = ((key, value) for key, value in config.items() if key.endswith("_token"))
    texts = ((key, value.get("content") if isinstance(value, dict) else value) for key, value in named)
    return {key: text for key, text in texts if isinstance(text, str)}


def _eos_token_ids(folder: Path, *, backend: tokenizers.Tokenizer, eos_token: str | None) -> frozenset[int]:
    """Return the ids in generation_config.json, and the eos token, which ends a turn of a chat."""
    file = folder / GENERATION_CONFIG
    named = _read_generation_config(folder).get("eos_token_id")
    ids = named if isinstance(named, list) else [named] if named is not None else []
    if not all(type(token_id) is int for token_id in ids):
        raise RepositoryError(f"{file}: eos_token_id must be an integer or a list of integers", remedy=REMEDY)
    own = backend.token_to_id(eos_token) if eos_token is not None else None
    return frozenset(ids if own is None else [*ids, own])


def _chat_templates(
    folder: Path, *, config: dict[str, Any], special_tokens: dict[str, str]
) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Return the chat template, and the template for chats with tools if the model has two.

    A template's own file takes precedence over tokenizer_config.json, as in transformers.
    """

    def read(*files: str, name: str) -> ChatTemplate | None:
        file = next((folder / file for file in files if (folder / file).exists()), None)
        source = by_name.get(name) if file is None else _read_text(file)
        if source is None:
            return None
        file = file or folder / "tokenizer_config.json"
        if not isinstance(source, str):
            raise RepositoryError(f"{file}: chat_template must be a string", remedy=REMEDY)
        return ChatTemplate(source, special_tokens=special_tokens, name=str(file))

    source = config.get("chat_template")
    by_name = {"default": source}
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        by_name = {entry.get("name"): entry.get("template") for entry in source}
    folders = ("additional_chat_templates/tool_use.jinja", "chat_template.tool_use.jinja")
    return read("chat_template.jinja", name="default"), read(*folders, name="tool_use")
