"""Request validation: whether a request fits the config of its model; errors have Triton's texts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError, Status
from genserve.inference import InferenceRequest, InferenceResponse, with_request_id
from genserve.tensor import DataType, Tensor, fits, reshape, shape_text

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended "
    "to each input shape. If you want to specify the full shape including the batch dim in your input dims "
    "config, try setting max_batch_size to zero. See the model configuration docs for more info on "
    "max_batch_size."
)


class RequestValidator:
    """Validates the requests to one model. Immutable: safe from any thread."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        self._specs = {spec.name: spec for spec in config.inputs}
        self._types = {spec.name: DataType.from_config_name(spec.data_type) for spec in config.inputs}
        self._num_required = sum(not spec.optional for spec in config.inputs)
        self._outputs = {spec.name for spec in config.outputs}
        self._states = _state_names(config)
        self._reshaped = [spec for spec in config.inputs if spec.reshape is not None]
        self._reshaped_outputs = {spec.name: spec for spec in config.outputs if spec.reshape is not None}

    def check(self, request: InferenceRequest) -> int:
        """Return the batch size of a valid request; 1 if the model does not batch.

        Raises:
            InferenceError: INVALID_ARG, with Triton's text.
        """
        for name in request.requested_outputs:
            if name not in self._outputs and name not in self._states:
                raise InferenceError(f"unexpected inference output '{name}' for model '{self._model}'")
        self._check_count(request)
        batch_size = self._batch_size(request)
        for name, tensor in request.inputs.items():
            self._check_input(request, name, tensor)
        return batch_size

    def reshaped(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs with the shapes at the model, by the `reshape` of its config."""
        seen = dict(inputs)
        for spec in self._reshaped:
            tensor = seen.get(spec.name)
            if tensor is not None:
                lead = tensor.shape[:1] if self._max_batch_size else ()
                shape = reshape(tensor.shape[len(lead) :], dims=spec.dims, to=spec.model_dims)
                seen[spec.name] = tensor.reshaped(lead + shape)
        return seen

    def reshaped_response(self, response: InferenceResponse) -> InferenceResponse:
        """Return a response whose outputs have the `dims` of the config instead of the shapes at the model.

        An output whose number of elements does not fit gives an error response.
        """
        try:
            outputs = tuple(map(self._reshaped_output, response.outputs))
        except InferenceError as error:
            return InferenceResponse(error=error)
        return InferenceResponse(outputs=outputs, parameters=response.parameters, error=response.error)

    def _reshaped_output(self, tensor: Tensor) -> Tensor:
        spec = self._reshaped_outputs.get(tensor.name)
        if spec is None or spec.reshape is None:
            return tensor
        lead = tensor.shape[:1] if self._max_batch_size else ()
        shape = tensor.shape[len(lead) :]
        if len(shape) != len(spec.reshape):
            return tensor  # not the shape of `reshape`: returned as it is
        full_shape = lead + reshape(shape, dims=spec.reshape, to=spec.dims)
        if math.prod(full_shape) != math.prod(tensor.shape):
            raise InferenceError(
                f"output '{spec.name}' of model '{self._model}' has shape {shape_text(tensor.shape)}, whose "
                f"elements do not fit {shape_text(full_shape)}",
                status=Status.INTERNAL,
                remedy=f"the model's output must have the shape of `reshape`: {shape_text(spec.reshape)}",
            )
        return tensor.reshaped(full_shape)

    def _check_count(self, request: InferenceRequest) -> None:
        num_inputs = len(request.inputs)
        is_right = self._num_required <= num_inputs <= len(self._specs)
        if is_right and (self._num_required == len(self._specs) or self._has_all_required(request)):
            return
        required = [name for name, spec in self._specs.items() if not spec.optional]
        missing = ",".join(f"'{name}'" for name in required if name not in request.inputs)
        got = ",".join(f"'{name}'" for name in sorted(request.inputs))
        expected = (
            f"expected {len(self._specs)} inputs"
            if self._num_required == len(self._specs)
            else f"expected number of inputs between {self._num_required} and {len(self._specs)}"
        )
        raise self._error(
            request,
            f"{expected} but got {num_inputs} inputs for model '{self._model}'. Got input(s) [{got}], "
            f"but missing required input(s) {f'[{missing}' if missing else ''}]. "
            "Please provide all required input(s).",
        )

    def _has_all_required(self, request: InferenceRequest) -> bool:
        return all(spec.optional or name in request.inputs for name, spec in self._specs.items())

    def _batch_size(self, request: InferenceRequest) -> int:
        if not self._max_batch_size:
            return 1
        batch_size: int | None = None
        for name, tensor in reversed(tuple(request.inputs.items())):  # Triton names the first that differs
            if not tensor.shape:
                raise self._error(
                    request,
                    f"input '{name}' has no shape but model requires batch dimension for '{self._model}'",
                )
            if batch_size not in (None, tensor.shape[0]):
                raise self._error(
                    request, f"input '{name}' batch size does not match other inputs for '{self._model}'"
                )
            batch_size = tensor.shape[0]
        if batch_size is None:
            return 1
        if batch_size > self._max_batch_size:
            raise self._error(
                request, f"inference request batch-size must be <= {self._max_batch_size} for '{self._model}'"
            )
        return batch_size

    def _check_input(self, request: InferenceRequest, name: str, tensor: Tensor) -> None:
        spec = self._specs.get(name)
        if spec is None:
            raise InferenceError(f"unexpected inference input '{name}' for model '{self._model}'")
        expected = self._types[name]
        if tensor.data_type is not expected:
            raise self._error(
                request,
                f"inference input '{name}' data-type is '{tensor.data_type.name}', but model '{self._model}' "
                f"expects '{expected.name}'",
            )
        shape = tensor.shape[1:] if self._max_batch_size else tensor.shape
        if not fits(shape, spec.dims):
            expected_dims = (-1, *spec.dims) if self._max_batch_size else spec.dims
            note = _BATCH_NOTE if self._max_batch_size else ""
            raise self._error(
                request,
                f"unexpected shape for input '{name}' for model '{self._model}'. "
                f"Expected {shape_text(expected_dims)}, got {shape_text(tensor.shape)}. {note}",
            )
        if self._max_batch_size and not tensor.shape[0]:
            self._check_empty(request, tensor)

    def _check_empty(self, request: InferenceRequest, tensor: Tensor) -> None:
        """Reject a batch without rows with Triton's error, which expects the elements of one."""
        num_elements = math.prod(tensor.shape[1:])
        if not num_elements:
            return
        end = f"for input '{tensor.name}' for model '{self._model}'"
        if tensor.data_type is DataType.BYTES:
            text = f"expected {num_elements} string elements for inference {end.removeprefix('for ')}, got 0"
        else:
            num_bytes = num_elements * tensor.data_type.itemsize
            text = f"input byte size mismatch {end}. Expected {num_bytes}, got 0"
        raise self._error(request, text)

    def _error(self, request: InferenceRequest, message: str) -> InferenceError:
        return InferenceError(with_request_id(message, request.id))


def decoupled_error(model: str) -> InferenceError:
    """Return Triton's error for a BLS call of a decoupled model that takes one response only."""
    return InferenceError(
        f"Model {model} is using the decoupled. The current BLS request call doesn't support models using "
        "the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
        "'async_exec' calls for decoupled models.'",
        status=Status.INTERNAL,
    )


def _state_names(config: ModelConfig) -> set[str]:
    batching = config.sequence_batching
    return {state.output_name for state in batching.states} if batching else set()
