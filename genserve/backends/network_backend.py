"""Network backend: the base class of the backends of neural networks.

`NetworkBackend` opens one network per device. `BatchRunner` joins the requests of a batch into one run and
splits its outputs. A ragged batch holds requests of different shapes: flat inputs, tensors that describe
them, scattered outputs.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from genserve.backends.backend import ModelSource, Placement, model_file
from genserve.backends.encoder import EncoderRunner, RunFunction
from genserve.config.model_config import BatchInput, ModelConfig, TensorSpec
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse
from genserve.tensor import DataType, Tensor, fits

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

# Matches messages about errors that the server causes, and not the inputs of a request.
_FAULT_OF_SERVER = re.compile("alloc|out of memory|CUDA|cuBLAS|cuDNN|HIP error|terminate", re.IGNORECASE)


class Network(Protocol):
    """A network on one device."""

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Run it; a `RunFunction`. Several threads may call it at a time.

        Raises:
            InferenceError: the runtime failed, or does not return such an output.
        """


class NetworkVersion:
    """What the instances of a version share: a batch runner, and one network per device.

    Attributes:
        runner: splits and joins the tensors of the version's batches; of an encoder, pads and pools them.
    """

    def __init__(self, open_on: Callable[[Placement], Network], *, config: ModelConfig) -> None:
        """Make a version without networks.

        Args:
            open_on: opens the network on the device of a placement.
            config: the model's config.
        """
        self.runner = EncoderRunner(config) if config.is_encoder else BatchRunner(config)
        self._open_on = open_on
        self._lock = threading.Lock()
        self._networks: dict[tuple[str, int], Network] = {}

    def network(self, placement: Placement) -> Network:
        """Return the network on the device of an instance; opened by the first instance there."""
        device = (placement.kind, placement.device_id if placement.kind == "GPU" else 0)
        with self._lock:
            if device not in self._networks:
                self._networks[device] = self._open_on(placement)
            return self._networks[device]


class NetworkBackend:
    """A `Backend` of which a subclass says how a network is opened; one instance.

    Attributes:
        default_file: the name of the model file, unless the config has another.
    """

    default_file: ClassVar[str]

    @classmethod
    def open_network(cls, path: Path, config: ModelConfig, placement: Placement) -> Network:
        """Load a file onto the device of a placement.

        Raises:
            MissingDependency: the runtime is not installed.
            RepositoryError: the file cannot be loaded, or does not match the config.
        """
        raise NotImplementedError

    @classmethod
    def auto_complete(cls, message: Any, *, path: Path, version: int, default_max_batch_size: int) -> None:
        """Do nothing: the file does not describe its tensors. See `Backend.auto_complete`."""

    @classmethod
    def load(cls, source: ModelSource) -> NetworkVersion:
        """See `Backend.load`. A network is opened when the first instance on its device starts."""
        config = source.config
        path = model_file(
            source.folder, filename=config.default_model_filename, default=cls.default_file, model=config.name
        )
        return NetworkVersion(lambda placement: cls.open_network(path, config, placement), config=config)

    def __init__(self, source: ModelSource, shared: NetworkVersion, placement: Placement) -> None:
        self._runner = shared.runner
        self.network = shared.network(placement)

    def execute(self, batch: Sequence[Inference]) -> None:
        """See `Backend.execute`."""
        self._runner.execute(batch, run=self.network.run)

    def close(self) -> None:
        """Do nothing: the network is freed with its last instance. See `Backend.close`."""


def run_error(message: str, inputs: Mapping[str, Tensor]) -> InferenceError:
    """Return the error of a runtime that has failed with a network that is loaded.

    What fails then are values and shapes that do not fit the network or each other, unless the message is
    about memory or a device.
    """
    if _FAULT_OF_SERVER.search(message):
        return InferenceError(message, status=Status.INTERNAL)
    given = ", ".join(f"{name} {tensor.data_type.name} {[*tensor.shape]}" for name, tensor in inputs.items())
    return InferenceError(message, remedy=f"send values and shapes that fit the model; it got {given}")


