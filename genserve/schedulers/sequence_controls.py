"""Sequence controls: the tensors by which a model is told where a sequence stands."""

from __future__ import annotations

import numpy as np

from genserve.config.model_config import Control, SequenceBatching
from genserve.data_type import DataType
from genserve.errors import InferenceError
from genserve.inference import (
    Inference,
    InferenceRequest,
    InferenceResponse,
    RequestFlags,
    with_request_id,
)
from genserve.tensor import Tensor

__all__ = ["SequenceControls", "null_inference"]


class SequenceControls:
    """Makes the control tensors of a model, of shape [1, 1] where it batches, else [1].

    The model gets them as inputs like any other; it must not write into them.
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
        """Check that the model can be told the correlation id of a request.

        Raises:
            InferenceError: it is a number and the model expects a string, or the other way round.
        """
        if self._corrid is None:
            return
        given = DataType.BYTES if isinstance(request.correlation_id, str) else DataType.UINT64
        expected = DataType.from_config_name(self._corrid.data_type)
        if (given is DataType.BYTES) != (expected is DataType.BYTES):
            raise InferenceError(
                with_request_id(
                    f"sequence batching control '{self._corrid.name}' data-type is '{given.name}', "
                    f"but model '{request.model_name}' expects '{expected.name}'",
                    request.id,
                )
            )

    def of(self, request: InferenceRequest) -> dict[str, Tensor]:
        """Return the controls of a request that runs."""
        return self._make(
            start=RequestFlags.SEQUENCE_START in request.flags,
            end=RequestFlags.SEQUENCE_END in request.flags,
            ready=True,
            correlation_id=request.correlation_id,
        )

    @property
    def of_null(self) -> dict[str, Tensor]:
        """The controls of what fills an empty slot: everything false, and no correlation id."""
        return self._make(start=False, end=False, ready=False, correlation_id=0)

    def _make(
        self, *, start: bool, end: bool, ready: bool, correlation_id: int | str
    ) -> dict[str, Tensor]:
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
        else:  # a narrower type gets the low bits
            array = np.full(self._shape, correlation_id, np.uint64).astype(data_type.numpy)
        return Tensor(control.name, array, data_type=data_type)


def null_inference(like: Inference, *, controls: SequenceControls) -> Inference:
    """Make what fills an empty slot of a batch: inputs as in `like`, all zeros; its responses go nowhere."""
    request = like.request
    null = Inference(
        request=InferenceRequest(
            model_name=request.model_name,
            model_version=request.model_version,
            inputs={name: _zeros(tensor) for name, tensor in like.inputs.items()},
        ),
        on_response=_ignore,
        batch_size=like.batch_size,
        model_name=like.model_name,
        model_version=like.model_version,
    )
    null.inputs.update(controls.of_null)
    if like.states is not None:
        null.states = {name: _zeros(tensor) for name, tensor in like.states.items()}
    return null


def _ignore(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
    """Nobody asked."""


def _zeros(tensor: Tensor) -> Tensor:
    array = np.zeros(tensor.shape, tensor.data_type.numpy)
    if tensor.data_type is DataType.BYTES:
        array.fill(b"")
    return Tensor(tensor.name, array, data_type=tensor.data_type)
