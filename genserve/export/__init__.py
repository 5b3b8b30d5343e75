"""Export: converts a checkpoint of a language model into the stages of a model repository.

Importing this package is fast; `export_model` imports what it needs: onnx, and for most sources torch and
transformers.
"""

from __future__ import annotations

from genserve.export.export_options import (
    CacheType,
    ExportReport,
    FileFormat,
    Precision,
    Progress,
    SilentProgress,
)
from genserve.export.exporter import export_model
from genserve.export.pulling import DEFAULT_MODEL, pull, pulled_name

__all__ = [
    "DEFAULT_MODEL",
    "CacheType",
    "ExportReport",
    "FileFormat",
    "Precision",
    "Progress",
    "SilentProgress",
    "export_model",
    "pull",
    "pulled_name",
]
