"""Metadata: what a server and its models say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.data_type import DataType

__all__ = ["EXTENSIONS", "model_metadata", "tensor_shape"]

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
