"""Model metadata: the metadata and statistics of models, as the protocols return them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.errors import InferenceError, Status
from genserve.inference_statistics import DurationStat
from genserve.repository.model_versions import ModelVersion
from genserve.repository.served_models import ServedModels
from genserve.tensor import DataType

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
_TOTALS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_CACHE = ("cache_hit", "cache_miss")
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


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
    """Return the shape of a tensor for clients: with the batch dimension, before `reshape`."""
    return [-1, *spec.dims] if config.max_batch_size else list(spec.dims)


def _tensor(spec: TensorSpec, *, config: ModelConfig) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": DataType.from_config_name(spec.data_type).name,
        "shape": tensor_shape(spec, config=config),
    }


def find_for_statistics(models: ServedModels, name: str, version: int = -1) -> list[ModelVersion]:
    """Return a version of a model, or all that are ready if `version` is -1.

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


def statistics_json(served: Iterable[ModelVersion]) -> dict[str, Any]:
    """Return the body of `/v2/models/stats`; its keys are also those of `ModelStatisticsResponse`."""
    return {"model_stats": [_model(model) for model in served]}


def _model(served: ModelVersion) -> dict[str, Any]:
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


def reject_repository(name: str) -> None:
    """Raise InferenceError, UNSUPPORTED, if a request names a repository."""
    if name:
        text = "'repository_name' specification is not supported"
        raise InferenceError(text, status=Status.UNSUPPORTED)


def require_ready_model(models: ServedModels, name: str) -> None:
    """Raise InferenceError, INVALID_ARG, if no version of a model is ready."""
    if not models.versions(name):
        raise InferenceError(f"Request for unknown model : {name}")
