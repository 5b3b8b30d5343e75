"""Low-rank adapters (LoRA) of linear layers: packs them, and passes those of a call to the operators.

`src/low_rank.hpp` describes the layout. An adapter adds `B (A x)` to the outputs of a layer, for the rows
that have it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.kernels import library
from genserve.kernels.packing import PANEL

_LANES = 16
_RANKS = 4  # those of a part are padded to a multiple of it
_INPUTS = 64  # those of rows in 8 bits are padded to a multiple of it
_MOST = 127  # of an int8
_OFFSET = 128  # a matrix in int8 is stored with it, as uint8
_LINE = 64  # bytes of a cache line

_TYPES = {"float32": 1, "uint8": 2}  # ONNX's numbers
_GROUP = np.dtype([("scale", "f4"), ("first", "u4"), ("begin", "u2"), ("end", "u2")])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """The sizes of a `genserve.Linear`, or of a linear layer of `genserve.DecoderLayer`.

    Attributes:
        in_features: inputs.
        outputs: the outputs of each segment; of a gated layer gates and values together.
        gated: whether the outputs are gates followed by the values that they scale.
        in_int8: whether an adapter's matrices are in int8, as beside all quantized weights; else in float32.
    """

    in_features: int
    outputs: tuple[int, ...]
    gated: bool = False
    in_int8: bool = True

    @property
    def out_features(self) -> int:
        """The outputs of all segments."""
        return sum(self.outputs)

    def groups(self) -> NDArray[np.int64]:
        """Return the outputs of each half panel, [2 * panels, 16]; `out_features` stands for padding."""
        none = self.out_features
        if self.gated:
            half = none // 2
            gates = _padded(np.arange(half), _LANES, fill=none).reshape(-1, _LANES)
            values = np.where(gates == none, none, gates + half)
            return np.stack([gates, values], axis=1).reshape(-1, _LANES)
        ends = np.cumsum(self.outputs)
        panels = [
            _padded(np.arange(end - count, end), PANEL, fill=none)
            for end, count in zip(ends, self.outputs, strict=True)
        ]
        return np.concatenate(panels).reshape(-1, _LANES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPart:
    """What is added to some consecutive outputs of a layer: `up @ (down @ x)`.

    Attributes:
        first: the first of the outputs.
        down: A, [rank, in_features] float32.
        up: B, [outputs, rank] float32, multiplied by the scale.
    """

    first: int
    down: NDArray[np.float32]
    up: NDArray[np.float32]


class _LowRank(ctypes.Structure):
    _fields_ = (
        ("down", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class _AdapterRows(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("num_adapted", ctypes.c_int64),
    )


class _Adapters(ctypes.Structure):
    _fields_ = (
        ("num_layers", ctypes.c_int64),
        ("names", ctypes.c_void_p),
        ("num_adapters", ctypes.c_int64),
        ("layers", ctypes.c_void_p),
        ("rows", _AdapterRows * 2),
    )


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The adapter of one layer, as the operators read it."""

    down: NDArray[np.uint8 | np.float32]
    factors: NDArray[np.float32]
    up: NDArray[np.uint8 | np.float32]
    groups: NDArray[Any]

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All of them."""
        return self.down, self.factors, self.up, self.groups


def pack_layer(shape: LinearShape, parts: Sequence[LowRankPart]) -> PackedLayer:
    """Pack the parts of an adapter that change one layer; their outputs do not overlap."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + -(-len(part.down) // _RANKS) * _RANKS)
    rank = -(-starts[-1] // _LANES) * _LANES if shape.in_int8 else starts[-1]
    multiple = _INPUTS if shape.in_int8 else _LANES
    down = np.zeros((rank, -(-shape.in_features // multiple) * multiple), np.float32)
    up = np.zeros((shape.out_features + 1, rank), np.float32)  # with a row for padding
    ranges = np.zeros((shape.out_features + 1, 2), np.int64)  # the ranks that change an output
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        outputs = slice(part.first, part.first + len(part.up))
        down[start : start + len(part.down), : shape.in_features] = part.down
        up[outputs, start : start + part.up.shape[1]] = part.up
        ranges[outputs] = start, end
    factors = np.ones(rank, np.float32)
    if shape.in_int8:
        factors = _divide_by_largest(up, axis=0) * _divide_by_largest(down, axis=1) / np.float32(_MOST)
    groups_of_outputs = shape.groups()
    changed = ranges[groups_of_outputs]  # [groups, 16, 2]
    begin = np.where(changed[..., 1] > 0, changed[..., 0], rank).min(axis=1)
    end = changed[..., 1].max(axis=1)
    begin = np.minimum(begin, end)
    ranks_of_line = _RANKS if shape.in_int8 else 1
    counts = (end - begin) // ranks_of_line
    first = np.concatenate([[0], np.cumsum(counts)])
    lines = np.zeros((first[-1], _LANES, ranks_of_line), np.float32)
    groups = np.ones(len(counts), _GROUP)
    groups["first"], groups["begin"], groups["end"] = first[:-1], begin, end
    for start, stop in {*zip(begin.tolist(), end.tolist(), strict=True)}:
        chosen = np.flatnonzero((begin == start) & (end == stop))
        own = up[groups_of_outputs[chosen]][:, :, start:stop]
        if shape.in_int8 and stop > start:
            groups["scale"][chosen] = _divide_by_largest(own, axis=(1, 2)) / np.float32(_MOST)
        own = own.reshape(len(chosen), _LANES, -1, ranks_of_line)
        where = first[chosen][:, None] + np.arange(own.shape[2])
        lines[where] = own.transpose(0, 2, 1, 3)
    if not shape.in_int8:
        blocks = down.reshape(rank // _RANKS, _RANKS, -1, _LANES).transpose(0, 2, 1, 3)
        return PackedLayer(np.ascontiguousarray(blocks), factors, lines, groups)
    blocks = down.reshape(rank // _LANES, _LANES, -1, _RANKS).transpose(0, 2, 1, 3)
    return PackedLayer(_in_int8(blocks), factors, _in_int8(lines), groups)


class PackedAdapter:
    """An adapter for the layers of one graph."""

    def __init__(self, layers: Sequence[PackedLayer | None]) -> None:
        """Copy the layers, in the order of `LayerNames`; None: a layer that stays as it is."""
        self._layers = _in_one_piece(layers)
        self.table = (_LowRank * len(layers))(*map(_described, self._layers))


def _in_one_piece(layers: Sequence[PackedLayer | None]) -> list[PackedLayer | None]:
    """Copy layers into one piece of memory, in whole cache lines.

    A step reads all of it once. For a piece of 4 MiB and more, numpy asks the system for large pages.
    """
    arrays = [array for layer in layers if layer is not None for array in layer.arrays]
    sizes = [-(-array.nbytes // _LINE) * _LINE for array in arrays]
    memory = np.empty(sum(sizes) + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    copies = []
    for array, size in zip(arrays, sizes, strict=True):
        copies.append(memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        copies[-1][...] = array
        start += size
    left = iter(copies)
    return [None if layer is None else PackedLayer(*(next(left) for _ in layer.arrays)) for layer in layers]


def _described(layer: PackedLayer | None) -> _LowRank:
    if layer is None:
        return _LowRank()
    kind = _TYPES[layer.down.dtype.name]
    return _LowRank(*(array.ctypes.data for array in layer.arrays), len(layer.factors), kind)


class LayerNames:
    """The layers of a graph that adapters may change, by the names of their weights.

    Attributes:
        names: the names, in the order in which a `PackedAdapter` has its layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Sort the names by the digests by which the operators find them."""
        digest = library().genserve_name_digest
        digests = {name: digest(name.encode()) for name in names}
        self.names = sorted(names, key=digests.__getitem__)
        self._digests = np.array([digests[name] for name in self.names], np.uint64)

    def packed(self, layers: Mapping[str, PackedLayer]) -> PackedAdapter:
        """Return an adapter with these layers."""
        return PackedAdapter([layers.get(name) for name in self.names])

    @contextmanager
    def using(
        self,
        adapters: Sequence[PackedAdapter],
        rows: NDArray[np.int32],
        wanted: NDArray[np.int64],
    ) -> Iterator[None]:
        """Have the calls on this thread apply adapters, until the end of the scope.

        Args:
            adapters: the adapters.
            rows: [T]: which of them each row of a tensor with T rows has; -1: none.
            wanted: the rows that other tensors have, ascending.
        """
        kept = [rows, np.ascontiguousarray(rows[wanted])]
        described = []
        for own in kept[:2]:
            order = np.argsort(own, kind="stable").astype(np.int32)
            kept.append(order)
            num_adapted = np.count_nonzero(own >= 0)
            described.append(_AdapterRows(len(own), own.ctypes.data, order.ctypes.data, num_adapted))
        tables = (ctypes.c_void_p * len(adapters))(*(ctypes.addressof(each.table) for each in adapters))
        call = _Adapters(
            len(self._digests),
            self._digests.ctypes.data,
            len(adapters),
            ctypes.addressof(tables),
            (_AdapterRows * 2)(*described),
        )
        use_adapters = library().genserve_use_adapters
        use_adapters(ctypes.addressof(call))
        try:
            yield
        finally:
            use_adapters(None)


def _divide_by_largest(values: NDArray[np.float32], *, axis: int | tuple[int, ...]) -> NDArray[np.float32]:
    """Divide in place by the largest magnitudes along some axes, and return these; 1 in place of zeros."""
    largest = np.abs(values).max(axis=axis, keepdims=True)
    largest[largest == 0] = 1
    values /= largest
    squeezed: NDArray[np.float32] = np.squeeze(largest, axis)
    return squeezed


def _in_int8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return values between -1 and 1 as `dot()` of the kernels reads them, C-contiguous."""
    return np.ascontiguousarray(np.rint(values * _MOST) + _OFFSET, np.uint8)


def _padded(values: NDArray[np.int64], multiple: int, *, fill: int) -> NDArray[np.int64]:
    return np.pad(values, (0, -len(values) % multiple), constant_values=fill)
