"""Conversion: writes the graph of a checkpoint, and compares it with its source."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Decoder
from genserve.export.decoder_graph import write_decoder
from genserve.export.decoder_weights import DecoderWeights, tensor_sources
from genserve.export.export_options import CacheType, ExportFormat, ExportReport, Precision, Progress
from genserve.export.families import FAMILIES, architecture, family_of
from genserve.export.family import Family, Unsupported
from genserve.export.layers import FusedLayers, StandardLayers
from genserve.export.layout import ModelLayout
from genserve.export.model_folders import ModelFolders, install, install_beside, writing_into
from genserve.export.onnx_graph import OnnxGraphBuilder
from genserve.export.parity import Parity, check_parity, num_compared
from genserve.export.pipeline_stages import require_stages, split_layers
from genserve.export.quantization import (
    SCHEMES,
    cache_dtype,
    is_smoothable,
    require_cache,
    resolve_precision,
    smooth,
)
from genserve.export.reference import Recording, Reference
from genserve.files import staging_folder
from genserve.sampling.logits_array import FloatArray
from genserve.textmodel.logits_config import pipeline_files

if TYPE_CHECKING:
    from genserve.export.traced import TracedConversion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The conversion of a checkpoint of a known family."""

    layout: ModelLayout
    family: Family
    decoder: Decoder
    recording: Recording | None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        recording: Recording | None = None,
        folders: ModelFolders,
        export_format: ExportFormat,
        precision: Precision | None = None,
        kv_cache: CacheType = "float",
        pipeline_stages: int = 1,
    ) -> Self:
        """Find the family of the checkpoint, whose source is run unless there is a `recording` of it.

        Raises:
            Unsupported: no family supports the architecture or an option of the config.
            ExportError: the config is invalid, or the format does not support the precision, the KV cache or
                the pipeline stages.
        """
        family = family_of(checkpoint.config)
        if family is None:
            raise Unsupported(
                f"no family supports its architecture {architecture(checkpoint.config)}",
                remedy=f"known architectures: {', '.join(sorted(FAMILIES))}",
            )
        if recording is None:
            decoder = family.decoder(checkpoint.config)
        else:
            decoder = family.described(recording.completed_config())
        require_cache(kv_cache, export_format)
        require_stages(pipeline_stages, export_format, num_layers=decoder.dimensions.num_layers)
        layout = ModelLayout(
            folders=folders,
            export_format=export_format,
            precision=resolve_precision(precision, export_format),
            checkpoint=family.completed(checkpoint),
            dimensions=decoder.dimensions,
            kv_cache=kv_cache,
            pipeline_stages=pipeline_stages,
        )
        return cls(layout=layout, family=family, decoder=decoder, recording=recording)

    @property
    def norms(self) -> dict[str, str]:
        """The norms to observe for smoothing: role to the name of the module in transformers."""
        sources = tensor_sources(self.family.names, num_layers=self.layout.dimensions.num_layers)
        scheme = SCHEMES[self.layout.precision]
        return {
            role: source.name
            for role, source in sources.items()
            if is_smoothable(role) and (scheme.head if role == "norm" else scheme.normed) == "int8"
        }

    def write_graph(self, version: Path, *, reference: Reference, progress: Progress) -> None:
        """Write the graph, or those of the stages, and their weights.

        Args:
            version: their folder.
            reference: the source's run; the norms that it observed are smoothed.
            progress: displays the stages of the work.

        Raises:
            ExportError: the checkpoint lacks a tensor, or has one unknown to the family.
        """
        num_layers = self.layout.dimensions.num_layers
        with progress.stage(f"converting to {self.layout.precision}", total=num_layers) as advance:
            self._write(version, activations=reference.activations, advance=advance)

    def _write(
        self, version: Path, *, activations: Mapping[str, FloatArray], advance: Callable[[int], None]
    ) -> None:
        layout, checkpoint = self.layout, self.layout.checkpoint
        used: set[str] = set()

        def load(name: str) -> FloatArray:
            used.add(name)
            return checkpoint.load(name)

        plain = self.family.weights(replace(checkpoint, load=load), self.decoder)
        weights = smooth(plain, activations)
        metadata = layout.metadata(family=self.family.name)
        if layout.export_format is ExportFormat.TORCHSCRIPT:
            from genserve.export.decoder_module import write_torchscript

            path = version / layout.export_format.file_name
            write_torchscript(weights, self.decoder, path, precision=layout.precision, metadata=metadata)
            advance(layout.dimensions.num_layers)
        else:
            parts = split_layers(
                plain, self.decoder, scheme=SCHEMES[layout.precision], num_stages=layout.pipeline_stages
            )
            files = pipeline_files(version / layout.export_format.file_name, num_stages=len(parts))
            for stage, (path, part) in enumerate(zip(files, parts, strict=True)):
                place = {"genserve.pipeline_stage": f"{stage + 1}/{len(parts)}"} if len(parts) > 1 else {}
                self._write_onnx(path, weights, part=part, metadata=metadata | place, advance=advance)
        self._require_no_others(used)

    def _write_onnx(
        self,
        path: Path,
        weights: DecoderWeights,
        *,
        part: range,
        metadata: Mapping[str, str],
        advance: Callable[[int], None],
    ) -> None:
        """Write the ONNX graph of the layers `part`."""
        scheme = SCHEMES[self.layout.precision]
        make_layers = FusedLayers if scheme.activations is np.float32 else StandardLayers
        kv_cache = cache_dtype(self.layout.kv_cache, self.layout.precision)
        with OnnxGraphBuilder(path.parent, file_name=path.name) as graph:
            layers = make_layers(graph, scheme)
            write_decoder(weights, self.decoder, layers, advance, kv_cache=kv_cache, part=part)
            graph.save(metadata=metadata)

    def _require_no_others(self, used: set[str]) -> None:
        checkpoint = self.layout.checkpoint
        unknown = sorted(filterfalse(self.family.may_ignore, checkpoint.tensor_names - used))
        if unknown:
            raise ExportError(
                f"{checkpoint.source} has {len(unknown)} tensors unknown to the family {self.family.name}, "
                f"such as {unknown[0]!r}",
                remedy="export a checkpoint of the standard architecture; nothing was installed",
            )


