"""Stored weight: the weight of a linear layer in the formats of a quantized checkpoint, without rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import StoredRows
from genserve.export.checkpoints.rows import Rows, joined_rows
from genserve.kernels.blocks import BLOCK_FORMATS, pack_blocks, q4z_values
from genserve.sampling.logits_array import FloatArray

_MOST_SEGMENTS = 3      # of one Linear
_OTHER = "Q8_0"         # for weights that have none of the formats
_BLOCK = 32             # inputs of a block of Q8_0


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [N, K] in parts, which follow each other."""

    parts: tuple[StoredRows, ...]       # with the same order of inputs
    are_exact: tuple[bool, ...] = ()    # whether each weight of which it was made has the numbers of the file

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: [N, K]."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].inputs

    @property
    def order(self) -> NDArray[np.int32] | None:
        """The input of `genserve.Linear` of this name."""
        return self.parts[0].order

    @property
    def weight_format(self) -> str:
        """The attribute of `genserve.Linear`."""
        formats = [(BLOCK_FORMATS[part.kind].name, part.shape[0]) for part in self.parts]
        if len(formats) == 1:
            return formats[0][0]
        return ",".join(f"{name}:{outputs}" for name, outputs in formats)

    def panels(self, name: str, *, gated: bool = False) -> Iterator[Callable[[], list[NDArray[np.uint8]]]]:
        """Yield functions that return the panels of `genserve.Linear`, one part after the other.

        They raise ExportError, in which the weight has this name, if a block of the file is broken.
        """
        for part in self.parts:
            for rows in part.rows.parts(gated=gated):
                yield partial(_packed, rows, part.kind, name=name, gated=gated)


def joined(parts: Sequence[StoredRows | Rows[np.float32]], *, gated: bool = False) -> StoredWeight | None:
    """Return the weight that has these parts, one after the other.

    A part that is floats becomes Q8_0. So does each part of a `gated` weight if their formats differ, since
    gates and values are multiplied together; each part that has its inputs in an order if another one has
    them in another order, since they read one row; and the smallest parts, while there are more segments of
    one format than a Linear has.

    Returns:
        None: no number of inputs can be cut into blocks.
    """
    if any(part.shape[1] % _BLOCK for part in parts):
        return None
    stored = [part if isinstance(part, StoredRows) else rounded(part) for part in parts]
    if not all(_same_order(part, stored[0]) for part in stored):
        stored = [part if part.order is None else rounded(_floats(part)) for part in stored]
    if gated and len({part.kind for part in stored}) > 1:
        stored = [rounded(_floats(part)) for part in stored]
    while len(segments := _segments(stored)) > _MOST_SEGMENTS:
        smallest = min((part for part in stored if part.kind != _OTHER), key=lambda part: part.shape[0])
        stored = [_rounded_in_order(part) if part is smallest else part for part in stored]
    merged = [replace(same[0], rows=joined_rows([part.rows for part in same])) for same in segments]
    return StoredWeight(tuple(merged), are_exact=tuple(part.is_exact for part in stored))


def _segments(parts: Sequence[StoredRows]) -> list[list[StoredRows]]:
    """Return the parts beside each other that have one format."""
    return [[*same] for _, same in groupby(parts, key=lambda part: part.kind)]


def _packed(rows: NDArray[np.uint8], kind: str, *, name: str, gated: bool) -> list[NDArray[np.uint8]]:
    try:
        return [pack_blocks(rows, kind, gated=gated)]
    except ValueError as error:
        raise ExportError(
            f"the {kind} blocks of {name} cannot be executed as they are: {error}",
            remedy="download the file again; or export it with --precision int8, which dequantizes it",
        ) from error


def rounded(weight: Rows[np.float32]) -> StoredRows:
    """Return a weight in Q8_0; its inputs are whole blocks."""
    number = GGMLQuantizationType[_OTHER]
    block, block_bytes = GGML_QUANT_SIZES[number]
    outputs, inputs = weight.shape

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        blocks: NDArray[np.uint8] = quantize(weight.read(start, stop), number)
        return blocks

    rows = Rows((outputs, inputs // block * block_bytes), read)
    return StoredRows(kind=_OTHER, rows=rows, inputs=inputs, is_exact=False)


def _rounded_in_order(part: StoredRows) -> StoredRows:
    """Return a part in Q8_0, with its inputs in the same order."""
    return replace(rounded(_floats(replace(part, order=None))), order=part.order)


def _floats(part: StoredRows) -> Rows[np.float32]:
    def read(start: int, stop: int) -> FloatArray:
        blocks = np.ascontiguousarray(part.rows.read(start, stop))
        if part.kind.startswith("Q4Z"):
            values = q4z_values(blocks, part.kind)
        else:
            values = dequantize(blocks, GGMLQuantizationType[part.kind]).reshape(stop - start, part.inputs)
        return values if part.order is None else values[:, np.argsort(part.order)]

    return Rows(part.shape, read)


def _same_order(part: StoredRows, other: StoredRows) -> bool:
    if part.order is None or other.order is None:
        return part.order is other.order
    return np.array_equal(part.order, other.order)
