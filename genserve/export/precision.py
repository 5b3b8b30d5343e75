"""Precision: in which numbers an exported graph computes, and in which it keeps its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import numpy as np

from genserve.errors import ExportError
from genserve.export.export_options import CacheType, Form, Precision
from genserve.kernels.packing import WeightFormat

__all__ = ["FORMATS", "Format", "cache_numbers", "require_cache", "resolve_precision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The numbers of one precision; a weight format of None keeps weights in the type of the activations."""

    activations: type[np.float32] | type[np.float16] = np.float32
    kv_cache: type[np.float32] | type[np.float16] = np.float16
    # Weights of what reads a norm, of what reads attention or the inside of an MLP, and of the head. "int8"
    # has one scale for a row of activations, which is enough behind a norm, where `smoothing.py` evens the
    # channels out; the others have tails too heavy for it, and nothing that could smooth them.
    normed: WeightFormat | None = None
    inner: WeightFormat | None = None
    head: WeightFormat | None = None
    embedding: WeightFormat | None = None


FORMATS: Mapping[Precision, Format] = MappingProxyType(
    {
        "fp32": Format(kv_cache=np.float32),
        "fp16": Format(activations=np.float16),
        "int8": Format(normed="int8", inner="int8_block", head="int8", embedding="int8_block"),
        # The head in 8 bits: in 4 the perplexity is another 7 % higher (SmolLM2-135M).
        "int4": Format(normed="int4_block", inner="int4_block", head="int8", embedding="int8_block"),
    }
)

# What each form can be written in; the first, if nothing else is asked for.
_KNOWN: Mapping[Form, tuple[Precision, ...]] = MappingProxyType(
    {Form.ONNX: get_args(Precision), Form.TORCHSCRIPT: ("fp32", "fp16"), Form.TRACED: ("fp32",)}
)


def resolve_precision(asked: Precision | None, form: Form) -> Precision:
    """The precision that is asked for; None: the usual one of the form.

    Raises:
        ExportError: the form has no such precision.
    """
    known = _KNOWN[form]
    if asked is not None and asked not in known:
        raise ExportError(
            f"{asked!r} is no precision of {form.words}", remedy=f"known: {', '.join(known)}"
        )
    return asked or known[0]


def require_cache(asked: CacheType, form: Form) -> None:
    """Refuse a KV cache that a form cannot have.

    Raises:
        ExportError: it is in int8, and the form has none in place.
    """
    if asked == "int8" and form is not Form.ONNX:
        raise ExportError(
            f"{form.words} has no KV cache in int8",
            remedy="leave --kv-cache out; an ONNX graph of a known architecture has one",
        )


def cache_numbers(kv_cache: CacheType, precision: Precision) -> type[np.generic]:
    """The type of the keys and values in the KV cache of an ONNX graph."""
    return np.int8 if kv_cache == "int8" else FORMATS[precision].kv_cache
