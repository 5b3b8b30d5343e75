"""Quantization: the number formats of an exported graph, and SmoothQuant, which reduces what they lose.

After a norm, some channels are always much larger than all others. If a row is rounded on the scale of its
largest value, the small channels keep few steps. Dividing the norm's weight by a factor per channel, and
multiplying the weights of the layers that read it by the same factor, does not change the output of the
model.

Source: Xiao et al., "SmoothQuant" (2023), with a strength of one half. The activations are measured by their
root mean square instead of the largest value, which depends on a few tokens (SmolLM2-135M: a divergence of
0.015 instead of 0.018).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.export_options import CacheType, ExportFormat, Precision
from genserve.kernels.packing import WeightFormat
from genserve.sampling.logits_array import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """The number formats of one precision; weight format None: weights have the type of the activations.

    "int8" has one scale per row of activations. One scale suffices after a norm, where `smooth` balances the
    channels. It does not for the inner layers, whose inputs are heavy-tailed and cannot be smoothed.
    """

    activations: type[np.float32] | type[np.float16] = np.float32
    kv_cache: type[np.float32] | type[np.float16] = np.float16
    normed: WeightFormat | None = None      # for linear layers that read a norm
    inner: WeightFormat | None = None       # for linear layers that read attention or the inside of an MLP
    head: WeightFormat | None = None
    embedding: WeightFormat | None = None
    # Whether weights are in blocks: those of a quantized checkpoint, or those of `fitted.py`.
    blocks: Literal["stored", "fitted"] | None = None


SCHEMES: Mapping[Precision, QuantizationScheme] = MappingProxyType(
    {
        "fp32": QuantizationScheme(kv_cache=np.float32),
        "fp16": QuantizationScheme(activations=np.float16),
        "int8": QuantizationScheme(normed="int8", inner="int8_block", head="int8", embedding="int8_block"),
        # The formats of these are for weights that no block of 32 inputs can hold.
        "int4": QuantizationScheme(
            normed="int4_block", inner="int4_block", head="int8_block", embedding="int8_block",
            blocks="fitted",
        ),
        "source": QuantizationScheme(
            normed="int8_block", inner="int8_block", head="int8_block", embedding="int8_block",
            blocks="stored",
        ),
    }
)


def scheme_of(precision: Precision, *, is_tied: bool) -> QuantizationScheme:
    """Return the number formats of a precision; a tied head has that of the embedding that reads its panels.

    So it is not smoothed. In blocks it loses less than with smoothing and one scale per row (SmolLM2-135M: a
    divergence of 0.0075 instead of 0.0106), and takes 1.1 times the time for 8 and more rows.
    """
    scheme = SCHEMES[precision]
    return replace(scheme, head=scheme.embedding) if is_tied and scheme.embedding else scheme


# The precisions of each format, the default first.
_KNOWN: Mapping[ExportFormat, tuple[Precision, ...]] = MappingProxyType(
    {
        ExportFormat.ONNX: get_args(Precision),
        ExportFormat.TORCHSCRIPT: ("fp32", "fp16"),
        ExportFormat.TRACED: ("fp32",),
    }
)


def resolve_precision(
    requested: Precision | None, export_format: ExportFormat, checkpoint: Checkpoint | None = None
) -> Precision:
    """Return the requested precision; None: the default of the format and the checkpoint.

    Raises:
        ExportError: the format does not support this precision, or the checkpoint has no weights in formats
            that the kernels execute.
    """
    known = _KNOWN[export_format]
    if requested is None and "source" in known and checkpoint is not None and checkpoint.prefers_source:
        return "source"
    if requested == "source" and "source" in known and not (checkpoint and checkpoint.is_quantized):
        raise ExportError(
            "the precision 'source' keeps the formats of a quantized checkpoint; this one is not quantized, "
            "or in floats or blocks that are always rounded again",
            remedy=f"leave --precision out, or write one of: {', '.join(known[:-1])}",
        )
    if requested is not None and requested not in known:
        raise ExportError(
            f"{export_format.label} does not support the precision {requested!r}",
            remedy=f"known: {', '.join(known)}",
        )
    return requested or known[0]


def require_cache(requested: CacheType, export_format: ExportFormat) -> None:
    """Reject an int8 KV cache in any format but ONNX graphs of known families.

    Raises:
        ExportError: the format does not support this cache type.
    """
    if requested == "int8" and export_format is not ExportFormat.ONNX:
        raise ExportError(
            f"{export_format.label} does not support a KV cache in int8",
            remedy="leave --kv-cache out; ONNX graphs of known architectures support it",
        )


def cache_dtype(kv_cache: CacheType, precision: Precision) -> type[np.generic]:
    """Return the type of keys and values in the KV cache of an ONNX graph."""
    return np.int8 if kv_cache == "int8" else SCHEMES[precision].kv_cache


_SMALL = 1 << 25    # numbers of a weight that is kept between the two times that it is needed

_READERS = {
    "attention.norm": (
        "attention.query", "attention.key", "attention.value", "attention.gate",
        "attention.latent_query", "attention.query_a", "attention.latent",
    ),
    "mixer.norm": (
        "mixer.input", "mixer.query", "mixer.key", "mixer.value", "mixer.gate", "mixer.step", "mixer.beta"
    ),
    "mlp.norm": ("mlp.gate", "mlp.up"),
    "norm": ("head",),
}


def smooth(weights: DecoderWeights, activations: Mapping[str, FloatArray]) -> DecoderWeights:
    """Return equivalent weights, in which the norms with known activations are smoothed.

    `activations` has the root mean square [hidden] of each norm's output, by role without .weight.
    """
    norm_of = {reader: norm for norm in activations for reader in _readers(norm)}
    read: dict[str, FloatArray] = {}    # small weights that were read for the factors, until their first use

    @cache
    def factors(norm: str) -> FloatArray:
        roles = [f"{reader}.weight" for reader in _readers(norm)]
        largest = np.max([largest_of(role) for role in roles if role in weights.roles], axis=0)
        return _factors(activations[norm], largest)

    def largest_of(role: str) -> FloatArray:
        rows = weights.rows(role)
        if rows.shape[0] * rows.shape[1] <= _SMALL:
            read[role] = rows.whole()
            rows = Rows.of(read[role])
        largest: FloatArray = np.max([_largest(part) for part in rows.parts()], axis=0)
        return largest

    def rows_of(role: str) -> Rows[np.float32]:
        part, _, _ = role.rpartition(".")
        if part not in norm_of:
            return weights.rows(role)
        scales = factors(norm_of[part])
        rows = Rows.of(read.pop(role)) if role in read else weights.rows(role)
        return rows.mapped(lambda some: some * scales)

    def vector(role: str) -> FloatArray:
        part, _, _ = role.rpartition(".")
        tensor = weights.vector(role)
        return tensor / factors(part) if part in activations else tensor

    return replace(
        weights,
        rows=rows_of,
        vector=vector,
        smoothing=lambda norm: factors(norm) if norm in activations else None,
    )


def is_smoothable(role: str) -> bool:
    """Whether a role, without .weight, is a norm that only linear layers read."""
    return _kind(role) in _READERS


def norm_of_reader(role: str) -> str:
    """Return the role of the norm that a linear layer reads, without .weight; "": it reads none."""
    kind = _kind(role)
    norm = next((norm for norm, readers in _READERS.items() if kind in readers), "")
    return f"{role.removesuffix(kind)}{norm}" if norm else ""


def _kind(role: str) -> str:
    return ".".join(role.split(".")[-2:])


def _readers(norm: str) -> list[str]:
    """Return the roles of the linear layers that read a norm: gate and up for `layers.3.mlp.norm`."""
    kind = _kind(norm)
    return [f"{norm.removesuffix(kind)}{reader}" for reader in _READERS[kind]]


def _largest(weight: FloatArray) -> FloatArray:
    """Return the largest magnitude in each column."""
    largest: FloatArray = np.maximum(weight.max(axis=0), -weight.min(axis=0))
    return largest


def _factors(activations: FloatArray, weights: FloatArray) -> FloatArray:
    """sqrt(activations / weights) per channel, scaled to a geometric mean of 1; 1 where either is zero."""
    known = (activations > 0) & (weights > 0)
    logarithms = np.zeros_like(activations)
    logarithms[known] = np.log(activations[known] / weights[known]) / 2
    if known.any():
        logarithms[known] -= logarithms[known].mean()
    return np.exp(logarithms)
