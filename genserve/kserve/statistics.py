"""Statistics: what models have done, as the statistics extension tells it in JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genserve.errors import InferenceError
from genserve.kserve.models import Models, ServedModel
from genserve.statistics import Measured

__all__ = ["find_for_statistics", "statistics_json"]

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
        "inference_stats": {key: _measured(getattr(statistics, key)) for key in _TOTALS + _CACHE},
        "response_stats": {},
        "batch_stats": [
            {"batch_size": size, **{key: _measured(getattr(batch, key)) for key in _COMPUTE}}
            for size, batch in sorted(statistics.batches.items())
        ],
        "memory_usage": [],
    }


def _measured(measured: Measured) -> dict[str, int]:
    return {"count": measured.count, "ns": measured.ns}
