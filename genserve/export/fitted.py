"""Fitted weights: 4 bits for each number, with scales that lose as little as possible.

32 inputs of an output share a scale and a minimum in fp16: the blocks Q4_1 and Q5_1 of GGUF. For several
steps of the grid the numbers are rounded, and the scale and the minimum that fit these codes best follow from
weighted least squares; the best of all is kept. An error counts by the mean square of its input, which the
source shows over the calibration text, since that is what it adds to the mean square of the output.

Some matrices matter more than others: as in llama.cpp's Q4_K_M, the values and the down-projections of the
first and the last eighth of the layers, and of every third one between, get another bit. The embedding and
the head get 8.

Source: make_qkx3_quants in ggml-quants.c and use_more_bits in llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from genserve.export.checkpoints.checkpoint import StoredRows
from genserve.export.checkpoints.rows import Rows
from genserve.export.checkpoints.stored_weight import rounded
from genserve.export.decoder_weights import DecoderWeights, is_matrix
from genserve.export.quantization import norm_of_reader
from genserve.machine import num_cores
from genserve.sampling.logits_array import FloatArray

_BLOCK = 32                     # inputs that share a scale
_CHUNK = 2048                   # blocks that are fitted together, to fit into a processor's cache
_STEPS = np.linspace(0.85, 1.15, 9, dtype=np.float32)   # of the grid, relative to that from end to end


def fit_weights(
    weights: DecoderWeights, activations: Mapping[str, FloatArray], *, num_layers: int
) -> DecoderWeights:
    """Return the same weights, of which `stored` has fitted blocks.

    `activations` has the root mean square [hidden] of the outputs of norms, by role without .weight. Inputs
    of other linear layers count equally.
    """

    def stored(role: str) -> StoredRows | None:
        if not is_matrix(role):
            return None
        rows = weights.rows(role)
        if rows.shape[1] % _BLOCK:
            return None
        if not role.startswith("layers."):
            return weights.stored(role) or rounded(rows)
        seen = activations.get(norm_of_reader(role.removesuffix(".weight")))
        return _fitted(rows, bits=_bits(role, num_layers), importance=_importance(seen))

    return replace(weights, stored=stored)


def _bits(role: str, num_layers: int) -> int:
    layer, eighth = int(role.split(".")[1]), num_layers // 8
    is_important = layer < eighth or layer >= num_layers - eighth or (layer - eighth) % 3 == 2
    return 5 if is_important and role.endswith((".attention.value.weight", ".mlp.down.weight")) else 4


def _importance(seen: FloatArray | None) -> FloatArray | None:
    if seen is None or not seen.any():
        return None
    squares = np.square(seen)
    importance: FloatArray = squares + squares.mean() * np.float32(1e-3)   # unused channels count too
    return importance


def _fitted(weight: Rows[np.float32], *, bits: int, importance: FloatArray | None) -> StoredRows:
    outputs, inputs = weight.shape
    of_block = (np.ones(inputs, np.float32) if importance is None else importance).reshape(-1, _BLOCK)
    kind, block_bytes = {4: ("Q4_1", 20), 5: ("Q5_1", 24)}[bits]

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        blocks = weight.read(start, stop).reshape(-1, _BLOCK)
        chunks = [
            (blocks[first : first + _CHUNK], np.arange(first, min(first + _CHUNK, len(blocks))))
            for first in range(0, len(blocks), _CHUNK)
        ]
        with ThreadPoolExecutor(num_cores()) as threads:
            fit = partial(_fitted_blocks, of_block=of_block, bits=bits)
            parts = [*threads.map(lambda chunk: fit(*chunk), chunks)]
        return np.concatenate(parts).reshape(stop - start, -1)

    rows = Rows((outputs, inputs // _BLOCK * block_bytes), read)
    return StoredRows(kind=kind, rows=rows, inputs=inputs)


def _fitted_blocks(
    values: FloatArray, numbers: NDArray[np.int64], *, of_block: FloatArray, bits: int
) -> NDArray[np.uint8]:
    """Return blocks [n, bytes] of the values [n, 32], which are the blocks `numbers` of their matrix."""
    # Blocks are columns, so that all of them are added up at once.
    columns = np.ascontiguousarray(values.T)
    importance = np.ascontiguousarray(of_block[numbers % len(of_block)].T)
    halves = np.stack(_fit(columns, importance, largest=(1 << bits) - 1)).astype(np.float16)
    scale, minimum = halves.astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.rint((columns - minimum) * inverse).clip(0, (1 << bits) - 1).astype(np.uint8).T
    nibbles = codes[:, :16] & 15 | codes[:, 16:] << np.uint8(4)
    fifth = [np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")] if bits == 5 else []
    return np.concatenate([np.ascontiguousarray(halves.T).view(np.uint8), *fifth, nibbles], axis=1)


def _fit(values: FloatArray, importance: FloatArray, *, largest: int) -> tuple[FloatArray, FloatArray]:
    """Return the scales and the minimums [n] of codes from 0 to `largest` for values [32, n]."""
    low, high = values.min(axis=0), values.max(axis=0)
    best_scale, best_minimum, least = np.zeros_like(low), low.copy(), np.full_like(low, np.inf)
    shifted, width = values - low, np.where(high > low, high - low, 1)
    weight, weighted = importance.sum(axis=0), (importance * values).sum(axis=0)
    for step in _STEPS:
        codes = shifted * (largest * step / width)
        np.rint(codes, out=codes).clip(0, largest, out=codes)
        counted = importance * codes
        first, product = counted.sum(axis=0), (counted * values).sum(axis=0)
        second = np.multiply(counted, codes, out=counted).sum(axis=0)
        determinant = weight * second - first * first
        good = determinant > 0
        divisor = np.where(good, determinant, 1)
        scale = np.where(good, (weight * product - weighted * first) / divisor, 0)
        minimum = np.where(good, (second * weighted - first * product) / divisor, weighted / weight)
        # The squared error, without the sum of the squares of the values.
        error = -scale * product - minimum * weighted
        better = error < least
        for kept, found in ((least, error), (best_scale, scale), (best_minimum, minimum)):
            np.copyto(kept, found, where=better)
    return best_scale, best_minimum
