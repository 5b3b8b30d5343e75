"""Pipeline stages: divides the layers of a decoder among the stages of a pipeline."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import numpy as np

from genserve.errors import ExportError
from genserve.export.decoder import Decoder
from genserve.export.decoder_weights import DecoderWeights, is_matrix
from genserve.export.export_options import ExportFormat
from genserve.export.quantization import QuantizationScheme
from genserve.kernels.packing import BLOCKS, WeightFormat

_SCALE_BYTES = 4
_LATENT_INNER = (".query_b.weight", ".latent_key.weight", ".latent_value.weight")
_WEIGHT_BYTES: dict[WeightFormat, float] = {"int8": 1, "int8_block": 1, "int4_block": 0.5}


def require_stages(
    num_stages: int, export_format: ExportFormat, *, decoder: Decoder | None = None
) -> None:
    """Reject more pipeline stages than layers, or any format but ONNX graphs of known families.

    `decoder` is None for a graph that no family describes.

    Raises:
        ExportError: the model cannot be cut into this number of stages.
    """
    if num_stages > 1 and export_format is not ExportFormat.ONNX:
        raise ExportError(
            f"{export_format.label} cannot be cut into pipeline stages",
            remedy="leave --pipeline-stages out; ONNX graphs of known architectures support it",
        )
    if num_stages == 1 or decoder is None:
        return
    if decoder.shares_caches or decoder.per_layer is not None:
        raise ExportError(
            "its layers share caches or embeddings, which a pipeline would have in different stages",
            remedy="leave --pipeline-stages out",
        )
    num_layers = len(decoder.layers)
    if num_stages > num_layers:
        raise ExportError(
            f"a pipeline of {num_stages} stages needs as many layers, and the model has {num_layers}",
            remedy=f"write --pipeline-stages {num_layers}, or fewer",
        )


def split_layers(
    weights: DecoderWeights, decoder: Decoder, *, scheme: QuantizationScheme, num_stages: int
) -> tuple[range, ...]:
    """Return the layers of each stage, so that the largest number of weights that a stage reads is minimal.

    The last stage also reads the head, which is as large as several layers. The embedding does not count,
    since a step reads few of its rows.

    Args:
        weights: the weights of the whole decoder.
        decoder: the sizes and options of the decoder.
        scheme: the number formats in the graph.
        num_stages: the number of stages, at most the number of layers.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    num_layers = len(decoder.layers)
    if num_stages == 1:
        return (range(num_layers),)
    firsts = [decoder.layers.index(layer) for layer in decoder.layers]    # equal layers have the same shapes
    bytes_of = {first: _layer_bytes(weights, first, scheme=scheme) for first in set(firsts)}
    sizes = [bytes_of[first] for first in firsts]
    sizes[-1] += _read_bytes(weights, "head.weight", scheme=scheme)
    sums = [0.0, *accumulate(sizes)]

    @cache
    def split(stop: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest stage, and the first layers of the stages of the layers before `stop`."""
        if stages == 1:
            return sums[stop], (0,)
        options = []
        for start in range(stages - 1, stop):
            largest, starts = split(start, stages - 1)
            options.append((max(largest, sums[stop] - sums[start]), (*starts, start)))
        return min(options)

    _, starts = split(num_layers, num_stages)
    return tuple(map(range, starts, (*starts[1:], num_layers)))


def _layer_bytes(weights: DecoderWeights, index: int, *, scheme: QuantizationScheme) -> float:
    roles = (role for role in weights.roles if role.startswith(f"layers.{index}."))
    return sum(_read_bytes(weights, role, scheme=scheme) for role in roles)


def _read_bytes(weights: DecoderWeights, role: str, *, scheme: QuantizationScheme) -> float:
    """Return the bytes of a weight or a bias in the graph's number format."""
    if scheme.blocks and (stored := weights.stored(role)) is not None:
        return float(stored.nbytes)
    if not is_matrix(role):
        return float(weights.load(role).size * np.dtype(scheme.activations).itemsize)
    num_outputs, num_inputs = weights.rows(role).shape
    size, weight_format = num_outputs * num_inputs, _format(role, scheme)
    if weight_format is None:
        return float(size * np.dtype(scheme.activations).itemsize)
    return size * _WEIGHT_BYTES[weight_format] + size / (BLOCKS[weight_format] or num_inputs) * _SCALE_BYTES


def _format(role: str, scheme: QuantizationScheme) -> WeightFormat | None:
    if role == "head.weight":
        return scheme.head
    if role.endswith((".router.weight", ".shared.score.weight")):
        return None
    is_inner = role.endswith((".output.weight", ".down.weight", *_LATENT_INNER)) or ".mlp.experts." in role
    return scheme.inner if is_inner or ".mlp.shared." in role else scheme.normed
