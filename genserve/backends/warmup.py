"""Warmup: the requests of `model_warmup`, which an instance executes before it is ready."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genserve.config.model_config import ModelConfig, WarmupInput, WarmupSample
from genserve.errors import GenserveError, InferenceError, RepositoryError
from genserve.inference import Inference, InferenceRequest, InferenceResponse, with_request_id
from genserve.tensor import DataType, Tensor, read_tensor, reshape

_FOLDER = "warmup"
_MAX_ITERATIONS = 1000  # an iterative request is ended after so many


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupBatch:
    """The requests of one sample."""

    name: str
    count: int                              # how often the batch is executed
    requests: tuple[InferenceRequest, ...]  # each has one row


def warmup_batches(config: ModelConfig, path: Path) -> tuple[WarmupBatch, ...]:
    """Return the warmup samples of a model, without those of batch size 0, as Triton does.

    Args:
        config: the model's config.
        path: folder of the model; its folder `warmup` holds the data files.

    Raises:
        RepositoryError: a data file cannot be read or is too short, or a dimension is -1; in Triton's
            words.
    """
    return tuple(_batch(sample, config, path) for sample in config.warmups if sample.batch_size)


def run_warmups(execute: Callable[[Sequence[Inference]], None], batches: Sequence[WarmupBatch]) -> None:
    """Execute every sample, and wait for the responses.

    Args:
        execute: executes a batch on an instance or an engine; an exception fails the whole batch.
        batches: the samples.

    Raises:
        RepositoryError: the response to a sample is an error; in Triton's words.
    """
    for batch in batches:
        for _ in range(batch.count):
            _run(execute, batch)


def _batch(sample: WarmupSample, config: ModelConfig, path: Path) -> WarmupBatch:
    tensors = {spec.name: _tensor(spec, config, path) for spec in sample.inputs}
    request = InferenceRequest(model_name=config.name, inputs=tensors)
    return WarmupBatch(name=sample.name, count=max(1, sample.count), requests=(request,) * sample.batch_size)


def _tensor(spec: WarmupInput, config: ModelConfig, path: Path) -> Tensor:
    if -1 in spec.dims:
        raise RepositoryError(
            f"warmup setting expects all variable-size dimensions are specified for input '{spec.name}'",
            remedy="set them to the shape of a typical request",
        )
    data_type = DataType.from_config_name(spec.data_type)
    return _data(spec, data_type, path).reshaped(_model_shape(spec, config))


def _data(spec: WarmupInput, data_type: DataType, path: Path) -> Tensor:
    num_bytes = math.prod(spec.dims) * (data_type.itemsize or 4)        # an empty string is its length, 0
    match spec.source:
        case "zero_data":
            content = bytes(num_bytes)
        case "random_data":
            content = bytes(num_bytes) if data_type is DataType.BYTES else _random(data_type, num_bytes)
        case "input_data_file":
            return read_tensor(
                path / _FOLDER / spec.data_file,
                spec.name,
                data_type=data_type,
                shape=spec.dims,
                too_short=lambda expected, actual: with_request_id(
                    f"warmup setting expects {expected} bytes, but the data provided "
                    f"from {spec.data_file}only has {actual} bytes"
                ),
            )
        case _:
            raise RepositoryError(
                with_request_id(f"warmup setting expects input '{spec.name}' to have input_data_type set"),
                remedy="set zero_data: true, random_data: true or input_data_file",
            )
    return Tensor.from_bytes(spec.name, content, data_type=data_type, shape=spec.dims)


def _random(data_type: DataType, num_bytes: int) -> bytes:
    # The same numbers at each start, so that a failure is reproducible.
    content = np.random.default_rng(0).bytes(num_bytes)
    if data_type is DataType.BOOL:
        return (np.frombuffer(content, dtype=np.uint8) & 1).tobytes()
    return content


def _model_shape(spec: WarmupInput, config: ModelConfig) -> tuple[int, ...]:
    batch = (1,) if config.max_batch_size else ()
    known = config.input(spec.name)
    if known is None or known.reshape is None:
        return (*batch, *spec.dims)
    return (*batch, *reshape(spec.dims, dims=known.dims, to=known.reshape))


def _run(execute: Callable[[Sequence[Inference]], None], batch: WarmupBatch) -> None:
    responses = _Responses(len(batch.requests))
    inferences = [
        Inference(request=request, on_response=responses.on_response) for request in batch.requests
    ]
    try:
        _execute(execute, inferences)
    except Exception as error:  # the model may raise anything
        for inference in inferences:
            inference.fail(InferenceError.of(error))
    responses.wait()
    if responses.errors:
        raise RepositoryError(
            f"failed to run warmup sample '{batch.name}': "
            + "".join(f"{error.message}; " for error in responses.errors),
            remedy=responses.errors[0].remedy,
        ) from responses.errors[0]


def _execute(execute: Callable[[Sequence[Inference]], None], inferences: Sequence[Inference]) -> None:
    """Execute requests, and again those that an iterative model reschedules."""
    for _ in range(_MAX_ITERATIONS):
        execute(inferences)
        inferences = [inference for inference in inferences if inference.reschedule and not inference.ended]
        for inference in inferences:
            inference.reschedule = False
        if not inferences:
            return
    for inference in inferences:
        inference.send(None, final=True)


class _Responses:
    """Waits for the final response to each request; a decoupled model sends it from another thread."""

    def __init__(self, num_requests: int) -> None:
        self.errors: list[GenserveError] = []
        self._num_requests = num_requests
        self._ended = threading.Semaphore(0)

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        if response is not None and response.error is not None:
            self.errors.append(response.error)
        if final:
            self._ended.release()

    def wait(self) -> None:
        for _ in range(self._num_requests):
            self._ended.acquire()
