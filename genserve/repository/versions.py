"""Versions: where each version of each model stands, and the way to those that answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from genserve.errors import InferenceError, Status
from genserve.repository.served import Served

__all__ = ["IndexEntry", "ModelState", "Versions"]


class ModelState(StrEnum):
    """Triton's words for where a version stands."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """One line of the repository's index."""

    name: str
    version: int | None = None          # None: the model was never loaded
    state: ModelState | None = None
    reason: str = ""


class Versions:
    """The table of all versions. Any thread may read it; a new table takes the place of the old at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, int], IndexEntry] = {}
        # By name and version; the highest of a name also as version -1. Never changed, only replaced.
        self._routes: Mapping[tuple[str, int], Served] = {}

    @property
    def served(self) -> list[Served]:
        """All that answer, by name and version."""
        found = [(key, served) for key, served in self._routes.items() if key[1] != -1]
        return [served for _, served in sorted(found, key=lambda item: item[0])]

    def index(self) -> list[IndexEntry]:
        """Return what is known of each version, by name and version."""
        with self._lock:
            return [self._entries[key] for key in sorted(self._entries)]

    def states(self, name: str) -> list[IndexEntry]:
        """Return what is known of the versions of one model."""
        return [entry for entry in self.index() if entry.name == name]

    def of(self, name: str) -> list[Served]:
        """Return the versions of a model that answer, ascending."""
        return [served for served in self.served if served.name == name]

    def get(self, name: str, version: int = -1) -> Served | None:
        """Return the version of a model; -1: the highest that answers; None: there is none."""
        return self._routes.get((name, version))

    def find(self, name: str, version: int = -1) -> Served:
        """Return the version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is none; with Triton's text.
        """
        served = self.get(name, version)
        if served is not None:
            return served
        raise self._not_found(name, version)

    def _not_found(self, name: str, version: int) -> InferenceError:
        known = [entry.version for entry in self.states(name)]
        start, status = f"Request for unknown model: '{name}'", Status.NOT_FOUND
        if not known:
            text = "is not found"
        elif version == -1:
            text = "has no available versions"
        elif version in known:
            text, status = f"version {version} is not at ready state", Status.UNAVAILABLE
        else:
            text = f"version {version} is not found"
        return InferenceError(f"{start} {text}", status=status)

    def set_state(self, name: str, version: int, state: ModelState, *, reason: str = "") -> None:
        """Note where a version stands; routes stay as they are."""
        with self._lock:
            self._entries[name, version] = IndexEntry(
                name=name, version=version, state=state, reason=reason
            )

    def put(self, name: str, fresh: Iterable[Served]) -> list[Served]:
        """Let these versions answer in place of all others of the model; returns those replaced."""
        with self._lock:
            old = [served for (n, version), served in self._routes.items() if n == name and version != -1]
            routes = {key: served for key, served in self._routes.items() if key[0] != name}
            self._entries = {
                key: entry
                for key, entry in self._entries.items()
                if key[0] != name or entry.state is not ModelState.LOADING
            }
            for served in sorted(fresh, key=lambda served: served.version):
                routes[name, served.version] = routes[name, -1] = served
                self._entries[name, served.version] = IndexEntry(
                    name=name, version=served.version, state=ModelState.READY
                )
            self._routes = routes
        return old
