"""Parse: one config.pbtxt, or the lack of it, to a ModelConfig and its diagnostics."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, text_format

from genserve.config.backends import deduce_backend, known_backends
from genserve.config.config_rules import config_diagnostics, validate_file_names
from genserve.config.diagnostics import (
    ConfigSource,
    Diagnostic,
    Severity,
    SourceMap,
    ValidationContext,
    first_error,
)
from genserve.config.model_config import ModelConfig
from genserve.config.schema import model_config, new_model_config
from genserve.errors import RepositoryError, suggestion
from genserve.files import read_regular_text

# The largest configs have about 100 KB. A megabyte of entries takes half a second to parse.
_MAX_BYTES = 1 << 20
_MAX_KEPT = 1 << 16      # characters; what takes memory between reads is bounded
_MAX_PROBLEM = 400      # characters; protobuf quotes the whole text of a string that does not end
# The prefix of protobuf's messages: the position, and the line.
PREFIX = re.compile(r"^\d+:\d+ : ('.*': )?")
UNKNOWN_NAME = re.compile(r'(?P<kind>Message|Enum) type "(?P<type>[\w.]+)" has no \w+ named "?(?P<name>\w+)')
# The first name of `iterative_sequence`; one letter longer, so a blank keeps the positions right.
_OLD_NAME = re.compile(r"\bgenerative_sequence\b(?=\s*:)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig(ConfigSource):
    """The values of one config, and its diagnostics.

    Attributes:
        path: of its file, which may be missing.
        source_map: None: it has no text.
        message: the `inference.ModelConfig` as it is written; None: it cannot be read, and the only
            diagnostic says why.
        config: its values, with the backend as far as it can be deduced; None: there is no message, or it
            names a file outside of the model's folder, as the diagnostics say.
        diagnostics: in the order of the rules.
    """

    message: Any
    config: ModelConfig | None
    diagnostics: tuple[Diagnostic, ...]


def read_model_config(path: Path) -> ModelConfig:
    """Read the config.pbtxt at `path`, in the folder of its model.

    Raises:
        ConfigError: there is no such file, it cannot be read, or see `parse_model_config`.
    """
    return _config_or_error(_read(path, folder=path.parent, backends=known_backends()))


def parse_model_config(text: str, *, source: Path) -> ModelConfig:
    """Read the text of one config.pbtxt.

    Args:
        text: protobuf text format, by Triton's schema.
        source: the file it is from; its folder has the name of the model.

    Raises:
        ConfigError: the first error of its diagnostics; the message begins with `source:line:column: `.
    """
    return _config_or_error(_parse(text, path=source, folder=source.parent, backends=known_backends()))


def parse_message(text: str) -> Any:
    """Read the text of one config.pbtxt as it is written, valid or not, to an `inference.ModelConfig`.

    Raises:
        google.protobuf.text_format.ParseError: the text does not follow the schema.
    """
    message = new_model_config()
    message.CopyFrom(_parsed(text) if len(text) <= _MAX_KEPT else _parsed.__wrapped__(text))
    return message


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Read a text; the load of one model reads the configs of all, and protobuf takes 0.5 ms for each."""
    return text_format.Parse(_with_new_name(text), new_model_config())


def config_path(folder: Path, *, config_name: str = "") -> Path:
    """Return the path of a model's config.

    Args:
        folder: of the model.
        config_name: `configs/<config_name>.pbtxt` replaces config.pbtxt, if it exists.
    """
    named = folder / "configs" / f"{config_name}.pbtxt"
    return named if config_name and named.is_file() else folder / "config.pbtxt"


def inspect_model_config(
    folder: Path, *, config_name: str = "", backends: Iterable[str] = ()
) -> ParsedConfig:
    """Read and validate the config of the model in `folder`; a missing one is an empty one.

    Args:
        folder: its name is the model's.
        config_name: see `config_path`.
        backends: the known ones; empty: `known_backends()`.
    """
    path = config_path(folder, config_name=config_name)
    backends = tuple(backends) or known_backends()
    if not os.path.lexists(path):
        return inspect_message(new_model_config(), path=path, folder=folder, backends=backends)
    return _read(path, folder=folder, backends=backends)