def convert(
    checkpoint: Checkpoint,
    *,
    recording: Recording | None,
    folders: ModelFolders,
    export_format: ExportFormat,
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
) -> Conversion | TracedConversion:
    """Choose the conversion of a checkpoint: by its family, or else traced.

    Raises:
        ExportError: neither is possible, or the format does not support the precision, the KV cache or the
            pipeline stages.
    """
    try:
        return Conversion.of(
            checkpoint,
            recording=recording,
            folders=folders,
            export_format=export_format,
            precision=precision,
            kv_cache=kv_cache,
            pipeline_stages=pipeline_stages,
        )
    except Unsupported as error:
        if export_format is not ExportFormat.ONNX:
            raise ExportError(
                f"{checkpoint.source}: {error.message}; {export_format.label} needs a known family",
                remedy=f"export it to ONNX; {error.remedy}",
            ) from error
        logger.warning(
            "%s: %s. Its graph is traced from the code of transformers, and slower than that of a family",
            checkpoint.source,
            error.message,
        )
    require_cache(kv_cache, ExportFormat.TRACED)
    from genserve.export.traced import TracedConversion

    family = family_of(checkpoint.config)
    traced = TracedConversion.of(
        checkpoint if family is None else family.completed(checkpoint),
        folders=folders,
        precision=resolve_precision(precision, ExportFormat.TRACED),
    )
    num_layers = traced.layout.dimensions.num_layers
    require_stages(pipeline_stages, ExportFormat.TRACED, num_layers=num_layers)
    return traced


def write_model(
    conversion: Conversion | TracedConversion,
    repository: Path,
    *,
    beside: str | None,
    overwrite: bool,
    progress: Progress,
    started_s: float,
) -> ExportReport:
    """Write a model, compare it with its source, and install it.

    `started_s` is when the export began, by `time.perf_counter`; for the other arguments see `export_model`.

    Raises:
        ExportError: the source cannot be run or converted, the graph is too far from it, or the repository
            has a config of another model, or is not writable.
    """
    layout = conversion.layout
    with writing_into(repository), staging_folder(repository, layout.folders.ensemble) as staged:
        if beside is not None or not overwrite:
            layout.require_agreeing_config(repository, beside=beside is not None)
        if beside is None:
            layout.write(staged, repository=repository)
        version = layout.version_folder(staged)
        parity = _write_checked(conversion, version, progress=progress)
        stem = Path(layout.export_format.file_name).stem
        size_bytes = sum(path.stat().st_size for path in version.glob(f"{stem}.*"))
        if beside is None:
            install(staged, repository, layout.folders, overwrite=overwrite)
        else:
            install_beside(staged, repository, layout.folders, beside=beside)
    return ExportReport(
        name=layout.folders.ensemble,
        precision=parity.precision,
        kv_cache=parity.kv_cache,
        seconds=time.perf_counter() - started_s,
        largest_logit_difference=parity.largest_logit_difference,
        top1_agreement=parity.top1_agreement,
        perplexity_ratio=parity.perplexity_ratio,
        divergence=parity.divergence,
        size_bytes=size_bytes,
        path=repository / layout.folders.ensemble,
    )


def _write_checked(conversion: Conversion | TracedConversion, version: Path, *, progress: Progress) -> Parity:
    """Run the source, write the graph into the folder `version`, and compare both."""
    layout = conversion.layout
    reference = _reference(conversion, progress=progress)
    conversion.write_graph(version, reference=reference, progress=progress)
    with progress.stage("comparing with the source", total=num_compared(reference.ids)) as advance:
        return check_parity(
            reference,
            version,
            export_format=layout.export_format,
            precision=layout.precision,
            kv_cache=layout.kv_cache,
            pipeline_stages=layout.pipeline_stages,
            source=layout.checkpoint.source,
            advance=advance,
        )


def _reference(conversion: Conversion | TracedConversion, *, progress: Progress) -> Reference:
    checkpoint, dimensions = conversion.layout.checkpoint, conversion.layout.dimensions
    if conversion.recording is not None:
        return conversion.recording.reference(checkpoint, norms=conversion.norms)
    from genserve.export.source_model import run_source

    with progress.stage("running the source", total=dimensions.num_layers) as advance:
        return run_source(
            checkpoint, context_length=dimensions.context_length, norms=conversion.norms, advance=advance
        )
