"""Fault: one thing that is wrong with a model of a repository, its place, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path

from genserve.errors import ConfigError, Status

__all__ = ["Fault", "Severity", "first_error", "nearest"]

_LISTED = 12    # names that a remedy lists


class Severity(StrEnum):
    """Whether a model can be served in spite of a fault."""

    ERROR = "error"         # no: it would not run, or would answer wrongly
    WARNING = "warning"     # yes, but something that its files say does not happen


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    severity: Severity
    path: Path                      # the file, or the folder in which something is missing
    place: str = ""                 # line:column, counted from 1; empty where no line is at fault
    message: str
    remedy: str
    status: Status = Status.INVALID_ARG     # of a load that fails by it
    at_load: bool = False                   # Triton finds it as it loads the model, not before

    @property
    def line(self) -> int | None:
        """Counted from 1."""
        return int(self.place.partition(":")[0]) if self.place else None

    @property
    def column(self) -> int | None:
        """Counted from 1."""
        return int(self.place.partition(":")[2]) if self.place else None

    @property
    def where(self) -> str:
        """`path:line:column`, or the path alone."""
        return f"{self.path}:{self.place}" if self.place else str(self.path)


def first_error(faults: Iterable[Fault]) -> ConfigError | None:
    """Return the first fault that is not a mere warning, as the error to raise; None: there is none."""
    for fault in faults:
        if fault.severity is Severity.ERROR:
            return ConfigError(
                fault.message, where=fault.where, status=fault.status, remedy=fault.remedy
            )
    return None


def nearest(name: str, *, known: Iterable[str]) -> str:
    """Return the remedy for a name that is not known: the nearest that is, or those that there are."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known there: {', '.join(names[:_LISTED]) or 'none'}{more}"