def inspect_message(
    message: Any,
    *,
    path: Path,
    folder: Path,
    backends: Iterable[str] = (),
    source_map: SourceMap | None = None,
    completed: bool = False,
) -> ParsedConfig:
    """Validate an `inference.ModelConfig` from any source.

    Args:
        message: left as it is.
        path: of the file that the diagnostics name.
        folder: of the model; its name is the model's.
        backends: the known ones; empty: `known_backends()`.
        source_map: of the text; None: there is none, and diagnostics have no position.
        completed: whether a backend has completed it, so that every mandatory field must be there.
    """
    deduced = new_model_config()
    deduced.CopyFrom(message)
    context = ValidationContext(
        message=deduced,
        source=ConfigSource(path=path, source_map=source_map),
        folder=folder,
        backends=tuple(backends) or known_backends(),
        completed=completed,
    )
    outside = tuple(validate_file_names(context))
    if outside:
        return ParsedConfig(
            path=path, source_map=source_map, message=message, config=None, diagnostics=outside
        )
    undeduced: tuple[Diagnostic, ...] = ()
    try:
        deduce_backend(deduced, folder)
    except RepositoryError as error:
        undeduced = (context.error("", error.message, remedy=error.remedy),)
    return ParsedConfig(
        path=path,
        source_map=source_map,
        message=message,
        config=model_config(deduced, name=folder.name),
        diagnostics=(*undeduced, *config_diagnostics(context)),
    )


def _config_or_error(parsed: ParsedConfig) -> ModelConfig:
    error = first_error(parsed.diagnostics)
    if error is not None:
        raise error
    assert parsed.config is not None  # or there would be an error
    return parsed.config


def _read(path: Path, *, folder: Path, backends: tuple[str, ...]) -> ParsedConfig:
    try:
        text = read_regular_text(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        remedy = "a model folder holds a config.pbtxt in UTF-8, of at most a megabyte"
        message = f"cannot be read: {error.strerror}"
        return unreadable_config(path, position="1:1", message=message, remedy=remedy)
    if text.startswith("\ufeff"):
        message, remedy = "begins with a byte order mark", "save it as UTF-8 without a byte order mark"
        return unreadable_config(path, position="1:1", message=message, remedy=remedy)
    return _parse(text, path=path, folder=folder, backends=backends)


def _parse(text: str, *, path: Path, folder: Path, backends: tuple[str, ...]) -> ParsedConfig:
    try:
        message = parse_message(text)
    except text_format.ParseError as error:
        problem = PREFIX.sub("", str(error)).rstrip(".")[:_MAX_PROBLEM]
        unknown = UNKNOWN_NAME.match(problem)
        position = f"{error.GetLine()}:{error.GetColumn()}"
        remedy = _suggestion_in_schema(unknown) if unknown else ""
        return unreadable_config(path, position=position, message=problem, remedy=remedy)
    source_map = SourceMap(_with_new_name(text))
    return inspect_message(message, path=path, folder=folder, backends=backends, source_map=source_map)


def _with_new_name(text: str) -> str:
    return _OLD_NAME.sub("iterative_sequence ", text)


def unreadable_config(
    path: Path, *, message: str, remedy: str, position: str = "", at: Path | None = None
) -> ParsedConfig:
    """Return the config at `path` without values; its only diagnostic, at `at` or else `path`, says why."""
    diagnostic = Diagnostic(
        severity=Severity.ERROR, path=at or path, position=position, message=message, remedy=remedy
    )
    return ParsedConfig(path=path, message=None, config=None, diagnostics=(diagnostic,))


def _suggestion_in_schema(unknown: re.Match[str]) -> str:
    pool = descriptor_pool.Default()
    if unknown["kind"] == "Enum":
        names = list(pool.FindEnumTypeByName(unknown["type"]).values_by_name)
    else:
        names = list(pool.FindMessageTypeByName(unknown["type"]).fields_by_name)
    return suggestion(unknown["name"], known=names)
