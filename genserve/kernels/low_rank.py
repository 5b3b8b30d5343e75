"""Low-rank adapters (LoRA) of linear layers: packs them, and passes those of a call to the operators.

`src/low_rank.hpp` describes the layout. An adapter adds `B (A x)` to the outputs of a layer, for the rows
that have it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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


class _Layout(NamedTuple):
    """Where the numbers of some parts are in a packed layer; a line has 16 outputs of one or four ranks."""

    rank: int
    ranks: Sequence[slice]  # of each part
    groups: NDArray[Any]  # without their scales
    outputs: NDArray[np.int64]  # of each group, [groups, 16]
    num_lines: int
    # For groups that have the same ranks: their outputs [n, 16], these ranks in lines, and their lines.
    blocks: Sequence[tuple[NDArray[np.int64], slice, NDArray[np.int64]]]


@lru_cache(maxsize=64)
def _layout(shape: LinearShape, parts: Sequence[tuple[int, int, int]]) -> _Layout:
    """Lay out parts, of which each is its first output, the number of its outputs, and its rank."""
    changed = np.zeros((shape.out_features + 1, 2), np.int64)  # the ranks that change an output
    ranks = []
    start = 0
    for first_output, num_outputs, rank_of_part in parts:
        ranks.append(slice(start, start + rank_of_part))
        end = start + -(-rank_of_part // _RANKS) * _RANKS
        changed[first_output : first_output + num_outputs] = start, end
        start = end
    rank = -(-start // _LANES) * _LANES if shape.in_int8 else start
    outputs = shape.groups()
    of_groups = changed[outputs]  # [groups, 16, 2]
    begin = np.where(of_groups[..., 1] > 0, of_groups[..., 0], rank).min(axis=1)
    end = of_groups[..., 1].max(axis=1)
    begin = np.minimum(begin, end)
    ranks_of_line = _RANKS if shape.in_int8 else 1
    first = np.concatenate([[0], np.cumsum((end - begin) // ranks_of_line)])
    groups = np.ones(len(outputs), _GROUP)
    groups["first"], groups["begin"], groups["end"] = first[:-1], begin, end
    blocks = []
    for start, stop in {*zip(begin.tolist(), end.tolist(), strict=True)}:
        chosen = np.flatnonzero((begin == start) & (end == stop))
        of_block = slice(start // ranks_of_line, stop // ranks_of_line)
        lines = first[chosen][:, None] + np.arange(of_block.stop - of_block.start)
        blocks.append((outputs[chosen], of_block, lines))
    return _Layout(rank, ranks, groups, outputs, int(first[-1]), blocks)


def pack_layer(shape: LinearShape, parts: Sequence[LowRankPart]) -> PackedLayer:
    """Pack the parts of an adapter that change one layer; their outputs do not overlap."""
    layout = _layout(shape, tuple((part.first, *part.up.shape) for part in parts))
    rank, groups = layout.rank, layout.groups.copy()
    multiple = _INPUTS if shape.in_int8 else _LANES
    dtype, zero = (np.uint8, _OFFSET) if shape.in_int8 else (np.float32, 0)
    down = np.full((rank, -(-shape.in_features // multiple) * multiple), zero, dtype)
    up = np.full((rank, shape.out_features + 1), zero, dtype)  # with a column for padding
    factors = np.ones(rank, np.float32)
    # Transposed, since numpy is slow with rows that are as short as ranks.
    ups = [part.up.T.copy() for part in parts]
    if shape.in_int8:
        largest = np.zeros(shape.out_features + 1, np.float32)  # of each output, then of its group
        for part, ranks, own in zip(parts, layout.ranks, ups, strict=True):
            of_up = _divide_by_largest(own)
            own_down = part.down.copy()
            factors[ranks] = of_up * _divide_by_largest(own_down) / np.float32(_MOST)
            down[ranks, : shape.in_features] = _in_int8(own_down)
            largest[part.first : part.first + own.shape[1]] = np.abs(own).max(axis=0)
        of_groups = largest[layout.outputs].max(axis=1)
        of_groups[of_groups == 0] = 1
        largest[layout.outputs] = of_groups[:, None]
        groups["scale"] = of_groups / np.float32(_MOST)
    for part, ranks, own in zip(parts, layout.ranks, ups, strict=True):
        outputs = slice(part.first, part.first + own.shape[1])
        if shape.in_int8:
            own /= largest[outputs]
            up[ranks, outputs] = _in_int8(own)
        else:
            down[ranks, : shape.in_features], up[ranks, outputs] = part.down, own
    if not shape.in_int8:
        lines = _lines(up.T, layout)[..., None]
        blocks = down.reshape(rank // _RANKS, _RANKS, -1, _LANES).transpose(0, 2, 1, 3)
        return PackedLayer(np.ascontiguousarray(blocks), factors, lines, groups)
    # Four bytes that stay together are moved as one number.
    fours = np.ascontiguousarray(up.reshape(rank // _RANKS, _RANKS, -1).transpose(2, 0, 1))
    lines = _lines(fours.view(np.uint32)[..., 0], layout)[..., None].view(np.uint8)
    of_inputs = down.view(np.uint32).reshape(rank // _LANES, _LANES, -1).transpose(0, 2, 1)
    return PackedLayer(of_inputs.copy()[..., None].view(np.uint8), factors, lines, groups)


def _lines(up: NDArray[Any], layout: _Layout) -> NDArray[Any]:
    """Return the lines [num_lines, 16] of a matrix [outputs, ranks in lines]."""
    lines = np.empty((layout.num_lines, _LANES), up.dtype)
    for outputs, ranks, where in layout.blocks:
        lines[where] = up[:, ranks][outputs].transpose(0, 2, 1)
    return lines


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


def _divide_by_largest(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide rows in place by their largest magnitudes, and return these; 1 in place of zeros."""
    largest: NDArray[np.float32] = np.abs(values).max(axis=1)
    largest[largest == 0] = 1
    values /= largest[:, None]
    return largest


def _in_int8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return values between -1 and 1 as `dot()` of the kernels reads them; changes them in place."""
    values *= _MOST
    np.rint(values, out=values)
    values += _OFFSET
    return values.astype(np.uint8)


def _padded(values: NDArray[np.int64], multiple: int, *, fill: int) -> NDArray[np.int64]:
    return np.pad(values, (0, -len(values) % multiple), constant_values=fill)
