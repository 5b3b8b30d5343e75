"""Conversion: one checkpoint on its way to the files of its stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import Self

import numpy as np

from genserve.errors import ExportError
from genserve.export.architectures import FAMILIES, architecture, family_of
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.decoder import Decoder
from genserve.export.decoder_graph import write_decoder
from genserve.export.decoder_module import write_torchscript
from genserve.export.decoder_weights import parts_of
from genserve.export.export_options import CacheType, Form, Precision, Progress
from genserve.export.family import Family, Unsupported
from genserve.export.layers import FusedLayers, StandardLayers
from genserve.export.layout import StageFolders
from genserve.export.model_folders import Stages
from genserve.export.onnx_graph import Graph
from genserve.export.precision import FORMATS, cache_numbers, require_cache, resolve_precision
from genserve.export.smoothquant import can_be_smoothed, smoothed
from genserve.export.source_model import Reference
from genserve.export.traced import TracedConversion

__all__ = ["Conversion", "convert"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is to be written of a checkpoint that a family knows."""

    folders: StageFolders
    family: Family
    decoder: Decoder

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        stages: Stages,
        form: Form,
        precision: Precision | None = None,
        kv_cache: CacheType = "float",
    ) -> Self:
        """Find the family of the checkpoint.

        Raises:
            Unsupported: no family builds what the config names.
            ExportError: the config makes no sense, or the form has no such precision or KV cache.
        """
        family = family_of(checkpoint.config)
        if family is None:
            raise Unsupported(
                f"it is of the architecture {architecture(checkpoint.config)}, which no family builds",
                remedy=f"known architectures: {', '.join(sorted(FAMILIES))}",
            )
        decoder = family.decoder(checkpoint.config)
        require_cache(kv_cache, form)
        folders = StageFolders(
            stages=stages,
            form=form,
            precision=resolve_precision(precision, form),
            checkpoint=family.completed(checkpoint),
            dimensions=decoder.dimensions,
            kv_cache=kv_cache,
        )
        return cls(folders=folders, family=family, decoder=decoder)

    @property
    def norms(self) -> dict[str, str]:
        """The norms whose activations are worth knowing: role to the name of transformers' module."""
        parts = parts_of(self.family.names, num_layers=self.folders.dimensions.num_layers)
        numbers = FORMATS[self.folders.precision]
        return {
            role: part.name
            for role, part in parts.items()
            if can_be_smoothed(role) and (numbers.head if role == "norm" else numbers.normed) == "int8"
        }

    def write_graph(self, folder: Path, *, reference: Reference, progress: Progress) -> Path:
        """Write the graph and its weights; returns their folder.

        Args:
            folder: of all stages.
            reference: of the source. Norms whose activations it has are smoothed.
            progress: is shown the stages of the work.

        Raises:
            ExportError: the checkpoint lacks a tensor, or has one that the family knows nothing of.
        """
        folders = self.folders
        version = folder / folders.stages.logits / "1"
        version.mkdir(parents=True, exist_ok=True)
        num_layers = folders.dimensions.num_layers
        with progress.stage(f"converting to {folders.precision}", total=num_layers) as advance:
            self._write(version, activations=reference.activations, advance=advance)
        return version

    def _write(
        self, version: Path, *, activations: Mapping[str, FloatArray], advance: Callable[[int], None]
    ) -> None:
        folders, checkpoint = self.folders, self.folders.checkpoint
        used: set[str] = set()

        def load(name: str) -> FloatArray:
            used.add(name)
            return checkpoint.load(name)

        plain = self.family.weights(replace(checkpoint, load=load), self.decoder)
        weights = smoothed(plain, activations)
        metadata = folders.metadata(family=self.family.name)
        if folders.form is Form.TORCHSCRIPT:
            path = version / folders.form.file_name
            write_torchscript(weights, self.decoder, path, precision=folders.precision, metadata=metadata)
            advance(folders.dimensions.num_layers)
        else:
            numbers = FORMATS[folders.precision]
            make_layers = FusedLayers if numbers.activations is np.float32 else StandardLayers
            kv_cache = cache_numbers(folders.kv_cache, folders.precision)
            with Graph(version) as graph:
                layers = make_layers(graph, numbers)
                write_decoder(weights, self.decoder, layers, advance, kv_cache=kv_cache)
                graph.save(metadata=metadata)
        self._require_all(used)

    def _require_all(self, used: set[str]) -> None:
        checkpoint = self.folders.checkpoint
        unknown = sorted(filterfalse(self.family.may_ignore, checkpoint.tensor_names - used))
        if unknown:
            raise ExportError(
                f"{checkpoint.source} has {len(unknown)} tensors that the family {self.family.name} "
                f"does not know, {unknown[0]!r} first",
                remedy="it is not the plain architecture that its config names; nothing was installed",
            )


def convert(
    checkpoint: Checkpoint,
    *,
    stages: Stages,
    form: Form,
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
) -> Conversion | TracedConversion:
    """Return how a checkpoint is written: by its family, or traced where that has to be and can be.

    Raises:
        ExportError: neither way; or the form has no such precision or KV cache.
    """
    try:
        return Conversion.of(
            checkpoint, stages=stages, form=form, precision=precision, kv_cache=kv_cache
        )
    except Unsupported as error:
        if form is not Form.ONNX:
            raise ExportError(
                f"{checkpoint.source}: {error.message}, and {form.words} is made of families alone",
                remedy=f"export it to ONNX; {error.remedy}",
            ) from error
        logger.warning(
            "%s: %s: its graph is traced from the code of transformers, and slower than one of ours",
            checkpoint.source,
            error.message,
        )
    require_cache(kv_cache, Form.TRACED)
    family = family_of(checkpoint.config)
    return TracedConversion.of(
        checkpoint if family is None else family.completed(checkpoint),
        stages=stages,
        precision=resolve_precision(precision, Form.TRACED),
    )
