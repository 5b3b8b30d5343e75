"""Conversion: one checkpoint on its way to the files of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from pathlib import Path
from typing import Self

from genserve.errors import ExportError
from genserve.export.architectures import FAMILIES, architecture, family_of
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder import Decoder, Dimensions
from genserve.export.decoder_graph import write_decoder
from genserve.export.family import Family
from genserve.export.form import Form
from genserve.export.graph import Graph
from genserve.export.layers import Layers
from genserve.export.precision import FORMATS
from genserve.export.report import CacheType, Precision
from genserve.export.smoothing import can_be_smoothed, smoothed
from genserve.export.stage_folders import StageFolders
from genserve.export.stages import Stages
from genserve.export.torchscript import write_torchscript
from genserve.export.weights import parts_of

__all__ = ["Conversion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is to be written: a checkpoint, in a precision, under a name."""

    stages: Stages
    form: Form
    precision: Precision
    checkpoint: Checkpoint
    family: Family
    decoder: Decoder
    kv_cache: CacheType = "float"
    # Of `norms`, by their roles, see `Reference`; norms whose activations are known are smoothed.
    activations: Mapping[str, FloatArray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        stages: Stages,
        precision: Precision,
        form: Form,
        kv_cache: CacheType = "float",
    ) -> Self:
        """Find the family of the checkpoint.

        Raises:
            ExportError: no family builds what the config names.
        """
        family = family_of(checkpoint.config)
        if family is None:
            raise ExportError(
                f"{checkpoint.source} is of the architecture {architecture(checkpoint.config)}, "
                f"which no family builds, and {form.words} is made of families alone",
                remedy=f"export it to ONNX; or one of the known architectures: {', '.join(sorted(FAMILIES))}",
            )
        return cls(
            stages=stages,
            form=form,
            precision=precision,
            checkpoint=family.completed(checkpoint),
            family=family,
            decoder=family.decoder(checkpoint.config),
            kv_cache=kv_cache,
        )

    @property
    def dimensions(self) -> Dimensions:
        """What the stages around the graph need to know of it."""
        return self.decoder.dimensions

    @property
    def folders(self) -> StageFolders:
        """The folders around the graph."""
        return StageFolders(
            stages=self.stages,
            form=self.form,
            precision=self.precision,
            checkpoint=self.checkpoint,
            dimensions=self.dimensions,
            kv_cache=self.kv_cache,
        )

    @property
    def norms(self) -> dict[str, str]:
        """The norms whose activations are worth knowing: role to the name of transformers' module."""
        parts = parts_of(self.family.names, num_layers=self.dimensions.num_layers)
        norms = {role: part.name for role, part in parts.items() if can_be_smoothed(role)}
        return norms if FORMATS[self.precision].by_row else {}

    def write_graph(self, folder: Path, *, advance: Callable[[int], None]) -> Path:
        """Write the graph and its weights; returns their folder. `advance` is called with 1 after each layer.

        Raises:
            ExportError: the checkpoint lacks a tensor, or has one that the family knows nothing of.
        """
        version = folder / self.stages.logits / "1"
        version.mkdir(parents=True, exist_ok=True)
        used: set[str] = set()

        def load(name: str) -> FloatArray:
            used.add(name)
            return self.checkpoint.load(name)

        plain = self.family.weights(replace(self.checkpoint, load=load), self.decoder)
        weights = smoothed(plain, self.activations)
        metadata = self.folders.metadata(family=self.family.name)
        if self.form is Form.TORCHSCRIPT:
            path = version / self.form.file_name
            write_torchscript(weights, self.decoder, path, precision=self.precision, metadata=metadata)
            advance(self.dimensions.num_layers)
        else:
            with Graph(version) as graph:
                write_decoder(weights, self.decoder, Layers(graph, FORMATS[self.precision]), advance)
                graph.save(metadata=metadata)
        self._require_all(used)
        return version

    def _require_all(self, used: set[str]) -> None:
        unknown = sorted(filterfalse(self.family.may_ignore, self.checkpoint.tensor_names - used))
        if unknown:
            raise ExportError(
                f"{self.checkpoint.source} has {len(unknown)} tensors that the family {self.family.name} "
                f"does not know, {unknown[0]!r} first",
                remedy="it is not the plain architecture that its config names; nothing was installed",
            )
