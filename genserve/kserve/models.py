"""Models: what the two protocols ask of the repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from genserve.config.model_config import ModelConfig
from genserve.inference import Door
from genserve.statistics import ModelStatistics

__all__ = ["EXTENSIONS", "IndexEntry", "Models", "Served"]

# Of the protocol, as the server's metadata lists them.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class Served(Protocol):
    """One version of a model that answers."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def version(self) -> int:
        """The number of the version."""

    @property
    def config(self) -> ModelConfig:
        """Complete, with all defaults; `message` too."""

    @property
    def statistics(self) -> ModelStatistics:
        """What it has done."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance."""


class IndexEntry(Protocol):
    """One version of a model, or a model that was never loaded."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def version(self) -> int | None:
        """None: never loaded."""

    @property
    def state(self) -> str | None:
        """READY, UNAVAILABLE, LOADING, UNLOADING; None: never loaded."""

    @property
    def reason(self) -> str:
        """Why it is unavailable; may be empty."""


class Models(Door, Protocol):
    """The door, and what there is to know about the models behind it."""

    @property
    def live(self) -> bool:
        """Whether the server runs."""

    @property
    def ready(self) -> bool:
        """Whether every model that was to be loaded answers."""

    def served(self, name: str, version: str = "") -> Served:
        """Return a version that answers; "": the highest.

        Raises:
            InferenceError: INVALID_ARG for what is no version, NOT_FOUND, or UNAVAILABLE.
        """

    def versions(self, name: str) -> Sequence[int]:
        """Return the versions that answer, ascending; of an unknown model, none."""

    def index(self) -> Sequence[IndexEntry]:
        """Return every version of every model, by name."""
