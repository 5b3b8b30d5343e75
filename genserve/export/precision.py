"""Precision: the number formats of an exported graph, its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import numpy as np

from genserve.errors import ExportError
from genserve.export.export_options import CacheType, ExportFormat, Precision
from genserve.kernels.packing import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """The number formats of one precision; a weight format of None: weights have the activations' type.

    "int8" has one scale per row of activations. This suffices after a norm, where `smoothquant.py` balances
    the channels. The inputs of the inner layers are too heavy-tailed for it, and nothing can smooth them.
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
