"""Sequence states: what the implicit states of a model are when a sequence starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from genserve.config.model_config import InitialState, StateSpec
from genserve.data_type import DataType
from genserve.errors import InvalidRequest, RepositoryError, Status
from genserve.tensor import Tensor

__all__ = ["SequenceStates"]


class SequenceStates:
    """Makes the first states of sequences; the backend replaces them after each execution."""

    def __init__(self, specs: Sequence[StateSpec], *, max_batch_size: int, path: Path) -> None:
        """Read the initial states.

        Args:
            specs: of the states.
            max_batch_size: of the model; other than 0, states have a batch dimension of 1.
            path: of the model, whose folder `initial_state` has the data files.

        Raises:
            RepositoryError: a data file cannot be read, or is too short.
        """
        rows = (1,) if max_batch_size else ()
        self._first = [_first(spec, rows=rows, path=path) for spec in specs]

    def start(self) -> dict[str, Tensor] | None:
        """Return the states of a new sequence, by the name of the input; its own, to be written into."""
        if not self._first:
            return None
        return {
            tensor.name: Tensor(tensor.name, tensor.array.copy(), data_type=tensor.data_type)
            for tensor in self._first
        }


def _first(spec: StateSpec, *, rows: tuple[int, ...], path: Path) -> Tensor:
    initial = spec.initial_state
    data_type = DataType.from_config_name(spec.data_type)
    if initial is not None and initial.data_file:
        data = _read(initial, data_type=data_type, file=path / "initial_state" / initial.data_file)
        return Tensor(spec.input_name, data.array.reshape(rows + initial.dims), data_type=data_type)
    dims = spec.dims if initial is None else initial.dims
    array = np.zeros(rows + tuple(max(dim, 1) for dim in dims), data_type.numpy)  # -1 starts as 1
    if data_type is DataType.BYTES:
        array.fill(b"")
    return Tensor(spec.input_name, array, data_type=data_type)


def _read(initial: InitialState, *, data_type: DataType, file: Path) -> Tensor:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RepositoryError(
            f"failed to open text file for read {file}: {error.strerror}",
            status=Status.INTERNAL,
            remedy="put the file of `initial_state { data_file }` there",
        ) from None
    num_bytes = math.prod(initial.dims) * data_type.itemsize
    if len(data) < num_bytes:
        raise RepositoryError(
            f"initial_state setting expects {num_bytes} bytes, but the data provided from "
            f"{initial.data_file}only has {len(data)} bytes.",
            remedy=f"{file} must hold {data_type.name} elements for dims {list(initial.dims)}, row-major",
        )
    content = data if data_type is DataType.BYTES else data[:num_bytes]
    try:
        return Tensor.from_bytes(initial.data_file, content, data_type=data_type, shape=initial.dims)
    except InvalidRequest as error:
        raise RepositoryError(f"{file}: {error.message}", remedy=error.remedy) from None
