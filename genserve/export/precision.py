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

__all__ = ["FORMATS", "Format", "cache_numbers", "require_cache", "resolve_precision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The numbers of one precision; a scheme of None keeps the weights in the type of the activations."""

    activations: type[np.float32] | type[np.float16] = np.float32  # of a float KV cache too
    linear: Scheme | None = None                                   # the layers' weights
    vocabulary: Scheme | None = None                               # the embedding and the head
    # What reads a norm multiplies integers: each row of activations is rounded by its own largest, each
    # output of the weight by its own. What reads the inside of an MLP, whose tails are too heavy for one
    # scale per row, keeps the scheme `linear`, and so does what reads the attention's heads: nothing smooths
    # them, and the product is small beside the operators that would round a row.
    by_row: bool = False


_INT8 = Scheme(bits=8, block_size=64)

FORMATS: Mapping[Precision, Format] = MappingProxyType(
    {
        "fp32": Format(),
        "fp16": Format(activations=np.float16),
        "int8": Format(linear=_INT8, vocabulary=_INT8, by_row=True),
        # The head in 8 bits: perplexity x1.24 of fp32 where 4 bits have x1.33 (SmolLM2-135M), for 2 % of the
        # speed with 32 rows and 20 % with one.
        "int4": Format(linear=Scheme(bits=4, block_size=32), vocabulary=_INT8),
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
    """The type of the keys and values in a KV cache."""
    return np.int8 if kv_cache == "int8" else FORMATS[precision].activations
