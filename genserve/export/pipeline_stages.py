"""Pipeline stages: which layers of a decoder each stage of a pipeline has."""

from __future__ import annotations

import numpy as np

from genserve.errors import ExportError
from genserve.export.decoder import Decoder
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.export_options import ExportFormat
from genserve.export.quantization import QuantizationScheme
from genserve.kernels.packing import BLOCKS, WeightFormat

_SCALE_BYTES = 4
_WEIGHT_BYTES: dict[WeightFormat, float] = {"int8": 1, "int8_block": 1, "int4_block": 0.5}


def require_stages(num_stages: int, export_format: ExportFormat, *, num_layers: int) -> None:
    """Reject a pipeline of more stages than layers, or of another format than ONNX graphs of known families.

    Raises:
        ExportError: the model cannot be cut into this number of stages.
    """
    if num_stages > 1 and export_format is not ExportFormat.ONNX:
        raise ExportError(
            f"{export_format.label} cannot be cut into pipeline stages",
            remedy="leave --pipeline-stages out; ONNX graphs of known architectures support it",
        )
    if num_stages > num_layers:
        raise ExportError(
            f"a pipeline of {num_stages} stages needs as many layers, and the model has {num_layers}",
            remedy=f"write --pipeline-stages {num_layers}, or fewer",
        )


def split_layers(
    weights: DecoderWeights, decoder: Decoder, *, scheme: QuantizationScheme, num_stages: int
) -> tuple[range, ...]:
    """Return the layers of each stage. The stage that reads the most weights reads as few as possible.

    The last stage also reads the head, which is as large as several layers. The embedding is not counted: a
    step reads few of its rows.

    Args:
        weights: of the decoder.
        decoder: its description.
        scheme: the number formats in the graph.
        num_stages: at most the number of layers.

    Raises:
        ExportError: the checkpoint lacks a tensor.
    """
    num_layers = len(decoder.attentions)
    if num_stages == 1:
        return (range(num_layers),)
    # All layers have the same shapes.
    layer_bytes = sum(
        _read_bytes(weights, role, scheme=scheme) for role in weights.roles if role.startswith("layers.0.")
    )
    head_bytes = _read_bytes(weights, "head.weight", scheme=scheme)

    def largest(num_last: int) -> float:
        others = -(-(num_layers - num_last) // (num_stages - 1))
        return max(others * layer_bytes, num_last * layer_bytes + head_bytes)

    num_last = min(range(1, num_layers - num_stages + 2), key=largest)
    ends = [(num_layers - num_last) * stage // (num_stages - 1) for stage in range(num_stages)]
    return (*map(range, ends, ends[1:]), range(ends[-1], num_layers))


def _read_bytes(weights: DecoderWeights, role: str, *, scheme: QuantizationScheme) -> float:
    """Return the bytes of a weight or a bias as the graph has it."""
    tensor = weights.load(role)
    weight_format = None if tensor.ndim == 1 else _format(role, scheme)
    if weight_format is None:
        return float(tensor.size * np.dtype(scheme.activations).itemsize)
    num_scales = tensor.size / (BLOCKS[weight_format] or tensor.shape[1])
    return tensor.size * _WEIGHT_BYTES[weight_format] + num_scales * _SCALE_BYTES


def _format(role: str, scheme: QuantizationScheme) -> WeightFormat | None:
    if role == "head.weight":
        return scheme.head
    return scheme.inner if role.endswith((".output.weight", ".down.weight")) else scheme.normed
