"""Warmup: requests that an instance executes before it is ready, from `model_warmup` of its config."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genserve.config.model_config import ModelConfig, TensorSpec, WarmupInput, WarmupSample
from genserve.errors import GenserveError, InferenceError, InvalidRequest, RepositoryError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse, with_request_id
from genserve.tensor import DataType, Tensor

__all__ = ["WarmupBatch", "run_warmups", "warmup_batches"]

FOLDER = "warmup"
_MAX_ITERATIONS = 1000  # of an iterative request: one that is never let go is warm by then


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupBatch:
    """One sample, ready to be executed."""

    name: str
    count: int                              # how often it is executed
    requests: tuple[InferenceRequest, ...]  # of one row each


def warmup_batches(config: ModelConfig, path: Path) -> tuple[WarmupBatch, ...]:
    """Return the warmup samples of a model; those of batch size 0 are left out, as Triton does.

    Args:
        config: of the model.
        path: its folder, in whose folder `warmup` the data files are.

    Raises:
        RepositoryError: a data file cannot be read or is too short, or a dimension is not said; in
            Triton's words.
    """
    return tuple(_batch(sample, config, path) for sample in config.warmups if sample.batch_size)


def run_warmups(
    execute: Callable[[Sequence[Inference]], None], batches: Sequence[WarmupBatch]
) -> None:
    """Execute every sample, and wait for its answers.

    Args:
        execute: of an instance, or of an engine; what it raises is the answer to the whole batch.
        batches: the samples.

    Raises:
        RepositoryError: a sample was answered with an error; in Triton's words.
    """
    for batch in batches:
        for _ in range(batch.count):
            _run(execute, batch)


def _batch(sample: WarmupSample, config: ModelConfig, path: Path) -> WarmupBatch:
    tensors = {spec.name: _tensor(spec, config, path) for spec in sample.inputs}
    request = InferenceRequest(model_name=config.name, inputs=tensors)
    return WarmupBatch(
        name=sample.name, count=max(1, sample.count), requests=(request,) * sample.batch_size
    )


def _tensor(spec: WarmupInput, config: ModelConfig, path: Path) -> Tensor:
    if -1 in spec.dims:
        raise RepositoryError(
            f"warmup setting expects all variable-size dimensions are specified for input '{spec.name}'",
            remedy="write the dims of a typical request",
        )
    data_type = DataType.from_config_name(spec.data_type)
    content = _content(spec, data_type, path)
    try:
        tensor = Tensor.from_bytes(spec.name, content, data_type=data_type, shape=spec.dims)
    except InvalidRequest as error:         # only strings can be wrong now
        raise RepositoryError(
            f"{path / FOLDER / spec.data_file}: {error.message}",
            remedy="write the file by tritonclient.utils.serialize_byte_tensor: before each element its "
            "length, 4 bytes little-endian",
        ) from error
    return tensor.reshaped(_model_shape(spec, config))


def _content(spec: WarmupInput, data_type: DataType, path: Path) -> bytes:
    num_bytes = math.prod(spec.dims) * (data_type.itemsize or 4)        # an empty string is its length, 0
    match spec.source:
        case "zero_data":
            return bytes(num_bytes)
        case "random_data" if data_type is DataType.BYTES:
            return bytes(num_bytes)
        case "random_data":
            return _random(data_type, num_bytes)
        case "input_data_file":
            return _file(spec, data_type, path, num_bytes=num_bytes)
    raise RepositoryError(
        with_request_id(f"warmup setting expects input '{spec.name}' to have input_data_type set"),
        remedy="write zero_data: true, random_data: true or input_data_file",
    )


def _random(data_type: DataType, num_bytes: int) -> bytes:
    # The same numbers at each start, so that a model that fails on them does so every time.
    content = np.random.default_rng(0).bytes(num_bytes)
    if data_type is DataType.BOOL:
        return (np.frombuffer(content, dtype=np.uint8) & 1).tobytes()
    return content


def _file(spec: WarmupInput, data_type: DataType, path: Path, *, num_bytes: int) -> bytes:
    file = path / FOLDER / spec.data_file
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RepositoryError(
            f"failed to open text file for read {file}: {error.strerror}",
            status=Status.INTERNAL,
            remedy=f"data files of model_warmup lie in {path / FOLDER}",
        ) from error
    if data_type is DataType.BYTES:
        return content
    if len(content) < num_bytes:
        raise RepositoryError(
            with_request_id(
                f"warmup setting expects {num_bytes} bytes, but the data provided "
                f"from {spec.data_file}only has {len(content)} bytes"
            ),
            remedy="the file holds the elements of one request, row-major, without the batch dimension",
        )
    return content[:num_bytes]


def _model_shape(spec: WarmupInput, config: ModelConfig) -> tuple[int, ...]:
    batch = (1,) if config.max_batch_size else ()
    known = config.input(spec.name)
    return (*batch, *(spec.dims if known is None else _reshaped(spec.dims, known)))


def _reshaped(dims: tuple[int, ...], known: TensorSpec) -> tuple[int, ...]:
    """Return what the model sees in place of `dims`: the wildcards of its reshape are filled in order."""
    if known.reshape is None:
        return dims
    sizes = iter([size for size, dim in zip(dims, known.dims, strict=False) if dim == -1])
    return tuple(next(sizes, -1) if dim == -1 else dim for dim in known.reshape)


def _run(execute: Callable[[Sequence[Inference]], None], batch: WarmupBatch) -> None:
    answers = _Answers(len(batch.requests))
    inferences = [
        Inference(request=request, on_response=answers.on_response, model_name=request.model_name)
        for request in batch.requests
    ]
    try:
        _execute(execute, inferences)
    except Exception as error:  # whatever the model raises
        for inference in inferences:
            inference.fail(InferenceError.of(error))
    answers.wait()
    if answers.errors:
        raise RepositoryError(
            f"failed to run warmup sample '{batch.name}': "
            + "".join(f"{error.message}; " for error in answers.errors),
            remedy=answers.errors[0].remedy,
        ) from answers.errors[0]


def _execute(execute: Callable[[Sequence[Inference]], None], inferences: Sequence[Inference]) -> None:
    """Execute requests, and those again that an iterative model asks for, as its scheduler would."""
    for _ in range(_MAX_ITERATIONS):
        execute(inferences)
        inferences = [inference for inference in inferences if inference.reschedule and not inference.ended]
        for inference in inferences:
            inference.reschedule = False
        if not inferences:
            return
    for inference in inferences:
        inference.send(None, final=True)


class _Answers:
    """Waits for the last answer of each request; a decoupled model gives it from another thread."""

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
