"""Export options: the file format, precision and cache type of an export, its progress and its report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol

# The name of a model on the Hugging Face hub: ORG/NAME, or ORG/NAME:Q4_K_M for one of its GGUF files.
HUB_NAME = re.compile(
    r"(?:(?:https://)?(?:hf|huggingface)\.co/)?(?P<name>\w[\w.-]*/(?P<model>[\w.-]+))"
    r"(?::(?P<quantization>[\w-]+))?"
)

Precision = Literal["int8", "int4", "fp16", "fp32", "source"]
CacheType = Literal["float", "int8"]  # type of the KV cache; float: fp16, or fp32 in an fp32 export
Pooling = Literal["mean", "cls", "last"]  # from the hidden states of a text to its vector
FileFormat = Literal["onnx", "torchscript"]  # the file format that the user requests for the logits model
# The types of models that are exported as encoders, if their files state no pooling.
ENCODER_TYPES = frozenset({"bert", "roberta", "xlm-roberta", "mpnet", "modernbert"})

Unit = Literal["", "bytes"]  # of a task's work, if it is displayed


class ExportFormat(Enum):
    """How a logits model is written; `FileFormat` "onnx" falls back to TRACED."""

    ONNX = "onnx"  # a graph of a known family, which writes its KV cache in place
    TORCHSCRIPT = "torchscript"  # a module of a known family, which does the same
    TRACED = "traced"  # torch's export of transformers' own model, which copies its KV cache

    @property
    def label(self) -> str:
        """The name of the format in messages."""
        return {"onnx": "an ONNX graph", "torchscript": "TorchScript", "traced": "a traced model"}[self.value]

    @property
    def file_name(self) -> str:
        """The name of the model file; the names of separate weight files start with it."""
        return "model.pt" if self is ExportFormat.TORCHSCRIPT else "model.onnx"


class Progress(Protocol):
    """Displays the tasks of an export."""

    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Begin a task of `total` units of work (None: unknown); the result advances it by n units."""


class SilentProgress:
    """Displays nothing."""

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        """Begin a task that is not displayed."""
        del name, total, unit
        yield lambda _units: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """A model that was exported, compared with its source, and installed."""

    name: str
    precision: Precision
    kv_cache: CacheType = "float"
    seconds: float
    largest_logit_difference: float  # absolute, over all compared logits
    top1_agreement: float  # share of positions at which both models rank the same token first
    perplexity_ratio: float  # perplexity of the export over that of the source, on a fixed text
    divergence: float  # Kullback-Leibler divergence from the source, nats per token
    size_bytes: int  # size of the graph and its weights
    # With the precision "source", how many matrices have all numbers of the source, and how many do not.
    num_kept: int = 0
    num_rounded: int = 0
    path: Path  # the ensemble's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderReport:
    """An encoder that was exported, compared with its source, and installed."""

    name: str
    precision: Precision
    seconds: float
    largest_difference: float  # of one number of a vector of length 1, or of a score
    lowest_cosine: float  # of a vector and the source's; 1 for scores
    correlation: float  # Pearson's, of the cosines of pairs of texts, or of scores
    size_bytes: int  # size of the graph and its weights
    path: Path  # the ensemble's folder
