"""Sequence tensors: the control inputs and the implicit states of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from genserve.backends.tensor_data import read_tensor
from genserve.config.model_config import Control, SequenceBatching, StateSpec
from genserve.errors import InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse, RequestFlags, with_request_id
from genserve.tensor import DataType, Tensor


class SequenceStates:
    """Makes the initial states of sequences; the backend replaces them after each execution."""

    def __init__(self, specs: Sequence[StateSpec], *, max_batch_size: int, path: Path) -> None:
        """Read the initial states.

        Args:
            specs: of the states.
            max_batch_size: of the model; unless it is 0, states have a batch dimension of 1.
            path: of the model; its folder `initial_state` holds the data files.

        Raises:
            RepositoryError: a data file cannot be read, or is too short.
        """
        rows = (1,) if max_batch_size else ()
        self._initial = [_initial_state(spec, rows=rows, path=path) for spec in specs]

    def start(self) -> dict[str, Tensor] | None:
        """Return new, writable initial states by input name; None: the model has no states."""
        if not self._initial:
            return None
        return {
            tensor.name: Tensor(tensor.name, tensor.array.copy(), data_type=tensor.data_type)
            for tensor in self._initial
        }


def _initial_state(spec: StateSpec, *, rows: tuple[int, ...], path: Path) -> Tensor:
    initial = spec.initial_state
    data_type = DataType.from_config_name(spec.data_type)
    if initial is not None and initial.data_file:
        data = read_tensor(
            path / "initial_state" / initial.data_file,
            spec.input_name,
            data_type=data_type,
            shape=initial.dims,
            too_short=lambda expected, actual: (
                f"initial_state setting expects {expected} bytes, but the data provided from "
                f"{initial.data_file}only has {actual} bytes."
            ),
        )
        return data.reshaped(rows + initial.dims)
    dims = spec.dims if initial is None else initial.dims
    shape = rows + tuple(max(dim, 1) for dim in dims)  # -1 becomes 1
    return _zeros(spec.input_name, shape, data_type=data_type)


class SequenceControls:
    """Makes the control tensors of a model: of shape [1, 1] if it batches, else [1].

    They are passed as inputs and are read-only for the model.
    """

    def __init__(self, config: SequenceBatching, *, max_batch_size: int) -> None:
        self._shape = (1, 1) if max_batch_size else (1,)
        by_kind = {control.kind.removeprefix("CONTROL_SEQUENCE_"): control for control in config.controls}
        self._corrid = by_kind.pop("CORRID", None)
        self._tensors = {
            (kind, is_true): self._flag(control, is_true=is_true)
            for kind, control in by_kind.items()
            for is_true in (False, True)
        }
        self._kinds = tuple(by_kind)

    def check(self, request: InferenceRequest) -> None:
        """Check that a correlation id has the type that the model expects.

        Raises:
            InferenceError: it is a number and the model expects a string, or vice versa.
        """
        if self._corrid is None:
            return
        actual = DataType.BYTES if isinstance(request.correlation_id, str) else DataType.UINT64
        expected = DataType.from_config_name(self._corrid.data_type)
        if (actual is DataType.BYTES) != (expected is DataType.BYTES):
            raise InferenceError(
                with_request_id(
                    f"sequence batching control '{self._corrid.name}' data-type is '{actual.name}', "
                    f"but model '{request.model_name}' expects '{expected.name}'",
                    request.id,
                )
            )

    def of(self, request: InferenceRequest) -> dict[str, Tensor]:
        """Return the controls of a request that is about to run."""
        return self._make(
            start=RequestFlags.SEQUENCE_START in request.flags,
            end=RequestFlags.SEQUENCE_END in request.flags,
            ready=True,
            correlation_id=request.correlation_id,
        )

    @property
    def of_null(self) -> dict[str, Tensor]:
        """The controls of a null request: everything false, no correlation id."""
        return self._make(start=False, end=False, ready=False, correlation_id=0)

    def _make(self, *, start: bool, end: bool, ready: bool, correlation_id: int | str) -> dict[str, Tensor]:
        values = {"START": start, "END": end, "READY": ready}
        tensors = [self._tensors[kind, values[kind]] for kind in self._kinds]
        if self._corrid is not None:
            tensors.append(self._correlation_id(self._corrid, correlation_id))
        return {tensor.name: tensor for tensor in tensors}

    def _flag(self, control: Control, *, is_true: bool) -> Tensor:
        data_type = DataType.from_config_name(control.data_type)
        array = np.full(self._shape, control.false_true[is_true], data_type.numpy)
        return Tensor(control.name, array, data_type=data_type)

    def _correlation_id(self, control: Control, correlation_id: int | str) -> Tensor:
        data_type = DataType.from_config_name(control.data_type)
        if data_type is DataType.BYTES:
            array = np.empty(self._shape, object)
            array.fill(correlation_id.encode() if isinstance(correlation_id, str) else b"")
        else:  # a narrower type keeps the low bits
            array = np.full(self._shape, correlation_id, np.uint64).astype(data_type.numpy)
        return Tensor(control.name, array, data_type=data_type)


def null_inference(like: Inference, *, controls: SequenceControls) -> Inference:
    """Return a null request for an empty slot: the inputs are those of `like`, filled with zeros."""
    request = like.request
    null = Inference(
        request=InferenceRequest(
            model_name=request.model_name,
            model_version=request.model_version,
            inputs={name: _zeros_like(tensor) for name, tensor in like.inputs.items()},
        ),
        on_response=_discard,
        batch_size=like.batch_size,
        model_name=like.model_name,
        model_version=like.model_version,
    )
    null.inputs.update(controls.of_null)
    if like.states is not None:
        null.states = {name: _zeros_like(tensor) for name, tensor in like.states.items()}
    return null


def _discard(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
    """Discard the responses to a null request."""


def _zeros_like(tensor: Tensor) -> Tensor:
    return _zeros(tensor.name, tensor.shape, data_type=tensor.data_type)


def _zeros(name: str, shape: Sequence[int], *, data_type: DataType) -> Tensor:
    array = np.zeros(tuple(shape), data_type.numpy)
    if data_type is DataType.BYTES:
        array.fill(b"")
    return Tensor(name, array, data_type=data_type)
