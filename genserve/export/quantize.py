"""Quantise: weights as small integers, with one scale per block of inputs or one per output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from genserve.export.checkpoint import FloatArray

__all__ = ["Blocks", "Rows", "Scheme", "quantize", "quantize_rows"]

_ROWS = 1024  # at a time: what lies between weight and result takes some times their memory
_NOTHING = np.float32(1e-30)    # what is smaller becomes 0: float32 has no inverse of the smallest numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights become integers; symmetric, the zero point is the middle of the range."""

    bits: Literal[4, 8]
    block_size: int  # inputs that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A weight [N, K] in blocks; K is padded with zeros to whole blocks."""

    values: NDArray[np.uint8]  # [N, blocks, block_size * bits / 8]; of two 4-bit values the first is low
    scales: FloatArray         # [N, blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A weight [N, K] in 8 bits; w is about q * scale of its row."""

    values: NDArray[np.int8]  # [N, K], -127 to 127
    scales: FloatArray        # [N]


def quantize_rows(weight: FloatArray) -> Rows:
    """Round a weight [N, K] to 8 bits, row by row, the way MatMulIntegerToFloat reads its transpose."""
    parts = [_quantize_rows(weight[i : i + _ROWS]) for i in range(0, len(weight), _ROWS)]
    return Rows(
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
    )


def _quantize_rows(weight: FloatArray) -> Rows:
    magnitude = np.abs(weight).max(axis=1)
    scales = np.where(magnitude > _NOTHING, magnitude, 1).astype(np.float32) / np.float32(127)
    return Rows(values=np.rint(weight / scales[:, None]).astype(np.int8), scales=scales)


def quantize(weight: FloatArray, scheme: Scheme) -> Blocks:
    """Round a weight [N, K] to integers, block by block.

    w is about (q - 2^(bits-1)) * scale. The entry of largest magnitude fits exactly: in 8 bits as +-127; in 4
    bits as -8, whose sign the scale takes over, since the range -8..7 has one step more below zero.

    Source: the operator MatMulNBits of ONNX Runtime (com.microsoft), without its zero_points input; in 4 bits
    the rounding is that of Q4_0 in llama.cpp.
    """
    parts = [_quantize(weight[i : i + _ROWS], scheme) for i in range(0, len(weight), _ROWS)]
    return Blocks(
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
    )


def _quantize(weight: FloatArray, scheme: Scheme) -> Blocks:
    num_outputs, num_inputs = weight.shape
    num_blocks = -(-num_inputs // scheme.block_size)
    padded = np.pad(weight, ((0, 0), (0, num_blocks * scheme.block_size - num_inputs)))
    blocks = padded.reshape(num_outputs, num_blocks, scheme.block_size)
    scales = _scales(blocks, bits=scheme.bits)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(scales) > _NOTHING)
    middle = 1 << (scheme.bits - 1)
    rounded = np.rint(blocks * inverse[..., None]) + middle
    values = np.minimum(rounded, 2 * middle - 1).astype(np.uint8)
    if scheme.bits == 4:
        values = values[..., 0::2] | (values[..., 1::2] << 4)
    return Blocks(values=values, scales=scales)


def _scales(blocks: FloatArray, *, bits: int) -> FloatArray:
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    if bits == 8:
        magnitude: FloatArray = np.maximum(-low, high) / np.float32(127)
        return magnitude
    signed: FloatArray = np.where(-low > high, low, high) / np.float32(-8)
    return signed
