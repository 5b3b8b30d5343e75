"""Quantise: weights as small integers, with one scale per output or per block of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from genserve.export.checkpoint import FloatArray

__all__ = ["Quantized", "Scheme", "quantize"]

_ROWS = 1024  # at a time: what lies between weight and result takes some times their memory
_NOTHING = np.float32(1e-30)    # what is smaller becomes 0: float32 has no inverse of the smallest numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights become integers; symmetric, 0 is 0."""

    bits: Literal[4, 8]
    block_size: int | None  # inputs that share a scale; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A weight [N, K] in integers; w is about q * scale of its block."""

    values: NDArray[np.int8]    # [N, K]: -127 to 127, or -8 to 7
    scales: FloatArray          # [N, blocks]; the last block may be shorter than the others


def quantize(weight: FloatArray, scheme: Scheme) -> Quantized:
    """Round a weight [N, K] to integers, block by block.

    The entry of largest magnitude fits exactly: in 8 bits as +-127; in 4 bits as -8, whose sign the scale
    takes over, since the range -8..7 has one step more below zero.

    Source: in 4 bits the rounding is that of Q4_0 in llama.cpp.
    """
    parts = [_quantize(weight[i : i + _ROWS], scheme) for i in range(0, len(weight), _ROWS)]
    return Quantized(
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
    )


def _quantize(weight: FloatArray, scheme: Scheme) -> Quantized:
    num_outputs, num_inputs = weight.shape
    block_size = scheme.block_size or num_inputs
    num_blocks = -(-num_inputs // block_size)
    padded = np.pad(weight, ((0, 0), (0, num_blocks * block_size - num_inputs)))
    blocks = padded.reshape(num_outputs, num_blocks, block_size)
    scales = _scales(blocks, bits=scheme.bits)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(scales) > _NOTHING)
    rounded = np.minimum(np.rint(blocks * inverse[..., None]), 2 ** (scheme.bits - 1) - 1)
    return Quantized(
        values=rounded.astype(np.int8).reshape(num_outputs, -1)[:, :num_inputs], scales=scales
    )


def _scales(blocks: FloatArray, *, bits: int) -> FloatArray:
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    if bits == 8:
        magnitude: FloatArray = np.maximum(-low, high) / np.float32(127)
        return magnitude
    signed: FloatArray = np.where(-low > high, low, high) / np.float32(-8)
    return signed
