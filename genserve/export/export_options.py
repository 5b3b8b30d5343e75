"""Export options: file format, precision and cache type of an export; its progress, and its report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol

# ORG/NAME on the Hugging Face hub.
HUB_NAME = re.compile(r"\w[\w.-]*/(?P<model>[\w.-]+)")

Precision = Literal["int8", "int4", "fp16", "fp32"]
CacheType = Literal["float", "int8"]            # of the KV cache; float: fp16, of an fp32 export fp32
FileFormat = Literal["onnx", "torchscript"]     # of the logits model, as the user requests it


class ExportFormat(Enum):
    """How a logits model is written; `FileFormat` "onnx" falls back to TRACED."""

    ONNX = "onnx"                   # a graph of a known family, which writes its KV cache in place
    TORCHSCRIPT = "torchscript"     # a module of a known family, which does the same
    TRACED = "traced"               # torch's export of transformers' own model, which copies its KV cache

    @property
    def label(self) -> str:
        """The name of the format in messages."""
        return {"onnx": "an ONNX graph", "torchscript": "TorchScript", "traced": "a traced model"}[self.value]

    @property
    def file_name(self) -> str:
        """The name of the model file; the names of separate weight files start with it."""
        return "model.pt" if self is ExportFormat.TORCHSCRIPT else "model.onnx"


class Progress(Protocol):
    """Displays the stages of an export."""

    def stage(self, name: str, *, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Open a stage of `total` units of work (None: unknown); its value advances it by n units."""


class SilentProgress:
    """Displays nothing."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Open a stage that is not displayed."""
        del name, total
        yield lambda _units: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """A model that was exported, compared with its source, and installed."""

    name: str
    precision: Precision
    kv_cache: CacheType = "float"
    seconds: float
    largest_logit_difference: float  # absolute, over all compared logits
    top1_agreement: float            # share of positions at which both models rank the same token first
    perplexity_ratio: float          # perplexity of the export over that of the source, on a fixed text
    divergence: float                # Kullback-Leibler divergence from the source, nats per token
    size_bytes: int                  # of the graph and its weights
    path: Path                       # the ensemble's folder
