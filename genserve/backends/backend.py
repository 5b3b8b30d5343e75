"""Backend: the interface of a backend, and what the built-in ones share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from genserve.config.model_config import ModelConfig
from genserve.config.parameter_rules import byte_size
from genserve.errors import RepositoryError, Status
from genserve.generation_metrics import Metrics
from genserve.inference import Inference, InferenceServer

__all__ = [
    "Backend",
    "ModelSource",
    "PerDevice",
    "Placement",
    "boolean_parameter",
    "bytes_parameter",
    "integer_parameter",
    "model_file",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """One version of a model, as a backend is given it."""

    config: ModelConfig
    version: int
    path: Path                  # the folder of the model
    folder: Path                # the folder of the version
    server: InferenceServer                  # to all models, for BLS
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


def model_file(folder: Path, *, filename: str, default: str, model: str) -> Path:
    """Return the file, or the folder, that a version of a model is loaded from.

    Args:
        folder: of the version.
        filename: `default_model_filename` of the config; empty: the backend's default.
        default: what the backend looks for.
        model: its name, for the error.

    Raises:
        RepositoryError: there is none; in Triton's words.
    """
    path = folder / (filename or default)
    if not path.exists():
        raise RepositoryError(
            f"unable to find '{path}' for model instance '{model}'",
            status=Status.UNAVAILABLE,
            remedy="put the file there, or name it by `default_model_filename` in config.pbtxt",
        )
    return path


T = TypeVar("T")


class PerDevice(Generic[T]):
    """Opens a thing once on each device, when the first instance there starts. Safe from any thread."""

    def __init__(self, open_on: Callable[[Placement], T]) -> None:
        self._open_on = open_on
        self._opening = threading.Lock()
        self._things: dict[tuple[str, int], T] = {}

    def of(self, placement: Placement) -> T:
        """Return the thing of the device of an instance; raises what opening it raises."""
        device = (placement.kind, placement.device_id if placement.kind == "GPU" else 0)
        with self._opening:
            if device not in self._things:
                self._things[device] = self._open_on(placement)
            return self._things[device]


_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def boolean_parameter(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Return a parameter that is written true, on, 1, false, off or 0, in any case of letters.

    Raises:
        RepositoryError: it is written in another way; in Triton's words.
    """
    if key not in parameters:
        return default
    value = _BOOLEANS.get(parameters[key].lower())
    if value is None:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to boolean",
            remedy=f"write true or false for the parameter {key} in config.pbtxt",
        )
    return value


def bytes_parameter(parameters: Mapping[str, str], key: str) -> int | None:
    """Return a parameter that is an amount of memory, such as 2GiB; None if it is not there.

    Raises:
        RepositoryError: it is something else.
    """
    if key not in parameters:
        return None
    value = byte_size(parameters[key])
    if value is None:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to bytes",
            remedy=f"write an amount such as 2GiB for the parameter {key} in config.pbtxt",
        )
    return value


def integer_parameter(parameters: Mapping[str, str], key: str, *, default: int) -> int:
    """Return a parameter that is a whole number.

    Raises:
        RepositoryError: it is not; in Triton's words.
    """
    try:
        return int(parameters.get(key, default))
    except ValueError as error:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to integral number",
            remedy=f"write a whole number for the parameter {key} in config.pbtxt",
        ) from error