class BatchRunner:
    """Runs batches through a network. The instances of a model share one.

    Requests are joined along their first dimension; the inputs of a single request are not copied. Outputs
    are split into views. Implicit states are inputs and outputs like any other. Tensors have the shapes that
    the network sees: a `reshape` of the config is applied before.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._has_batch = config.max_batch_size > 0
        self._inputs = {spec.name: spec for spec in config.inputs}
        self._batch_inputs = config.batch_inputs
        self._states = config.sequence_batching.states if config.sequence_batching else ()
        # The network may have a state for each row of a batch, which is the slot of a sequence.
        self._is_repeatable = config.sequence_batching is None
        self._outputs = {spec.name: spec for spec in config.outputs}
        self._expected_shapes = {spec.name: config.with_batch(spec.model_dims) for spec in config.outputs}
        types = {state.output_name: state.data_type for state in self._states}
        types |= {spec.name: spec.data_type for spec in config.outputs}
        self._types = {name: DataType.from_config_name(data_type) for name, data_type in types.items()}
        # Triton's backends return outputs in the order of their names.
        self._output_names = tuple(sorted(self._types))
        self._scattered = {name: kind for kind in config.batch_outputs for name in kind.target_names}
        self._warned: set[str] = set()

    def execute(self, batch: Sequence[Inference], *, run: RunFunction) -> None:
        """Run a network once for a batch, and send the responses.

        If it rejects the inputs, it is run for each request alone, so that only those which it rejects fail;
        not with sequence batching.

        Raises:
            InferenceError: the outputs do not match the config, in Triton's words.
            Exception: raised by `run`; those to which no response was sent fail.
        """
        names = self._wanted_outputs(batch)
        try:
            outputs = run(self._gather(batch), names)
        except InferenceError as error:
            if error.status != Status.INVALID_ARG or len(batch) == 1 or not self._is_repeatable:
                raise
            for inference in batch:
                try:
                    self.execute([inference], run=run)
                except InferenceError as own:
                    inference.fail(own)
            return
        parts = {name: self._split_output(outputs[name], batch) for name in names}
        for index, inference in enumerate(batch):
            self._keep_states(inference, parts, index=index)
            requested = inference.request.requested_outputs or self._outputs
            response = InferenceResponse(
                outputs=tuple(parts[name][index] for name in names if name in requested)
            )
            inference.send(response, final=True)

    def _wanted_outputs(self, batch: Sequence[Inference]) -> tuple[str, ...]:
        if not all(inference.request.requested_outputs for inference in batch):
            return self._output_names
        wanted = {name for inference in batch for name in inference.request.requested_outputs}
        wanted.update(state.output_name for state in self._states)
        return tuple(name for name in self._output_names if name in wanted)

    def _gather(self, batch: Sequence[Inference]) -> dict[str, Tensor]:
        batch_inputs = [inference.inputs | (inference.states or {}) for inference in batch]
        # The scheduler only batches requests with the same inputs.
        joined = {
            name: self._join(name, [inputs[name] for inputs in batch_inputs]) for name in batch_inputs[0]
        }
        for batch_input in self._batch_inputs:
            for tensor in _batch_input_tensors(batch_input, _shapes(batch, batch_input.source_inputs[0])):
                joined[tensor.name] = tensor
        return joined

    def _join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        spec = self._inputs.get(name)
        if spec is not None and spec.allow_ragged_batch:
            return _flat_input(name, tensors)
        if len(tensors) == 1:
            return _aligned(tensors[0])
        array = np.concatenate([tensor.array for tensor in tensors])
        return Tensor(name, array, data_type=tensors[0].data_type)

    def _split_output(self, output: Tensor, batch: Sequence[Inference]) -> Sequence[Tensor]:
        self._check_type(output)
        spec = self._outputs.get(output.name)
        scattered = self._scattered.get(output.name)
        if scattered is not None and spec is not None:
            return _scatter_output(output, spec, _shapes(batch, scattered.source_inputs[0]))
        if spec is not None:
            self._warn_of_shape(output)
        return self._split_rows(output, [inference.batch_size for inference in batch])

    def _split_rows(self, output: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        if not self._has_batch:
            return (output,)
        total = sum(sizes)
        rows = output.shape[0] if output.shape else 0
        if rows < total:
            raise InferenceError(
                f"failed to split the output tensor '{output.name}' in responses: "
                f"expected batch size of at least {total} in model output, got {rows}",
                status=Status.UNSUPPORTED,
                remedy="the first dimension of each output must be the batch; "
                "set max_batch_size to 0 for a model without a batch dimension",
            )
        if rows == total and len(sizes) == 1:
            return (output,)
        stops = np.cumsum(sizes).tolist()
        return [
            Tensor(output.name, output.data[stop - size : stop], data_type=output.data_type)
            for size, stop in zip(sizes, stops, strict=True)
        ]

    def _check_type(self, output: Tensor) -> None:
        expected = self._types[output.name]
        if output.data_type is not expected:
            raise InferenceError(
                f"configuration expects datatype TYPE_{expected.name} for output '{output.name}', "
                f"model provides TYPE_{output.data_type.name}",
                remedy=f"set data_type to {output.data_type.config_name} in config.pbtxt",
            )

    def _warn_of_shape(self, output: Tensor) -> None:
        expected = self._expected_shapes[output.name]
        if output.name in self._warned or fits(output.shape, expected):
            return
        self._warned.add(output.name)
        logger.warning(
            "model %s returns shape %s for output %s, but config.pbtxt says %s%s",
            self._model,
            list(output.shape),
            output.name,
            list(expected),
            " (including the batch dimension)" if self._has_batch else "",
        )

    def _keep_states(
        self, inference: Inference, parts: Mapping[str, Sequence[Tensor]], *, index: int
    ) -> None:
        if inference.states is None:
            return
        for state in self._states:
            inference.states[state.input_name] = parts[state.output_name][index].renamed(state.input_name)


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor with aligned data, as runtimes require; offsets in a request's body are arbitrary."""
    data = tensor.data
    if not isinstance(data, np.ndarray) or data.flags.aligned:
        return tensor
    return Tensor(tensor.name, data.copy(), data_type=tensor.data_type)


