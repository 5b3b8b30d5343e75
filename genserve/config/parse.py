"""Parse: one config.pbtxt, or the lack of it, to a ModelConfig and all that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, text_format

from genserve.config.backends import deduce_backend, known_backends
from genserve.config.config_rules import config_diagnostics, files
from genserve.config.diagnostics import (
    Diagnostic,
    Severity,
    SourceMap,
    ValidationContext,
    first_error,
    nearest,
)
from genserve.config.model_config import ModelConfig
from genserve.config.schema import model_config, new_model_config
from genserve.errors import RepositoryError

__all__ = [
    "ParsedConfig",
    "config_path",
    "inspect_message",
    "inspect_model_config",
    "parse_message",
    "parse_model_config",
    "read_model_config",
]

# What protobuf puts in front of its messages: the place, and the line that it is in.
PREFIX = re.compile(r"^\d+:\d+ : ('.*': )?")
UNKNOWN_NAME = re.compile(r'(?P<kind>Message|Enum) type "(?P<type>[\w.]+)" has no \w+ named "?(?P<name>\w+)')
# What `iterative_sequence` was called at first; one letter longer, so a blank keeps the places right.
_OLD_NAME = re.compile(r"\bgenerative_sequence\b(?=\s*:)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig:
    """What one config says, and all that is wrong with it.

    Attributes:
        path: of the config.pbtxt, which need not be there.
        message: the `inference.ModelConfig` as it is written; None: it cannot be read, and the only
            diagnostic says why.
        config: its values, with the backend as far as it can be told; None: as `message`, or it names a file
            that is not the model's, and the diagnostics tell these.
        places: of the fields in the text; None: there is none.
        diagnostics: in the order of the rules.
    """

    path: Path
    message: Any
    config: ModelConfig | None
    places: SourceMap | None
    diagnostics: tuple[Diagnostic, ...]

    def place(self, path: str, *, key: str | None = None) -> str:
        """Return where a field is, or the entry of a map that has this key; empty: there is no text."""
        if self.places is None:
            return ""
        return self.places.of(path) if key is None else self.places.of_key(path, key)

    def diagnostic(
        self,
        severity: Severity,
        path: str,
        message: str,
        *,
        remedy: str,
        key: str | None = None,
        at_load: bool = False,
    ) -> Diagnostic:
        """Make a diagnostic at a field; for `key`, see `place`."""
        return Diagnostic(
            severity=severity,
            path=self.path,
            place=self.place(path, key=key),
            message=message,
            remedy=remedy,
            at_load=at_load,
        )


def read_model_config(path: Path) -> ModelConfig:
    """Read the config.pbtxt at `path`, which lies in the folder of its model.

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
        ConfigError: not the schema, or not a model: the first error of its diagnostics; the message begins
            with `source:line:column: `.
    """
    return _config_or_error(_parse(text, path=source, folder=source.parent, backends=known_backends()))


def parse_message(text: str) -> Any:
    """Read the text of one config.pbtxt as it is written, right or wrong, to an `inference.ModelConfig`.

    Raises:
        google.protobuf.text_format.ParseError: it is not the schema.
    """
    return text_format.Parse(_with_new_name(text), new_model_config())


def config_path(folder: Path, *, config_name: str = "") -> Path:
    """Return where the config of a model is.

    Args:
        folder: of the model.
        config_name: `configs/<config_name>.pbtxt` is taken in place of config.pbtxt, if it is there.
    """
    named = folder / "configs" / f"{config_name}.pbtxt"
    return named if config_name and named.is_file() else folder / "config.pbtxt"


def inspect_model_config(
    folder: Path, *, config_name: str = "", backends: Iterable[str] = ()
) -> ParsedConfig:
    """Read the config of the model in `folder`, with all its diagnostics; a missing one is an empty one.

    Args:
        folder: its name is the model's.
        config_name: see `config_path`.
        backends: those that there are; empty: `known_backends()`.
    """
    path = config_path(folder, config_name=config_name)
    backends = tuple(backends) or known_backends()
    if not path.exists():
        return inspect_message(new_model_config(), path=path, folder=folder, backends=backends)
    return _read(path, folder=folder, backends=backends)


def inspect_message(
    message: Any,
    *,
    path: Path,
    folder: Path,
    backends: Iterable[str] = (),
    places: SourceMap | None = None,
    completed: bool = False,
) -> ParsedConfig:
    """Judge an `inference.ModelConfig`, wherever it comes from.

    Args:
        message: left as it is.
        path: of the file that the diagnostics name.
        folder: of the model; its name is the model's.
        backends: those that there are; empty: `known_backends()`.
        places: of the fields in the text; None: there is no text, and diagnostics have no place.
        completed: whether a backend has completed it, so that nothing may be missing any more.
    """
    backends = tuple(backends) or known_backends()
    judged = ValidationContext(
        message=message, places=places, source=path, folder=folder, backends=backends, completed=completed
    )
    outside = tuple(files(judged))
    if outside:
        return ParsedConfig(path=path, message=message, config=None, places=places, diagnostics=outside)
    deduced = new_model_config()
    deduced.CopyFrom(message)
    diagnostics: list[Diagnostic] = []
    try:
        deduce_backend(deduced, folder)
    except RepositoryError as error:
        place = places.of("") if places else ""
        diagnostics.append(_error(path, place=place, message=error.message, remedy=error.remedy))
    diagnostics += config_diagnostics(
        deduced,
        places=places,
        source=path,
        folder=folder,
        backends=backends,
        completed=completed,
    )
    return ParsedConfig(
        path=path,
        message=message,
        config=model_config(deduced, name=folder.name),
        places=places,
        diagnostics=tuple(diagnostics),
    )


def _config_or_error(parsed: ParsedConfig) -> ModelConfig:
    error = first_error(parsed.diagnostics)
    if error is not None:
        raise error
    assert parsed.config is not None  # or there would be an error
    return parsed.config


def _read(path: Path, *, folder: Path, backends: tuple[str, ...]) -> ParsedConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return _unreadable(path, place="1:1", message=f"cannot be read: {error}", remedy=_UTF8)
    return _parse(text, path=path, folder=folder, backends=backends)


def _parse(text: str, *, path: Path, folder: Path, backends: tuple[str, ...]) -> ParsedConfig:
    try:
        message = parse_message(text)
    except text_format.ParseError as error:
        told = PREFIX.sub("", str(error)).rstrip(".")
        unknown = UNKNOWN_NAME.match(told)
        place = f"{error.GetLine()}:{error.GetColumn()}"
        remedy = _nearest_of_schema(unknown) if unknown else ""
        return _unreadable(path, place=place, message=told, remedy=remedy)
    places = SourceMap(_with_new_name(text))
    return inspect_message(message, path=path, folder=folder, backends=backends, places=places)


def _with_new_name(text: str) -> str:
    return _OLD_NAME.sub("iterative_sequence ", text)


_UTF8 = "a model folder holds a config.pbtxt in UTF-8"


def _error(path: Path, *, place: str, message: str, remedy: str) -> Diagnostic:
    return Diagnostic(severity=Severity.ERROR, path=path, place=place, message=message, remedy=remedy)


def _unreadable(path: Path, *, place: str, message: str, remedy: str) -> ParsedConfig:
    diagnostic = _error(path, place=place, message=message, remedy=remedy)
    return ParsedConfig(path=path, message=None, config=None, places=None, diagnostics=(diagnostic,))


def _nearest_of_schema(unknown: re.Match[str]) -> str:
    pool = descriptor_pool.Default()
    if unknown["kind"] == "Enum":
        names = list(pool.FindEnumTypeByName(unknown["type"]).values_by_name)
    else:
        names = list(pool.FindMessageTypeByName(unknown["type"]).fields_by_name)
    return nearest(unknown["name"], known=names)
