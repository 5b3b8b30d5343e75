"""Parse: one config.pbtxt, or the lack of it, to a ModelConfig, or to the reason why it cannot be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf import descriptor_pool, text_format

from genserve.config.backends import deduce_backend
from genserve.config.diagnostics import ConfigSource, Diagnostic, Severity, SourceMap
from genserve.config.model_config import ModelConfig
from genserve.config.schema import model_config, new_model_config
from genserve.errors import RepositoryError, suggestion
from genserve.files import read_regular_text

# The largest configs have about 100 KB. A megabyte of entries takes half a second to parse.
_MAX_BYTES = 1 << 20
MAX_NAME_BYTES = 255  # the longest file name on nearly every file system
_MAX_KEPT = 1 << 16      # characters; what takes memory between reads is bounded
_MAX_PROBLEM = 400      # characters; protobuf quotes the whole text of a string that does not end
# The prefix of protobuf's messages: the position, and the line.
PREFIX = re.compile(r"^\d+:\d+ : ('.*': )?")
UNKNOWN_NAME = re.compile(r'(?P<kind>Message|Enum) type "(?P<type>[\w.]+)" has no \w+ named "?(?P<name>\w+)')
# Matches a bracket, or a comment or a string, whose brackets do not count.
_BRACKET = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}\[\]<>]""")
_CLOSING = {"{": "}", "[": "]", "<": ">"}
# The first name of `iterative_sequence`; one letter longer, so a blank keeps the positions right.
_OLD_NAME = re.compile(r"\bgenerative_sequence\b(?=\s*:)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig(ConfigSource):
    """The values of one config, as far as it can be read.

    Attributes:
        message: the `inference.ModelConfig` as it is written; None: it cannot be read, and the only
            diagnostic says why.
        config: its values, with the backend as far as it can be deduced; None: there is no message, or it
            names a file outside of the model's folder, as the diagnostics say.
        diagnostics: why it cannot be read; the rules of `genserve.repository.rules` say what else is wrong.
    """

    message: Any
    config: ModelConfig | None
    diagnostics: tuple[Diagnostic, ...]


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
        folder: the model's folder.
        config_name: `configs/<config_name>.pbtxt` replaces config.pbtxt, if it exists.
    """
    named = folder / "configs" / f"{config_name}.pbtxt"
    return named if config_name and named.is_file() else folder / "config.pbtxt"


def read_config(folder: Path, *, config_name: str = "") -> ParsedConfig:
    """Read the config of the model in `folder`; a missing one is an empty one.

    Args:
        folder: its name is the model's.
        config_name: see `config_path`.
    """
    path = config_path(folder, config_name=config_name)
    if not os.path.lexists(path):
        return config_of(new_model_config(), path=path)
    return read_config_file(path, folder=folder)


def read_config_file(path: Path, *, folder: Path | None = None) -> ParsedConfig:
    """Read the config at `path`, in the folder of its model, or in the folder `configs` of its `folder`."""
    folder = folder or path.parent
    try:
        text = read_regular_text(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        remedy = "a model folder holds a config.pbtxt in UTF-8, of at most a megabyte"
        message = f"cannot be read: {error.strerror}"
        return unreadable_config(path, position="1:1", message=message, remedy=remedy)
    if text.startswith("\ufeff"):
        message, remedy = "begins with a byte order mark", "save it as UTF-8 without a byte order mark"
        return unreadable_config(path, position="1:1", message=message, remedy=remedy)
    return parse_config(text, path=path, folder=folder)


def parse_config(text: str, *, path: Path, folder: Path | None = None) -> ParsedConfig:
    """Read the text of one config.pbtxt: protobuf text format, by Triton's schema.

    Args:
        text: the content of the file.
        path: the file that the diagnostics name.
        folder: the model's folder; None: that of the file.
    """
    try:
        message = parse_message(text)
    except text_format.ParseError as error:
        problem = PREFIX.sub("", str(error)).rstrip(".")[:_MAX_PROBLEM]
        unknown = UNKNOWN_NAME.match(problem)
        position = f"{error.GetLine()}:{error.GetColumn()}"
        remedy = _unclosed(text) or (_suggestion_in_schema(unknown) if unknown else "")
        return unreadable_config(path, position=position, message=problem, remedy=remedy)
    return config_of(message, path=path, folder=folder, source_map=SourceMap(_with_new_name(text)))


def config_of(
    message: Any, *, path: Path, folder: Path | None = None, source_map: SourceMap | None = None
) -> ParsedConfig:
    """Return the config of an `inference.ModelConfig` from any source.

    Args:
        message: left as it is.
        path: the file that the diagnostics name.
        folder: the model's folder, whose name is the model's; None: that of the file.
        source_map: the positions in the text; None: there is no text.
    """
    folder = folder or path.parent
    source = ConfigSource(path=path, source_map=source_map)
    config: ModelConfig | None = None
    diagnostics = tuple(_misplaced_files(message, source, model=folder.name))
    if not diagnostics:
        deduced = new_model_config()
        deduced.CopyFrom(message)
        deduced.name = deduced.name or folder.name
        try:
            deduce_backend(deduced, folder)
        except RepositoryError as error:
            diagnostics = (source.diagnostic(Severity.ERROR, "", error.message, remedy=error.remedy),)
        config = model_config(deduced, name=folder.name)
    return ParsedConfig(
        path=path, source_map=source_map, message=message, config=config, diagnostics=diagnostics
    )


def _misplaced_files(message: Any, source: ConfigSource, *, model: str) -> Iterator[Diagnostic]:
    """Yield the file names that lead out of the model's folder, or are not valid.

    Such files must not be opened: a config can come from a client.
    """
    for path, name, folder in _named_files(message):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            yield source.diagnostic(
                Severity.ERROR,
                path,
                f"the file {name!r} is not in the folder of model '{model}'",
                remedy=f"put the file into {folder}, and write its path from there",
            )
        elif name and not _can_exist(pure):
            yield source.diagnostic(
                Severity.ERROR,
                path,
                f"{name[:64]!r} is not a valid file name",
                remedy=f"write up to {MAX_NAME_BYTES} bytes, none of them zero, and not '.'",
            )


def _can_exist(pure: PurePosixPath) -> bool:
    parts = pure.parts
    return bool(parts) and all("\0" not in part and len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def _named_files(message: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each field that names a file, the name, and the folder of the file."""
    yield "default_model_filename", message.default_model_filename, "the folder of each version"
    for index, output in enumerate(message.output):
        yield f"output[{index}].label_filename", output.label_filename, "the model's folder"
    for index, sample in enumerate(message.model_warmup):
        for spec in sample.inputs.values():
            yield f"model_warmup[{index}]", spec.input_data_file, "the model's folder `warmup`"
    for index, state in enumerate(message.sequence_batching.state):
        for initial in state.initial_state:
            yield f"sequence_batching.state[{index}]", initial.data_file, "the model's folder `initial_state`"


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


def _unclosed(text: str) -> str:
    """Return the remedy for the first bracket without its counterpart; empty: there is none."""
    opened: list[re.Match[str]] = []
    for found in _BRACKET.finditer(text):
        bracket = found[0]
        if bracket in _CLOSING:
            opened.append(found)
        elif bracket in _CLOSING.values():
            if not opened:
                return f"remove the {bracket} at {_place(found)}, which closes nothing"
            if _CLOSING[opened[-1][0]] != bracket:
                break
            opened.pop()
    return f"close the {opened[-1][0]} at {_place(opened[-1])}" if opened else ""


def _place(found: re.Match[str]) -> str:
    text, start = found.string, found.start()
    return f"{text.count(chr(10), 0, start) + 1}:{start - text.rfind(chr(10), 0, start)}"


def _suggestion_in_schema(unknown: re.Match[str]) -> str:
    pool = descriptor_pool.Default()
    if unknown["kind"] == "Enum":
        names = list(pool.FindEnumTypeByName(unknown["type"]).values_by_name)
    else:
        names = list(pool.FindMessageTypeByName(unknown["type"]).fields_by_name)
    if unknown["name"] in names:
        return f"write {unknown['name']} without quotes"
    return suggestion(unknown["name"], known=names)
