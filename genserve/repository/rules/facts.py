"""Facts: what rules know: a config; a config and the files of its model; a model and the other models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.config.diagnostics import Diagnostic, Severity
from genserve.config.model_config import ModelConfig
from genserve.config.parse import ParsedConfig
from genserve.repository.index import ModelEntry
from genserve.repository.text_stages import Role, TextStages


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """The config of a model.

    Attributes:
        parsed: the config as it is written, or as a backend has completed it, with its positions.
        config: the values of `parsed`, with the backend.
        folder: the model's folder, whose name is the model's.
        backends: the names that `backend` may have.
        is_completed: a backend has completed the config, so every mandatory field must be there.
    """

    parsed: ParsedConfig
    config: ModelConfig
    folder: Path
    backends: tuple[str, ...]
    is_completed: bool = False

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.folder.name

    @property
    def message(self) -> Any:
        """The `inference.ModelConfig`, with the backend."""
        return self.config.message

    def error(self, field: str, message: str, *, remedy: str, key: str | None = None) -> Diagnostic:
        """Make an error at a field, or at the entry of a map that has this key."""
        return self.parsed.diagnostic(Severity.ERROR, field, message, remedy=remedy, key=key)

    def warning(self, field: str, message: str, *, remedy: str, key: str | None = None) -> Diagnostic:
        """Make a warning at a field, or at the entry of a map that has this key."""
        return self.parsed.diagnostic(Severity.WARNING, field, message, remedy=remedy, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts(ConfigFacts):
    """The config and the files of a model.

    Attributes:
        versions: the versions that have a folder, ascending.
        served: the versions that a load opens, ascending; empty if the version policy is wrong.
    """

    versions: tuple[int, ...]
    served: tuple[int, ...]

    @property
    def served_folders(self) -> Iterator[Path]:
        """The folders of the versions that a load opens."""
        return (self.folder / str(version) for version in self.served)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(FileFacts):
    """A model among the other models of its repository.

    Attributes:
        entry: the model.
        entries: all models of the repository, by name.
        text_models: the stages of all text models, by name.
        role: the role of the model in a text model; None: no role.
    """

    entry: ModelEntry
    entries: Mapping[str, ModelEntry]
    text_models: Mapping[str, TextStages]
    role: Role | None
