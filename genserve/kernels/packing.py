"""Packing: quantizes weights, and packs them into the layouts of `genserve.Linear`.

A weight [N, K] (N outputs, K inputs) becomes P = ceil(N / 32) panels of 32 outputs, padded with zeros:

    weight_format   weight                             scales
    int8            uint8    [P, Kp/4, 32, 4]          float32 [P, 32]            Kp: K rounded up to 64
    int8_block      uint8    [P, Kp/4, 32, 4]          float32 [P, Kp/64, 32]     Kp: K rounded up to 64
    int4_block      uint8    [P, Kp/8, 32, 4]          float32 [P, Kp/32, 32]     Kp: K rounded up to 32
    float32         float32  [P, K, 32]                none

8-bit values, -127 to 127, are stored as q + 128. 4-bit values, -8 to 7, are stored as q + 8, two in a byte:
byte b of group g has input 8g + b in its low half and 8g + 4 + b in its high half.

The weight of a gated layer has the rows of I gates followed by the rows of the I values that they scale,
N = 2I. A panel has 16 gates followed by their 16 values, and P = ceil(I / 16). A bias [N] stays as it is.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

PANEL = 32

T = TypeVar("T", bound=np.generic)

# The number of inputs that share a scale; None: all inputs of an output share one.
BLOCKS: dict[str, int | None] = {"int8": None, "int8_block": 64, "int4_block": 32}

WeightFormat = Literal["int8", "int8_block", "int4_block"]


class Quantized(NamedTuple):
    """A quantized weight: weight[n, k] is about values[n, k] * scales[n, k // block]."""

    values: NDArray[np.int8]
    """[N, K]; -127 to 127, or -8 to 7 for int4_block."""

    scales: NDArray[np.float32]
    """[N, blocks]; one block for int8."""


class Packed(NamedTuple):
    """A weight in the operator's layout."""

    weight: NDArray[np.uint8]
    scales: NDArray[np.float32]


def quantize(weight: NDArray[np.float32], weight_format: WeightFormat) -> Quantized:
    """Quantize a weight [N, K]; the value of the largest magnitude in a block determines the block's scale.

    With 8 bits the scale is magnitude / 127. With 4 bits the largest value becomes -8 whatever its sign, so
    that all sixteen integers are used.
    """
    outputs, inputs = weight.shape
    block = BLOCKS[weight_format] or inputs
    padded = np.zeros((outputs, -(-inputs // block) * block), np.float32)
    padded[:, :inputs] = weight
    blocks = padded.reshape(outputs, -1, block)
    if weight_format == "int4_block":
        at = np.abs(blocks).argmax(axis=2, keepdims=True)
        scales = np.take_along_axis(blocks, at, axis=2) / np.float32(-8)
        lowest, highest = -8, 7
    else:
        scales = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
        lowest, highest = -127, 127
    values = np.rint(blocks / np.where(scales == 0, np.float32(1), scales)).clip(lowest, highest)
    return Quantized(
        values.astype(np.int8).reshape(outputs, -1)[:, :inputs], scales[:, :, 0].astype(np.float32)
    )


def pack_quantized(quantized: Quantized, weight_format: WeightFormat, *, gated: bool = False) -> Packed:
    """Pack a quantized weight and its scales into panels.

    Args:
        quantized: values [N, K] and scales [N, blocks]; the format has 1, ceil(K / 64) or ceil(K / 32)
            blocks.
        weight_format: the operator's attribute.
        gated: whether the rows are I gates followed by the I values that they scale.

    Raises:
        ValueError: the scales have another shape.
    """
    values, scales = quantized
    inputs = values.shape[1]
    block = BLOCKS[weight_format]
    blocks = 1 if block is None else -(-inputs // block)
    if scales.shape != (len(values), blocks):
        wanted = (len(values), blocks)
        msg = f"scales of {weight_format} for a weight {values.shape} have shape {wanted}, not {scales.shape}"
        raise ValueError(msg)
    multiple = block or 64
    columns = np.zeros((len(values), -(-inputs // multiple) * multiple), np.int8)
    columns[:, :inputs] = values
    if weight_format == "int4_block":
        panels: NDArray[Any] = _in_panels((columns + 8).astype(np.uint8), gated=gated, fill=8)  # [P, 32, Kp]
        pairs = panels.reshape(len(panels), PANEL, -1, 2, 4)
        steps: NDArray[Any] = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
    else:
        panels = _in_panels((columns.astype(np.int16) + 128).astype(np.uint8), gated=gated, fill=128)
        steps = panels.reshape(len(panels), PANEL, -1, 4)
    scale_panels = _in_panels(scales.astype(np.float32), gated=gated)  # [P, 32, blocks]
    packed_scales = scale_panels[:, :, 0] if block is None else scale_panels.transpose(0, 2, 1)
    return Packed(np.ascontiguousarray(steps.transpose(0, 2, 1, 3)), np.ascontiguousarray(packed_scales))


def pack_float32(weight: NDArray[np.float32], *, gated: bool = False) -> NDArray[np.float32]:
    """Pack a weight [N, K] into panels [P, K, 32]; `gated` as for `pack_quantized`."""
    panels = _in_panels(weight.astype(np.float32, copy=False), gated=gated)
    return np.ascontiguousarray(panels.transpose(0, 2, 1))


def _in_panels(rows: NDArray[T], *, gated: bool, fill: int = 0) -> NDArray[T]:
    """Cut rows [N, columns] into panels [P, 32, columns], the last one padded with `fill`."""
    if gated and len(rows) % 2:
        msg = f"a gated layer needs an even number of rows, not {len(rows)}: as many gates as values"
        raise ValueError(msg)
    parts = np.split(rows, 2) if gated else [rows]
    height = PANEL // len(parts)
    count = -(-len(parts[0]) // height)
    panels = np.empty((count, PANEL, rows.shape[1]), rows.dtype)
    for i, part in enumerate(parts):
        padded = np.full((count * height, rows.shape[1]), fill, rows.dtype)
        padded[: len(part)] = part
        panels[:, i * height : (i + 1) * height] = padded.reshape(count, height, -1)
    return panels