def _shapes(batch: Sequence[Inference], name: str) -> list[tuple[int, ...]]:
    return [inference.inputs[name].shape for inference in batch]


def _flat_input(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor [all elements of all requests]; the input of a single request is not copied."""
    arrays = [tensor.array.reshape(-1) for tensor in tensors]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return Tensor(name, joined, data_type=tensors[0].data_type)


def _batch_input_tensors(batch_input: BatchInput, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Return the inputs that are computed from the shapes of a batch, one per target name.

    Args:
        batch_input: the entry of the config; its kind says what to compute.
        shapes: the shape of each request's source input, with the batch dimension.

    Source: `BatchInput.Kind` of Triton's model_config.proto.
    """
    data_type = DataType.from_config_name(batch_input.data_type)
    array = _batch_input_array(batch_input.kind, shapes).astype(data_type.numpy)
    return tuple(Tensor(name, array, data_type=data_type) for name in batch_input.target_names)


def _batch_input_array(kind: str, shapes: Sequence[Shape]) -> NDArray[np.int64]:
    counts = [math.prod(shape) for shape in shapes]
    match kind.removeprefix("BATCH_"):
        case "ELEMENT_COUNT":
            return np.array(counts)
        case "ACCUMULATED_ELEMENT_COUNT":
            return np.cumsum(counts)
        case "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.cumsum([0, *counts])
        case "MAX_ELEMENT_COUNT_AS_SHAPE":
            return np.zeros(max(counts), dtype=np.int64)
        case "ITEM_SHAPE":
            return _item_shapes(shapes)
        case "ITEM_SHAPE_FLATTEN":
            return _item_shapes(shapes).reshape(-1)
        case _:
            raise ValueError(f"unknown kind of batch_input: {kind}")


def _item_shapes(shapes: Sequence[Shape]) -> NDArray[np.int64]:
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(shapes[0]) - 1)


def _scatter_output(output: Tensor, spec: TensorSpec, shapes: Sequence[Shape]) -> list[Tensor]:
    """Split a flat output into one view per request, in the shape of the config.

    Args:
        output: the elements of all requests, concatenated.
        spec: the declared output; a -1 in its dims (after the batch dimension) takes the size of that
            dimension in the source input.
        shapes: the shape of each request's source input, with the batch dimension.

    Source: BATCH_SCATTER_WITH_INPUT_SHAPE of Triton's model_config.proto.
    """
    dims = (-1, *spec.model_dims)
    flat = output.data.reshape(-1)
    parts: list[Tensor] = []
    start = 0
    for shape in shapes:
        target = tuple(shape[axis] if dim == -1 else dim for axis, dim in enumerate(dims))
        stop = start + math.prod(target)
        part = flat[start:stop].reshape(target)
        parts.append(Tensor(output.name, part, data_type=output.data_type))
        start = stop
    return parts
