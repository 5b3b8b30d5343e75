"""Quantization: the number formats of an exported graph, and SmoothQuant, after which they lose less.

After a norm, some channels are always much larger than the others, which keep few steps when a row is rounded
by its largest values. Dividing the norm's weight by a factor per channel, and multiplying the inputs of its
readers by the same factor, does not change the output of the model.

Source: Xiao et al., "SmoothQuant" (2023), with a strength of one half. The activations are measured by their
root mean square instead of the largest value, which depends on a few tokens (SmolLM2-135M: a divergence of
0.015 instead of 0.018).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import get_args

import numpy as np

from genserve.errors import ExportError
from genserve.export.decoder_weights import DecoderWeights
from genserve.export.export_options import CacheType, ExportFormat, Precision
from genserve.kernels.packing import WeightFormat
from genserve.sampling.logits_array import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """The number formats of one precision; a weight format of None: weights have the activations' type.

    "int8" has one scale per row of activations. This suffices after a norm, where `smooth` balances the
    channels. The inputs of the inner layers are too heavy-tailed for it, and nothing can smooth them.
    """

    activations: type[np.float32] | type[np.float16] = np.float32
    kv_cache: type[np.float32] | type[np.float16] = np.float16
    normed: WeightFormat | None = None      # of linear layers that read a norm
    inner: WeightFormat | None = None       # of layers that read attention or the inside of an MLP
    head: WeightFormat | None = None
    embedding: WeightFormat | None = None


SCHEMES: Mapping[Precision, QuantizationScheme] = MappingProxyType(
    {
        "fp32": QuantizationScheme(kv_cache=np.float32),
        "fp16": QuantizationScheme(activations=np.float16),
        "int8": QuantizationScheme(normed="int8", inner="int8_block", head="int8", embedding="int8_block"),
        # The head in 8 bits: 4 bits raise the perplexity by another 7 % (SmolLM2-135M).
        "int4": QuantizationScheme(
            normed="int4_block", inner="int4_block", head="int8", embedding="int8_block"
        ),
    }
)

# The precisions of each format, the default first.
_KNOWN: Mapping[ExportFormat, tuple[Precision, ...]] = MappingProxyType(
    {
        ExportFormat.ONNX: get_args(Precision),
        ExportFormat.TORCHSCRIPT: ("fp32", "fp16"),
        ExportFormat.TRACED: ("fp32",),
    }
)


def resolve_precision(requested: Precision | None, export_format: ExportFormat) -> Precision:
    """Return the requested precision; None: the format's default.

    Raises:
        ExportError: the format does not support this precision.
    """
    known = _KNOWN[export_format]
    if requested is not None and requested not in known:
        raise ExportError(
            f"{export_format.label} does not support the precision {requested!r}",
            remedy=f"known: {', '.join(known)}",
        )
    return requested or known[0]


def require_cache(requested: CacheType, export_format: ExportFormat) -> None:
    """Reject a KV cache in int8 in any format but ONNX graphs of known families.

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


_READERS = {
    "attention.norm": ("attention.query", "attention.key", "attention.value"),
    "mlp.norm": ("mlp.gate", "mlp.up"),
    "norm": ("head",),
}


def smooth(weights: DecoderWeights, activations: Mapping[str, FloatArray]) -> DecoderWeights:
    """Return equivalent weights, in which the norms with known activations are smoothed.

    `activations` are the root mean square [hidden] of the output of norms, by role without .weight.
    """
    norm_of = {reader: norm for norm in activations for reader in _readers(norm)}
    read: dict[str, FloatArray] = {}    # weights whose factors are known, until they are used

    @cache
    def factors(norm: str) -> FloatArray:
        roles = [f"{reader}.weight" for reader in _readers(norm)]
        read.update({role: weights.load(role) for role in roles if role in weights.roles})
        largest = np.max([_largest(read[role]) for role in roles if role in read], axis=0)
        return _factors(activations[norm], largest)

    def load(role: str) -> FloatArray:
        part, _, kind = role.rpartition(".")
        if kind == "weight" and part in norm_of:
            scales = factors(norm_of[part])
            tensor = read.pop(role, None)   # kept for the first use only, since it may be large
            return (weights.load(role) if tensor is None else tensor) * scales
        tensor = weights.load(role)
        if part in activations:
            return tensor / factors(part)
        return tensor

    return replace(weights, load=load)


def is_smoothable(role: str) -> bool:
    """Whether the role, without .weight, is a norm that only linear layers read."""
    return _kind(role) in _READERS


def _kind(role: str) -> str:
    return ".".join(role.split(".")[-2:])


def _readers(norm: str) -> list[str]:
    """Return the roles of the linear layers that read a norm: of `layers.3.mlp.norm`, gate and up there."""
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
