"""Export options: file format, precision and cache type of an export; its progress, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["CacheType", "ExportReport", "FileFormat", "Form", "Precision", "Progress", "SilentProgress"]


class Form(Enum):
    """The kinds of files, and how each keeps its KV cache."""

    ONNX = "onnx"                   # a graph of ours, its cache written in place
    TORCHSCRIPT = "torchscript"     # a module of ours, the same
    TRACED = "traced"               # what torch exports of transformers' own model; its cache grows by copies

    @property
    def words(self) -> str:
        """What a person calls it."""
        return {"onnx": "an ONNX graph", "torchscript": "TorchScript", "traced": "a traced model"}[self.value]

    @property
    def file_name(self) -> str:
        """Of the stage's file; weights may lie beside it, under names that begin so."""
        return "model.pt" if self is Form.TORCHSCRIPT else "model.onnx"


class Progress(Protocol):
    """Where the stages of an export are shown."""

    def stage(
        self, name: str, *, total: int | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Open a stage of `total` units of work (None: unknown); the value advances it by some units."""


class SilentProgress:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Open a stage that nobody sees."""
        del name, total
        yield lambda _units: None


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
