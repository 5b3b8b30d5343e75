"""Backend: what the server asks of whoever runs models of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from genserve.config.model_config import ModelConfig
from genserve.inference import Door, Inference
from genserve.metrics import Metrics

__all__ = ["Backend", "ModelSource", "Placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """One version of a model, as a backend is given it."""

    config: ModelConfig
    version: int
    path: Path                  # the folder of the model
    folder: Path                # the folder of the version
    door: Door                  # to all models, for BLS
    metrics: Metrics            # where a model's own metrics go

    @property
    def name(self) -> str:
        """Of the model."""
        return self.config.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which instance of a model this is, and where it runs."""

    name: str                   # "m_0", "m_1_0": of the group, and the number in it
    kind: str                   # "CPU", "GPU", "MODEL"
    device_id: int = 0


class Backend(Protocol):
    """One instance of one version of a model. A backend is a class with these five methods.

    An entry point of the group `genserve.backends` makes a class known by the name that config.pbtxt uses. It
    may also have two that are called from any thread: `is_ready(self) -> bool`; and `abort(self) -> bool`, to
    make an `execute` return that has taken longer than an unload waits, which says whether it can do that.
    """

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """Fill in what the config does not say and the model's file does.

        Args:
            message: the `inference.ModelConfig`, changed in place.
            path: the folder of the model.
            version: the highest version that will be served.
            default_max_batch_size: of an ONNX model that can batch and whose config does not set one; other
                backends have no use for it.

        Raises:
            RepositoryError: config and file contradict each other.
        """

    @classmethod
    def load(cls, source: ModelSource) -> Any:
        """Load what all instances of the version share (weights, a session); may return None.

        Raises:
            RepositoryError: the model cannot be loaded.
        """

    def __init__(self, source: ModelSource, shared: Any, placement: Placement) -> None:
        """Start the instance, on the thread that will also execute and close it.

        Raises:
            Exception: any; the load fails with it.
        """

    def execute(self, batch: Sequence[Inference]) -> None:
        """Answer each inference of a batch, now or, if decoupled, later and from any thread.

        Raises:
            Exception: any; whatever of the batch has not ended is failed with it.
        """

    def close(self) -> None:
        """Let go of everything; nothing is executed any more."""
