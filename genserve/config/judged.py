"""Judged: one config as its rules see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.config.fault import Fault, Severity
from genserve.config.places import Places

__all__ = ["JudgedConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConfig:
    """One config with all that rules may ask for.

    Attributes:
        message: the `inference.ModelConfig`, with its backend.
        places: of the fields in the text; None: there is no text.
        source: the file that faults name.
        folder: of the model.
        backends: the names that `backend` may have.
        completed: whether what a backend knows from the model's file has been filled in.
    """

    message: Any
    places: Places | None
    source: Path
    folder: Path
    backends: tuple[str, ...]
    completed: bool

    @property
    def name(self) -> str:
        """Of the model."""
        return self.folder.name

    def error(self, path: str, message: str, *, remedy: str, key: str | None = None) -> Fault:
        """Make an error at a field, or at the entry of a map that has this key."""
        return self.fault(Severity.ERROR, path, message, remedy=remedy, key=key)

    def warning(self, path: str, message: str, *, remedy: str, key: str | None = None) -> Fault:
        """Make a warning at a field, or at the entry of a map that has this key."""
        return self.fault(Severity.WARNING, path, message, remedy=remedy, key=key)

    def fault(
        self, severity: Severity, path: str, message: str, *, remedy: str, key: str | None = None
    ) -> Fault:
        """Make a fault at a field, or at the entry of a map that has this key."""
        place = ""
        if self.places is not None:
            place = self.places.of(path) if key is None else self.places.of_key(path, key)
        return Fault(severity=severity, path=self.source, place=place, message=message, remedy=remedy)
