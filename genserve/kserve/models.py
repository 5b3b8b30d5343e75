"""Models: what the protocols ask of a repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from genserve.config.model_config import ModelConfig
from genserve.inference import Door
from genserve.statistics import ModelStatistics

__all__ = ["IndexLine", "Models", "ServedModel"]


class ServedModel(Protocol):
    """One version of a model that answers."""

    @property
    def config(self) -> ModelConfig:
        """Normalised."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def version(self) -> int:
        """The number of its folder."""

    @property
    def statistics(self) -> ModelStatistics:
        """What it has done."""

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not executed yet."""

    @property
    def load_s(self) -> float:
        """How long its load took, seconds."""

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """The labels of the classes by output name, for the outputs that have a `label_filename`."""


class IndexLine(Protocol):
    """One line of the repository's index."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def version(self) -> int | None:
        """None: the model was never loaded."""

    @property
    def state(self) -> str | None:
        """READY, LOADING, UNLOADING, UNAVAILABLE."""

    @property
    def reason(self) -> str:
        """Why it is not ready."""


class Models(Door, Protocol):
    """A repository: the door to its models, and what is known of them. Safe from any thread."""

    @property
    def state(self) -> str:
        """The worst of all models': READY, LOADING or UNAVAILABLE."""

    @property
    def served(self) -> Sequence[ServedModel]:
        """Every version of every model that answers, by name and version."""

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        allow_code: bool = True,
    ) -> None:
        """Load or reload a model; see `Door.load`.

        Args:
            name: of the model.
            config: its config as JSON; empty: that of its folder.
            files: by `<version>/<name>`, in place of its folder; None: its folder.
            allow_code: whether config and files may lead to code being run that the repository does not hold.
        """

    def find(self, name: str, version: int = -1) -> ServedModel:
        """Return a version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is none, with Triton's text.
        """

    def versions(self, name: str) -> Sequence[int]:
        """Return the versions of a model that answer, ascending."""

    def index(self, *, ready_only: bool = False) -> Sequence[IndexLine]:
        """Return a line for each version, and one for each model that was never loaded; by name."""
