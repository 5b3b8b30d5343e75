"""Precision: in which numbers an exported graph computes, and in which it keeps its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

import numpy as np

from genserve.errors import ExportError
from genserve.export.form import Form
from genserve.export.quantize import Scheme
from genserve.export.report import CacheType, Precision

__all__ = ["BY_ROW", "FORMATS", "Format", "cache_numbers", "require_cache", "resolve_precision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The numbers of one precision; a scheme of None keeps the weights in the type of the activations."""

    activations: type[np.float32] | type[np.float16] = np.float32
    kv_cache: type[np.float32] | type[np.float16] = np.float16
    embedding: Scheme | None = None     # with blocks
    # Weights of what reads a norm, of what reads attention or the inside of an MLP, and of the head. One
    # scale for a row of activations is enough behind a norm, where `smoothing.py` evens the channels out;
    # the others have tails too heavy for it, and nothing that could smooth them.
    normed: Scheme | None = None
    inner: Scheme | None = None
    head: Scheme | None = None


BY_ROW = Scheme(bits=8, block_size=None)
_INT8_BLOCKS = Scheme(bits=8, block_size=64)
_INT4_BLOCKS = Scheme(bits=4, block_size=32)

FORMATS: Mapping[Precision, Format] = MappingProxyType(
    {
        "fp32": Format(kv_cache=np.float32),
        "fp16": Format(activations=np.float16),
        "int8": Format(embedding=_INT8_BLOCKS, normed=BY_ROW, inner=_INT8_BLOCKS, head=BY_ROW),
        # The head in 8 bits: perplexity x1.24 of fp32 where 4 bits have x1.33 (SmolLM2-135M).
        "int4": Format(embedding=_INT8_BLOCKS, normed=_INT4_BLOCKS, inner=_INT4_BLOCKS, head=BY_ROW),
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
