"""Export: a checkpoint of a language model turned into the stages of a model repository.

Importing this package loads nothing heavy; `export_model` loads torch, transformers and onnx when called.
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
from genserve.export.pulling import pull

__all__ = [
    "CacheType",
    "ExportReport",
    "FileFormat",
    "Precision",
    "Progress",
    "SilentProgress",
    "export_model",
    "pull",
]
