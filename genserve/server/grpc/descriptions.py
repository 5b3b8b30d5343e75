"""Descriptions: what a server and its models are, and have done, as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.data_type import DataType
from genserve.kserve.models import EXTENSIONS, Served
from genserve.statistics import BatchStatistics, Measured
from genserve.version import __version__

__all__ = ["model_metadata", "model_statistics", "server_metadata"]

_DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


def server_metadata(name: str) -> Any:
    """Return a `ServerMetadataResponse`."""
    return service_pb2.ServerMetadataResponse(name=name, version=__version__, extensions=EXTENSIONS)


def model_metadata(served: Served, *, versions: Sequence[int]) -> Any:
    """Return a `ModelMetadataResponse`; `versions` are those of the model that answer."""
    config = served.config
    response = service_pb2.ModelMetadataResponse(
        name=served.name, versions=map(str, versions), platform=config.platform or config.backend
    )
    for specs, messages in ((config.inputs, response.inputs), (config.outputs, response.outputs)):
        for spec in specs:
            data_type = DataType.from_config_name(spec.data_type).name
            messages.add(name=spec.name, datatype=data_type, shape=_shape(spec, config))
    return response


def model_statistics(served: Served) -> Any:
    """Return a `ModelStatistics` message."""
    statistics = served.statistics
    message = service_pb2.ModelStatistics(
        name=served.name,
        version=str(served.version),
        last_inference=statistics.last_inference_ms,
        inference_count=statistics.inference_count,
        execution_count=statistics.execution_count,
    )
    for name in _DURATIONS:
        _write(getattr(message.inference_stats, name), getattr(statistics, name))
    for size, batch in sorted(statistics.batches.items()):
        _write_batch(message.batch_stats.add(batch_size=size), batch)
    return message


def _shape(spec: TensorSpec, config: ModelConfig) -> list[int]:
    return [-1, *spec.dims] if config.max_batch_size else list(spec.dims)


def _write_batch(message: Any, batch: BatchStatistics) -> None:
    for name in _COMPUTE:
        _write(getattr(message, name), getattr(batch, name))


def _write(message: Any, measured: Measured) -> None:
    message.SetInParent()
    message.count, message.ns = measured.count, measured.ns
