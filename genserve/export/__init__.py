"""Export: converts a checkpoint of a language model into the stages of a model repository.

Importing this package is fast; `export_model` imports what it needs: onnx, and for most sources torch and
transformers.
"""

from __future__ import annotations

from genserve.export.export_options import (
    CacheType,
    EncoderReport,
    ExportReport,
    FileFormat,
    Precision,
    Progress,
    SilentProgress,
)
from genserve.export.exporter import export_model, is_adapter, is_encoder
from genserve.export.known_models import (
    KNOWN_ENCODERS,
    KNOWN_MODELS,
    KnownEncoder,
    KnownModel,
    known_encoder,
    known_model,
)
from genserve.export.pulling import (
    DEFAULT_MODEL,
    packaged_file,
    pull,
    pull_encoder,
    pull_remedy,
    pulled_name,
)

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_ENCODERS",
    "KNOWN_MODELS",
    "CacheType",
    "EncoderReport",
    "ExportReport",
    "FileFormat",
    "KnownEncoder",
    "KnownModel",
    "Precision",
    "Progress",
    "SilentProgress",
    "export_model",
    "is_adapter",
    "is_encoder",
    "known_encoder",
    "known_model",
    "packaged_file",
    "pull",
    "pull_encoder",
    "pull_remedy",
    "pulled_name",
]
