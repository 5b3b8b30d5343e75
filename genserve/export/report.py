"""Report: what an export was asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["CacheType", "ExportReport", "FileFormat", "Precision"]

Precision = Literal["int8", "int4", "fp16", "fp32"]
CacheType = Literal["float", "int8"]            # of the KV cache; float: fp16, of an fp32 export fp32
FileFormat = Literal["onnx", "torchscript"]     # of the logits stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """One model, exported, checked against its source, and installed."""

    name: str
    precision: Precision
    kv_cache: CacheType = "float"
    seconds: float
    largest_logit_difference: float  # over all compared logits, absolute
    top1_agreement: float            # share of positions where both models rank the same token first
    perplexity_ratio: float          # of a fixed text: the export's over the source's
    divergence: float                # Kullback-Leibler, from the source: nats per token
    size_bytes: int                  # the graph and its weights
    path: Path                       # the ensemble's folder
