"""Blocks: packs weights of checkpoints into panels of `genserve.Linear`, with their numbers as they are.

A checkpoint in GGUF stores a weight [N, K] as N rows of blocks of 32 or 256 inputs. A panel has the same
codes, scales and minimums of 32 outputs, in the order in which the kernels read them (see `blocks.hpp`):
repacking moves numbers, and rounds none. Q4_0 and Q5_0 have no minimum, but an offset of codes; -8 and -16
times the scale are their minimums, which fp16 holds exactly.

Q4Z_32, Q4Z_64 and Q4Z_128 are ours, for the groups of AWQ, GPTQ and compressed-tensors: a scale and a zero
point in fp16, and the codes of so many inputs in 4 bits, of each 32 the first 16 in the low halves. A weight
is (code - zero) * scale. The product zero * scale, of up to 16 bits, would not be a minimum in fp16.

Source: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genserve.kernels.packing import PANEL

Bytes = NDArray[np.uint8]

_CHUNK = 32         # panels that are packed together


class Unpacked(NamedTuple):
    """The numbers of rows [N, K], as a format stores them."""

    codes: Bytes                            # [N, K], as the kernels store them
    scales: Sequence[NDArray[Any]]          # [N, blocks] or [N, blocks, 2] each, for every 32 inputs
    heads: Sequence[NDArray[np.float16]]    # [N, heads] each, for every 256 inputs or a group; or none


class BlockFormat(NamedTuple):
    """How blocks of a file become a weight format of the kernels."""

    name: str                               # the kernels' name
    bits: int
    block: int                              # inputs of a block
    bytes: int                              # of a block
    unpack: Callable[[Bytes], Unpacked]     # from blocks [N, blocks, bytes]


def pack_blocks(rows: Bytes, kind: str, *, gated: bool = False) -> Bytes:
    """Pack the rows of a weight in blocks into panels.

    Args:
        rows: [N, bytes of a row].
        kind: the type of the rows, one of `BLOCK_FORMATS`.
        gated: whether the rows are I gates followed by the I values that they scale.

    Returns:
        [bytes]: the panels, the last one padded with zeros.

    Raises:
        ValueError: a scale is too large for the kernels' format: the file is broken.
    """
    known = BLOCK_FORMATS[kind]
    if gated:
        rows = _paired(rows)
    step = _CHUNK * PANEL
    return np.concatenate([_pack(rows[i : i + step], known) for i in range(0, len(rows), step)])


def _paired(rows: Bytes) -> Bytes:
    """Reorder the rows of I gates and I values: 16 gates, their 16 values, and so on, padded with zeros."""
    count, width = len(rows) // 2, PANEL // 2
    panels = np.zeros((-(-count // width), 2, width, rows.shape[1]), np.uint8)
    for i, part in enumerate((rows[:count], rows[count:])):
        padded = np.zeros((len(panels) * width, rows.shape[1]), np.uint8)
        padded[:count] = part
        panels[:, i] = padded.reshape(len(panels), width, -1)
    return panels.reshape(-1, rows.shape[1])


def _pack(rows: Bytes, known: BlockFormat) -> Bytes:
    if missing := -len(rows) % PANEL:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)])
    with np.errstate(over="ignore", invalid="ignore"):
        unpacked = known.unpack(rows.reshape(len(rows), -1, known.bytes))
    if not all(np.isfinite(values).all() for values in (*unpacked.scales, *unpacked.heads)):
        raise ValueError("a scale is not finite, or too large")
    codes = unpacked.codes.reshape(-1, PANEL, unpacked.codes.shape[1] // 32, 32)     # [P, 32, blocks, 32]
    parts = [_by_block(values) for values in unpacked.scales] + _code_bytes(codes, known.bits)
    blocks = np.concatenate(parts, axis=2)                                          # [P, blocks, bytes]
    if unpacked.heads:
        heads = np.concatenate([_by_block(values) for values in unpacked.heads], axis=2)
        blocks = np.concatenate([heads, blocks.reshape(*heads.shape[:2], -1)], axis=2)
    return blocks.reshape(-1)


def _by_block(values: NDArray[Any]) -> Bytes:
    """Reorder numbers of each output and block, [N, blocks] or [N, blocks, 2]: [P, blocks, bytes]."""
    panels = values.reshape(-1, PANEL, values.shape[1], *values.shape[2:])
    in_order = np.ascontiguousarray(panels.transpose(0, 2, *range(3, panels.ndim), 1))
    return in_order.view(np.uint8).reshape(len(panels), values.shape[1], -1)


def _code_bytes(codes: Bytes, bits: int) -> list[Bytes]:
    """The codes [P, 32, blocks, 32] in the order of the kernels: [P, blocks, bytes] each."""
    count, _, blocks, _ = codes.shape
    fours = codes.reshape(count, PANEL, blocks, 8, 4)

    def in_order(steps: Bytes) -> Bytes:    # [P, 32, blocks, steps, 4]
        return np.ascontiguousarray(steps.transpose(0, 2, 3, 1, 4)).reshape(count, blocks, -1)

    if bits == 8:
        return [in_order(fours)]
    low = fours & np.uint8(15)
    parts = [in_order(low[:, :, :, 0::2] | low[:, :, :, 1::2] << np.uint8(4))]
    if bits > 4:
        steps, width = (8, 1) if bits == 5 else (4, 2)      # of one plane of upper bits
        upper = (fours >> 4).reshape(count, PANEL, blocks, -1, steps, 4)
        shifts = (width * np.arange(steps, dtype=np.uint8)).reshape(-1, 1)
        parts.append(in_order(np.bitwise_or.reduce(upper << shifts, axis=4)))
    return parts


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The fp16 at a byte of each block: [N, blocks]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _nibbles(codes: Bytes) -> Bytes:
    """Codes of 32 inputs, [..., 16], the first 16 inputs in the low halves: [..., 32]."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _flat(codes: Bytes) -> Bytes:
    return codes.reshape(len(codes), -1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The fifth bits of 32 inputs, of which 4 bytes have a bit each: [N, blocks, 32], 0 or 16."""
    return np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Unpacked:
    scale = _half(blocks, 0)
    return Unpacked(_flat(_nibbles(blocks[:, :, 2:])), [scale, scale * np.float16(-8)], [])


def _q4_1(blocks: Bytes) -> Unpacked:
    return Unpacked(_flat(_nibbles(blocks[:, :, 4:])), [_half(blocks, 0), _half(blocks, 2)], [])


def _q5_0(blocks: Bytes) -> Unpacked:
    scale = _half(blocks, 0)
    codes = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks, 2)
    return Unpacked(_flat(codes), [scale, scale * np.float16(-16)], [])


def _q5_1(blocks: Bytes) -> Unpacked:
    codes = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks, 4)
    return Unpacked(_flat(codes), [_half(blocks, 0), _half(blocks, 2)], [])


def _q8_0(blocks: Bytes) -> Unpacked:
    return Unpacked(_flat(blocks[:, :, 2:] ^ np.uint8(128)), [_half(blocks, 0)], [])


def _six_bit_scales(packed: Bytes) -> list[Bytes]:
    """The scales and minimums of 8 blocks in 12 bytes, [N, S, 12]: [N, S * 8] each."""
    first, second, third = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=2)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=2)
    return [_flat(scales), _flat(minimums)]


def _k_nibbles(codes: Bytes) -> Bytes:
    """Codes of 256 inputs, [N, S, 128], of each 64 the first 32 in the low halves: [N, S, 8, 32]."""
    quarters = codes.reshape(*codes.shape[:2], 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=3).reshape(*codes.shape[:2], 8, 32)


def _q4_k(blocks: Bytes) -> Unpacked:
    codes = _flat(_k_nibbles(blocks[:, :, 16:]))
    return Unpacked(codes, _six_bit_scales(blocks[:, :, 4:16]), [_half(blocks, 0), -_half(blocks, 2)])


def _q5_k(blocks: Bytes) -> Unpacked:
    upper = blocks[:, :, np.newaxis, 16:48] >> np.arange(8, dtype=np.uint8).reshape(8, 1) & np.uint8(1)
    codes = _flat(_k_nibbles(blocks[:, :, 48:]) | upper << np.uint8(4))
    return Unpacked(codes, _six_bit_scales(blocks[:, :, 4:16]), [_half(blocks, 0), -_half(blocks, 2)])


def _q6_k(blocks: Bytes) -> Unpacked:
    # Each 128 inputs have 64 bytes of low halves, and 32 bytes of upper bits, two for each 32 inputs.
    low = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 1, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=3)     # [N, S, 2, 2, 2, 32]
    pairs = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    upper = pairs >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & np.uint8(3)
    codes = _flat(low.reshape(*blocks.shape[:2], 2, 4, 32) | upper << np.uint8(4))
    scales = blocks[:, :, 192:208].view(np.int8).reshape(len(blocks), -1, 2)
    return Unpacked(codes, [scales], [_half(blocks, 208)])


def _q4z(blocks: Bytes) -> Unpacked:
    packed = blocks[:, :, 4:].reshape(*blocks.shape[:2], -1, 16)
    return Unpacked(_flat(_nibbles(packed)), [], [_half(blocks, 0), _half(blocks, 2)])


def q4z_rows(codes: Bytes, scales: NDArray[np.float16], zeros: NDArray[np.float16]) -> Bytes:
    """Return the rows of Q4Z_32, Q4Z_64 or Q4Z_128.

    Args:
        codes: [N, K], 0 to 15.
        scales: [N, K / group].
        zeros: the same shape.
    """
    groups = scales.shape[1]
    halves = codes.reshape(len(codes), groups, -1, 2, 16)
    packed = (halves[:, :, :, 0] | halves[:, :, :, 1] << np.uint8(4)).reshape(len(codes), groups, -1)
    heads = [np.ascontiguousarray(values)[:, :, np.newaxis].view(np.uint8) for values in (scales, zeros)]
    return np.concatenate([*heads, packed], axis=2).reshape(len(codes), -1)


def q4z_values(rows: Bytes, kind: str) -> NDArray[np.float32]:
    """Return the weights of rows of Q4Z_32, Q4Z_64 or Q4Z_128: [N, K], exact in float32."""
    known = BLOCK_FORMATS[kind]
    codes, _, heads = known.unpack(rows.reshape(len(rows), -1, known.bytes))
    scales, zeros = (np.repeat(values.astype(np.float32), known.block, axis=1) for values in heads)
    return (codes.astype(np.float32) - zeros) * scales


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat("q4", 4, 32, 18, _q4_0),
    "Q4_1": BlockFormat("q4", 4, 32, 20, _q4_1),
    "Q5_0": BlockFormat("q5", 5, 32, 22, _q5_0),
    "Q5_1": BlockFormat("q5", 5, 32, 24, _q5_1),
    "Q8_0": BlockFormat("q8", 8, 32, 34, _q8_0),
    "Q4_K": BlockFormat("q4k", 4, 256, 144, _q4_k),
    "Q5_K": BlockFormat("q5k", 5, 256, 176, _q5_k),
    "Q6_K": BlockFormat("q6k", 6, 256, 210, _q6_k),
    "Q4Z_32": BlockFormat("q4z_32", 4, 32, 20, _q4z),
    "Q4Z_64": BlockFormat("q4z_64", 4, 64, 36, _q4z),
    "Q4Z_128": BlockFormat("q4z_128", 4, 128, 68, _q4z),
}
