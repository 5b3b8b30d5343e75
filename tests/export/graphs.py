"""Graphs: tiny checkpoints converted to graphs, without the check and the installation of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.conversion import Conversion
from genserve.export.decoder import Dimensions
from genserve.export.export_options import CacheType, ExportFormat, Precision, SilentProgress
from genserve.export.model_folders import ModelFolders
from genserve.export.reference import Reference
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits

__all__ = ["WrittenGraph", "conversion_of", "write_conversion", "write_graph"]


NOTHING_SEEN = Reference(
    ids=np.empty((0, 0), np.int64),
    hidden=np.empty((0, 0, 0), np.float32),
    logits=np.empty((0, 0, 0), np.float32),
    activations={},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenGraph:
    """A graph on disk."""

    folder: Path
    export_format: ExportFormat
    precision: Precision
    dimensions: Dimensions

    def logits(self, *, max_num_seqs: int, max_length: int, num_threads: int = 1) -> OnnxLogits | TorchLogits:
        path = self.folder / self.export_format.file_name
        if self.export_format is ExportFormat.TORCHSCRIPT:
            return TorchLogits(path, max_num_seqs=max_num_seqs, max_length=max_length)
        return OnnxLogits(path, max_num_seqs=max_num_seqs, max_length=max_length, num_threads=num_threads)


def write_graph(
    source: Path | Checkpoint,
    folder: Path,
    *,
    precision: Precision = "fp32",
    export_format: ExportFormat = ExportFormat.ONNX,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
) -> WrittenGraph:
    conversion = conversion_of(
        source,
        precision=precision,
        export_format=export_format,
        kv_cache=kv_cache,
        pipeline_stages=pipeline_stages,
    )
    return write_conversion(conversion, folder)


def conversion_of(
    source: Path | Checkpoint,
    *,
    precision: Precision | None = "fp32",
    export_format: ExportFormat = ExportFormat.ONNX,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
) -> Conversion:
    checkpoint = read_checkpoint(source, source=source.name) if isinstance(source, Path) else source
    return Conversion.of(
        checkpoint,
        folders=ModelFolders("tiny"),
        precision=precision,
        export_format=export_format,
        kv_cache=kv_cache,
        pipeline_stages=pipeline_stages,
    )


def write_conversion(
    conversion: Conversion, folder: Path, *, reference: Reference = NOTHING_SEEN
) -> WrittenGraph:
    layout = conversion.layout
    layout.write(folder, repository=folder)
    version = layout.version_folder(folder)
    conversion.write_graph(version, reference=reference, progress=SilentProgress())
    return WrittenGraph(
        folder=version,
        export_format=layout.export_format,
        precision=layout.precision,
        dimensions=layout.dimensions,
    )
