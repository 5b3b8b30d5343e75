"""Graphs: tiny checkpoints turned into graphs, without the check and the installation around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from genserve.export.conversion import Conversion
from genserve.export.decoder import Dimensions
from genserve.export.parity import CachedGraph
from genserve.export.report import Precision
from genserve.export.source import read_checkpoint
from genserve.export.stages import Stages

__all__ = ["WrittenGraph", "conversion_of", "write_conversion", "write_graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenGraph:
    """A graph on disk."""

    folder: Path
    precision: Precision
    dimensions: Dimensions

    def cached(self, *, batch: int, max_len: int) -> CachedGraph:
        return CachedGraph(
            self.folder,
            dimensions=self.dimensions,
            precision=self.precision,
            batch=batch,
            max_len=max_len,
        )


def write_graph(source: Path, folder: Path, *, precision: Precision = "fp32") -> WrittenGraph:
    return write_conversion(conversion_of(source, precision=precision), folder)


def conversion_of(source: Path, *, precision: Precision = "fp32") -> Conversion:
    checkpoint = read_checkpoint(source, source=source.name)
    return Conversion.of(checkpoint, stages=Stages("tiny"), precision=precision)


def write_conversion(conversion: Conversion, folder: Path) -> WrittenGraph:
    conversion.write_files(folder)
    version = conversion.write_graph(folder, advance=lambda _units: None)
    return WrittenGraph(folder=version, precision=conversion.precision, dimensions=conversion.dimensions)
