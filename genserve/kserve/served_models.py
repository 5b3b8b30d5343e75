"""ModelVersion models: the repository as the protocols see it, and its models' metadata and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.errors import InferenceError, Status
from genserve.inference import InferenceServer
from genserve.inference_statistics import DurationStat, ModelStatistics
from genserve.tensor import DataType

__all__ = [
    "EXTENSIONS",
    "IndexLine",
    "Models",
    "ServedModel",
    "cuda_region",
    "find_for_statistics",
    "model_metadata",
    "refuse_cuda_region",
    "refuse_repository",
    "refuse_unknown_model",
    "statistics_json",
    "tensor_shape",
]


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


class Models(InferenceServer, Protocol):
    """A repository: runs its models, and reports what is known of them. Safe from any thread."""

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
        """Load or reload a model; see `InferenceServer.load`.

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


def model_metadata(config: ModelConfig, *, versions: Sequence[int]) -> dict[str, Any]:
    """Return the body of `/v2/models/NAME`; its keys are also those of `ModelMetadataResponse`."""
    return {
        "name": config.name,
        "versions": [str(version) for version in versions],
        "platform": config.platform or config.backend,
        "inputs": [_tensor(spec, config=config) for spec in config.inputs],
        "outputs": [_tensor(spec, config=config) for spec in config.outputs],
    }


def tensor_shape(spec: TensorSpec, *, config: ModelConfig) -> list[int]:
    """Return the shape of a tensor as clients have it: with the batch dimension, before `reshape`."""
    return [-1, *spec.dims] if config.max_batch_size else list(spec.dims)


def _tensor(spec: TensorSpec, *, config: ModelConfig) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": DataType.from_config_name(spec.data_type).name,
        "shape": tensor_shape(spec, config=config),
    }


_TOTALS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_CACHE = ("cache_hit", "cache_miss")
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


def find_for_statistics(models: Models, name: str, version: int = -1) -> list[ServedModel]:
    """Return the versions of a model that are asked for: all that answer, where `version` is -1.

    An empty name means all models.

    Raises:
        InferenceError: INVALID_ARG, there is none.
    """
    if not name:
        return list(models.served)
    found = [served for served in models.served if served.name == name]
    if not found:
        raise InferenceError(f"requested model '{name}' is not available")
    found = [served for served in found if version in (-1, served.version)]
    if not found:
        raise InferenceError(f"requested model version is not available for model '{name}'")
    return found


def statistics_json(served: Iterable[ServedModel]) -> dict[str, Any]:
    """Return the body of `/v2/models/stats`; its keys are also those of `ModelStatisticsResponse`."""
    return {"model_stats": [_model(model) for model in served]}


def _model(served: ServedModel) -> dict[str, Any]:
    statistics = served.statistics
    return {
        "name": served.name,
        "version": str(served.version),
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {key: _duration(getattr(statistics, key)) for key in _TOTALS + _CACHE},
        "response_stats": {},
        "batch_stats": [
            {"batch_size": size, **{key: _duration(getattr(batch, key)) for key in _COMPUTE}}
            for size, batch in sorted(statistics.batches.items())
        ],
        "memory_usage": [],
    }


def _duration(stat: DurationStat) -> dict[str, int]:
    return {"count": stat.count, "ns": stat.ns}


def refuse_repository(name: str) -> None:
    """Raise InferenceError, UNSUPPORTED, where a request names one of several repositories."""
    if name:
        text = "'repository_name' specification is not supported"
        raise InferenceError(text, status=Status.UNSUPPORTED)


def refuse_unknown_model(models: Models, name: str) -> None:
    """Raise InferenceError, INVALID_ARG, where settings are asked for of a model that does not answer."""
    if not models.versions(name):
        raise InferenceError(f"Request for unknown model : {name}")


def refuse_cuda_region(name: str) -> None:
    """Raise InferenceError, NOT_FOUND, where one region of a GPU's memory is asked for: there are none."""
    if name:
        text = f"Unable to find cuda shared memory region: '{name}'"
        raise InferenceError(text, status=Status.NOT_FOUND)


def cuda_region(name: str) -> InferenceError:
    """Return the error of who registers a region of a GPU's memory."""
    return InferenceError(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
        status=Status.UNSUPPORTED,
        remedy="send tensors in binary form, or through system shared memory",
    )
