"""Backend: the interface of backends, which one runs a model, and how it reads the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError, Status
from genserve.machine import byte_size

if TYPE_CHECKING:
    from genserve.generation_metrics import Metrics
    from genserve.inference import Inference, InferenceServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """One version of a model, as passed to its backend."""

    config: ModelConfig
    version: int
    path: Path  # the folder of the model
    folder: Path  # the folder of the version
    server: InferenceServer  # runs all models, for BLS
    metrics: Metrics  # registry of custom metrics

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.config.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An instance of a model and its device."""

    name: str  # "m_0", "m_1_0": <model>_<group>_<number>
    kind: str  # "CPU", "GPU", "MODEL"
    device_id: int = 0


class Backend(Protocol):
    """One instance of one version of a model. A backend is a class with these five methods.

    An entry point of the group `genserve.backends` registers a class under the name that config.pbtxt uses.
    The class may have three more methods, called from any thread: `is_ready(self) -> bool`; `abort(self) ->
    bool`, which makes a running `execute` return when an unload has timed out, and returns whether it can;
    and `check_files(cls, folder: Path, config: ModelConfig) -> None`, a class method that raises the error
    with which a load would reject the files of a version, and runs none of their code (`genserve check`).
    """

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """Fill in fields that the config leaves out, from the model's file.

        Args:
            message: the `inference.ModelConfig`, changed in place.
            path: the folder of the model.
            version: the highest version that will be served.
            default_max_batch_size: the batch size of an ONNX model that can batch and whose config sets
                none; other backends ignore it.

        Raises:
            RepositoryError: the config contradicts the file.
        """

    @classmethod
    def load(cls, source: ModelSource) -> Any:
        """Load the objects that all instances of the version share (weights, a session); may be None.

        Raises:
            RepositoryError: the model cannot be loaded.
        """

    def __init__(self, source: ModelSource, shared: Any, placement: Placement) -> None:
        """Start an instance, on the thread that will also execute and close it.

        Raises:
            Exception: any; the load of the model fails with it.
        """

    def execute(self, batch: Sequence[Inference]) -> None:
        """Respond to each inference of a batch; if decoupled, also later and from any thread.

        Raises:
            Exception: any; the unfinished inferences of the batch fail with it.
        """

    def close(self) -> None:
        """Free all resources; nothing is executed afterwards."""


def model_file(folder: Path, *, filename: str, default: str, model: str) -> Path:
    """Return the file or folder that a version of a model is loaded from.

    Args:
        folder: the version's folder.
        filename: `default_model_filename` of the config, or empty.
        default: the file name of the backend.
        model: the name of the model, for the error.

    Raises:
        RepositoryError: it does not exist; in Triton's words.
    """
    path = folder / (filename or default)
    if not path.exists():
        raise RepositoryError(
            f"unable to find '{path}' for model instance '{model}'",
            status=Status.UNAVAILABLE,
            remedy="put the file there, or set `default_model_filename` in config.pbtxt",
        )
    return path


_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def boolean_parameter(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Return a boolean parameter: true, on, 1, false, off or 0, in any case.

    Raises:
        RepositoryError: it has another value; in Triton's words.
    """
    if key not in parameters:
        return default
    value = _BOOLEANS.get(parameters[key].lower())
    if value is None:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to boolean",
            remedy=f"set the parameter {key} in config.pbtxt to true or false",
        )
    return value


def bytes_parameter(parameters: Mapping[str, str], key: str) -> int | None:
    """Return a parameter with a number of bytes, such as 2GiB; None if it is not set.

    Raises:
        RepositoryError: it has another value.
    """
    if key not in parameters:
        return None
    value = byte_size(parameters[key])
    if value is None:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to bytes",
            remedy=f"set the parameter {key} in config.pbtxt to a number of bytes such as 2GiB",
        )
    return value


def integer_parameter(parameters: Mapping[str, str], key: str, *, default: int) -> int:
    """Return an integer parameter.

    Raises:
        RepositoryError: it has another value; in Triton's words.
    """
    try:
        return int(parameters.get(key, default))
    except ValueError as error:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to integral number",
            remedy=f"set the parameter {key} in config.pbtxt to an integer",
        ) from error
