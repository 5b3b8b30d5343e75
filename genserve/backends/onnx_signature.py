"""ONNX signature: the inputs and outputs of a graph, and the validation of a config against them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from genserve.config.model_config import Control, ModelConfig, TensorSpec
from genserve.errors import RepositoryError
from genserve.tensor import DataType, fits, shape_text

_DATA_TYPES = {
    "bool": DataType.BOOL, "uint8": DataType.UINT8, "uint16": DataType.UINT16, "uint32": DataType.UINT32,
    "uint64": DataType.UINT64, "int8": DataType.INT8, "int16": DataType.INT16, "int32": DataType.INT32,
    "int64": DataType.INT64, "float16": DataType.FP16, "float": DataType.FP32, "double": DataType.FP64,
    "string": DataType.BYTES, "bfloat16": DataType.BF16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor:
    """An input or output of a graph."""

    name: str
    element: str                # ONNX Runtime's name of the type: "float"
    shape: tuple[int, ...]      # -1: any size; empty: a scalar, or unknown

    @property
    def data_type(self) -> DataType:
        """The data type of the elements.

        Raises:
            RepositoryError: KServe has no such type.
        """
        if self.element not in _DATA_TYPES:
            raise RepositoryError(
                f"tensor '{self.name}' of the graph has type {self.element}, which KServe does not support"
            )
        return _DATA_TYPES[self.element]

    @classmethod
    def of(cls, argument: Any) -> GraphTensor:
        """Make the tensor of an `onnxruntime.NodeArg`."""
        shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape)
        return cls(name=argument.name, element=argument.type.removeprefix("tensor(").rstrip(")"), shape=shape)


class OnnxSignature:
    """The inputs and outputs of a graph.

    Attributes:
        inputs: required inputs by name, in the graph's order.
        initializers: optional inputs by name: they have a default value.
        outputs: the outputs by name, in the graph's order.
    """

    def __init__(self, session: Any) -> None:
        """Read the signature of an `onnxruntime.InferenceSession`."""
        self.inputs = {argument.name: GraphTensor.of(argument) for argument in session.get_inputs()}
        self.initializers = {
            argument.name: GraphTensor.of(argument) for argument in session.get_overridable_initializers()
        }
        self.outputs = {argument.name: GraphTensor.of(argument) for argument in session.get_outputs()}

    def complete(self, message: Any, *, default_max_batch_size: int) -> None:
        """Fill in the inputs, outputs and batching that an `inference.ModelConfig` leaves out.

        A config with inputs and outputs is not changed.

        Args:
            message: the config, changed in place.
            default_max_batch_size: the batch size of a graph that can batch and whose config sets none.

        Raises:
            RepositoryError: the config batches and the graph cannot; in Triton's words.
        """
        if has_signature(message):
            return
        self._complete_batching(message, default_max_batch_size)
        if not message.input:
            _complete_tensors(message.input, self.inputs.values(), has_batch=message.max_batch_size > 0)
        if not message.output:
            _complete_tensors(message.output, self.outputs.values(), has_batch=message.max_batch_size > 0)

    def check(self, config: ModelConfig) -> None:
        """Validate a config. The dims of outputs are not compared: responses have the graph's shapes.

        Raises:
            RepositoryError: the graph cannot be run with the config; in Triton's words. `field` is the wrong
                input or output of the config, if it is one: `input[0]`.
        """
        self._check_count(config)
        for index, spec in enumerate(config.inputs):
            with _at(f"input[{index}]"):
                self._check_input(spec, config)
        for index, spec in enumerate(config.outputs):
            with _at(f"output[{index}]"):
                self._check_output(spec, config)
        if config.sequence_batching is not None:
            for control in config.sequence_batching.controls:
                self._check_control(control, config)
            for state in config.sequence_batching.states:
                self._output(state.output_name, state.data_type, config, kind="output state")

    def _complete_batching(self, message: Any, default_max_batch_size: int) -> None:
        tensors = (*self.inputs.values(), *self.outputs.values())
        if not all(tensor.shape[:1] == (-1,) for tensor in tensors):
            if message.max_batch_size:
                raise RepositoryError(
                    f"autofill failed for model '{message.name}': model does not support batching while "
                    "non-zero max_batch_size is specified",
                    remedy="remove max_batch_size, or export the graph with a variable first dimension",
                )
            return
        message.max_batch_size = message.max_batch_size or default_max_batch_size
        if message.max_batch_size > 1 and message.WhichOneof("scheduling_choice") is None:
            message.dynamic_batching.SetInParent()

    def _check_count(self, config: ModelConfig) -> None:
        expected = sum(not spec.optional for spec in config.inputs)
        expected += sum(len(batch_input.target_names) for batch_input in config.batch_inputs)
        if config.sequence_batching is not None:
            expected += len(config.sequence_batching.controls) + len(config.sequence_batching.states)
        if expected != len(self.inputs):
            raise RepositoryError(
                f"unable to load model '{config.name}', configuration expects {expected} inputs, "
                f"model provides {len(self.inputs)}",
                remedy=f"the inputs of the graph are {', '.join(self.inputs)}",
            )

    def _check_input(self, spec: TensorSpec, config: ModelConfig) -> None:
        if spec.optional and config.max_batch_size:
            raise RepositoryError(
                f"unable to load model '{config.name}', optional input '{spec.name}' is not supported for "
                "models that support batching"
            )
        tensor = (self.inputs | self.initializers).get(spec.name)
        if tensor is None:
            allowed = ", ".join(sorted(self.inputs | self.initializers))
            raise RepositoryError(f"unexpected inference input '{spec.name}', allowed inputs are: {allowed}")
        _check_type(tensor, spec.data_type, kind="input", model=config.name)
        if spec.allow_ragged_batch:
            _check_ragged(tensor, model=config.name)
        elif tensor.shape:
            _check_dims(tensor, spec, config)
        else:
            _check_scalar(tensor, spec, config)

    def _check_output(self, spec: TensorSpec, config: ModelConfig) -> None:
        tensor = self._output(spec.name, spec.data_type, config, kind="output")
        scattered = any(spec.name in batch_output.target_names for batch_output in config.batch_outputs)
        if tensor.shape and config.max_batch_size and not scattered:
            _check_batch_dimension(tensor, model=config.name)

    def _output(self, name: str, data_type: str, config: ModelConfig, *, kind: str) -> GraphTensor:
        if name not in self.outputs:
            allowed = ", ".join(sorted(self.outputs))
            raise RepositoryError(f"unexpected inference output '{name}', allowed outputs are: {allowed}")
        _check_type(self.outputs[name], data_type, kind=kind, model=config.name)
        return self.outputs[name]

    def _check_control(self, control: Control, config: ModelConfig) -> None:
        tensor = self.inputs.get(control.name)
        if tensor is None:
            raise RepositoryError(
                f"configuration specified sequence control '{control.name}', "
                "but model does not provide that input",
                remedy=f"the inputs of the graph are {', '.join(self.inputs)}",
            )
        where = f"unable to load model '{config.name}', sequence control '{control.name}'"
        dims = tensor.shape[1:] if config.max_batch_size else tensor.shape
        if dims != (1,):
            raise RepositoryError(f"{where} in model has dims {shape_text(dims)} but dims [1] is expected")
        if tensor.data_type.config_name != control.data_type:
            raise RepositoryError(
                f"{where}, the model expects data-type {tensor.element.upper()} "
                f"but the model configuration specifies data-type {control.data_type}"
            )


def has_signature(message: Any) -> bool:
    """Whether an `inference.ModelConfig` has inputs and outputs."""
    return bool((message.input or message.batch_input) and message.output)


@contextmanager
def _at(field: str) -> Iterator[None]:
    """Set the `field` of errors."""
    try:
        yield
    except RepositoryError as error:
        error.field = field
        raise


def _complete_tensors(specs: Any, tensors: Any, *, has_batch: bool) -> None:
    for tensor in tensors:
        spec = specs.add(name=tensor.name)
        spec.data_type = spec.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name[
            tensor.data_type.config_name
        ].number
        dims = tensor.shape[1:] if has_batch else tensor.shape
        spec.dims.extend(dims or (1,))
        if not dims and has_batch:
            spec.reshape.SetInParent()      # to no dimensions: one number per row


def _check_type(tensor: GraphTensor, expected: str, *, kind: str, model: str) -> None:
    if tensor.data_type.config_name != expected:
        raise RepositoryError(
            f"unable to load model '{model}', configuration expects datatype {expected} for {kind} "
            f"'{tensor.name}', model provides TYPE_{tensor.data_type.name}",
            remedy=f"set its data_type to {tensor.data_type.config_name}",
        )


def _check_ragged(tensor: GraphTensor, *, model: str) -> None:
    if tensor.shape != (-1,):
        raise RepositoryError(
            f"unable to load model '{model}', configuration expects model provides input with shape [-1]  "
            f"for ragged input '{tensor.name}', model provides {shape_text(tensor.shape)}",
            remedy="a ragged input must have one dimension, which concatenates the requests of a batch",
        )


def _check_scalar(tensor: GraphTensor, spec: TensorSpec, config: ModelConfig) -> None:
    if any(dim != 1 for dim in spec.model_dims):
        raise RepositoryError(
            f"unable to load model '{config.name}', scalar tensor '{tensor.name}', should only provide 1 in "
            "the model configuration when the model doesn't support batching. "
            f"Model configuration provided: {shape_text(spec.model_dims)}."
        )


def _check_dims(tensor: GraphTensor, spec: TensorSpec, config: ModelConfig) -> None:
    dims = spec.model_dims
    whole, extra = config.with_batch(dims), ""
    if config.max_batch_size:
        _check_batch_dimension(tensor, model=config.name)
        extra = (
            "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
            "making complete "
        )
    if not fits(whole, tensor.shape):
        raise RepositoryError(
            f"model '{config.name}', tensor '{tensor.name}': "
            f"the model expects {len(tensor.shape)} dimensions (shape {shape_text(tensor.shape)}) "
            f"but the model configuration specifies {len(whole)} dimensions ({extra}"
            f"shape {shape_text(whole)})",
            remedy=f"set dims to {list(tensor.shape[len(whole) - len(dims) :])}",
        )


def _check_batch_dimension(tensor: GraphTensor, *, model: str) -> None:
    if tensor.shape[:1] != (-1,):
        raise RepositoryError(
            f"model '{model}', tensor '{tensor.name}': for the model to support batching the shape should "
            "have at least 1 dimension and the first dimension must be -1; "
            f"but shape expected by the model is {shape_text(tensor.shape)}",
            remedy="set max_batch_size to 0 and write the complete shape in dims, "
            "or export the graph with a variable first dimension",
        )
