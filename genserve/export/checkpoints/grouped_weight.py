"""Grouped weight: integers of a quantizer, with a scale and a zero point for each group of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.export.checkpoints.checkpoint import StoredRows
from genserve.export.checkpoints.rows import Rows
from genserve.kernels.blocks import BLOCK_FORMATS, q4z_rows
from genserve.sampling.logits_array import FloatArray

# The types of rows that hold codes of so many bits, the least bytes first.
_KINDS = {2: ("Q4Z_128", "Q4Z_64", "Q4Z_32"), 5: ("Q5_0",), 8: ("Q8_0",)}
_KINDS[4] = _KINDS[2]
# The only zero point of a type.
_ZERO = {"Q5_0": 16, "Q8_0": 128}
FP4_ZERO = _ZERO["Q5_0"]
# Twice the numbers of E2M1 plus `FP4_ZERO`, by their bits.
FP4_CODES = np.array([16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4], np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [N, K]: (code - zero) * scale.

    The functions return rows from the first up to the second number.
    """

    shape: tuple[int, int]
    bits: int                                               # codes are below 2 ** bits
    groups: NDArray[np.int64]                               # [K]: the group of each input
    codes: Callable[[int, int], NDArray[np.uint8]]          # [rows, K]
    scales: Callable[[int, int], FloatArray]                # [rows, groups]
    zeros: Callable[[int, int], NDArray[np.int64]]          # [rows, groups]

    def read(self, start: int, stop: int) -> FloatArray:
        """Return rows as floats."""
        scales, zeros = self.scales(start, stop), self.zeros(start, stop).astype(np.float32)
        values = self.codes(start, stop).astype(np.float32)
        values -= zeros[:, self.groups]
        values *= scales[:, self.groups]
        return values

    def stored(self) -> StoredRows | None:
        """Return the codes in blocks that the kernels execute; None: no block can hold them.

        The scales become fp16, which is exact unless they are float32 or very small. Inputs whose groups are
        mixed, as GPTQ leaves them with `desc_act`, are put into an order in which groups are contiguous.
        """
        outputs, inputs = self.shape
        order = np.argsort(self.groups, kind="stable")
        in_order = self.groups[order]
        kind = next((kind for kind in _KINDS.get(self.bits, ()) if _fits(kind, in_order)), None)
        if kind is None:
            return None
        zero = _ZERO.get(kind)
        scales = self.scales(0, outputs)
        halves = _half(scales)
        if not np.isfinite(halves).all() or (zero is not None and (self.zeros(0, outputs) != zero).any()):
            return None
        known = BLOCK_FORMATS[kind]
        of_block = in_order[:: known.block]
        is_sorted = np.array_equal(order, np.arange(inputs))

        def read(start: int, stop: int) -> NDArray[np.uint8]:
            codes, scales = self.codes(start, stop), _half(self.scales(start, stop))[:, of_block]
            zeros = self.zeros(start, stop)[:, of_block].astype(np.float16)
            return _rows(kind, codes if is_sorted else codes[:, order], scales, zeros)

        return StoredRows(
            kind=kind,
            rows=Rows((outputs, inputs // known.block * known.bytes), read),
            inputs=inputs,
            order=None if is_sorted else order.astype(np.int32),
            is_exact=bool((halves == scales).all()),
        )


def half_powers(exponents: NDArray[np.uint8]) -> FloatArray:
    """Return half the scales of MXFP4, which are powers of two (E8M0)."""
    powers: FloatArray = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return powers


def _fits(kind: str, groups: NDArray[np.int64]) -> bool:
    """Whether each block of a type has inputs of one group."""
    block = BLOCK_FORMATS[kind].block
    if len(groups) % block:
        return False
    blocks = groups.reshape(-1, block)
    return bool((blocks == blocks[:, :1]).all())


def _half(scales: FloatArray) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return scales.astype(np.float16)


def _rows(
    kind: str, codes: NDArray[np.uint8], scales: NDArray[np.float16], zeros: NDArray[np.float16]
) -> NDArray[np.uint8]:
    """Return rows of a type: codes [N, K], scales and zero points [N, blocks]."""
    if kind.startswith("Q4Z"):
        return q4z_rows(codes, scales, zeros)
    blocks = codes.reshape(len(codes), -1, 32)
    parts = [np.ascontiguousarray(scales)[:, :, np.newaxis].view(np.uint8)]
    if kind == "Q8_0":
        parts.append(blocks ^ np.uint8(128))    # signed, in two's complement
    else:
        parts.append(np.packbits(blocks >> 4, axis=2, bitorder="little"))
        parts.append((blocks[:, :, :16] & np.uint8(15)) | (blocks[:, :, 16:] << np.uint8(4)))
    return np.concatenate(parts, axis=2).reshape(len(codes), -1)
