"""Conversion: writes the graph of a checkpoint, and compares the graph with its source."""

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
from genserve.export.checkpoints.checkpoint import Checkpoint, StoredRows
from genserve.export.checkpoints.expert_tensors import with_stacks
from genserve.export.decoder import Decoder
from genserve.export.decoder_weights import DecoderWeights, is_used, tensor_sources
from genserve.export.export_options import CacheType, ExportFormat, ExportReport, Precision, Progress
from genserve.export.families import FAMILIES, architecture, family_of
from genserve.export.families.family import Family, Unsupported
from genserve.export.fitted import fit_weights
from genserve.export.graphs.decoder_graph import write_decoder
from genserve.export.graphs.layers import FusedLayers, StandardLayers
from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.export.graphs.role_writer import Kept
from genserve.export.layout import ModelLayout
from genserve.export.model_folders import ModelFolders, install, install_beside, writing_into
from genserve.export.parity import Parity, check_parity, num_compared
from genserve.export.pipeline_stages import require_stages, split_layers
from genserve.export.quantization import (
    QuantizationScheme,
    cache_dtype,
    is_smoothable,
    require_cache,
    resolve_precision,
    scheme_of,
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
        """Find the family of the checkpoint. Its source will be run unless there is a `recording`.

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
        require_stages(pipeline_stages, export_format, decoder=decoder)
        resolved = resolve_precision(precision, export_format, checkpoint)
        is_torchscript = export_format is ExportFormat.TORCHSCRIPT
        if (resolved == "fp16" or is_torchscript) and (kind := decoder.kind_of_own_operators) is not None:
            raise ExportError(
                f"{export_format.label if is_torchscript else 'a graph in fp16'} has no layers {kind}",
                remedy="export it to ONNX in int8, the default, or in another precision but fp16",
            )
        if decoder.num_experts and resolved == "fp16" and not is_torchscript:
            raise ExportError(
                "a graph in fp16 has no experts",
                remedy="leave --precision out: the default, int8, has them; or write --format torchscript, "
                "which has them in fp16, on a GPU too",
            )
        layout = ModelLayout(
            folders=folders,
            export_format=export_format,
            precision=resolved,
            checkpoint=family.completed(checkpoint),
            dimensions=decoder.dimensions,
            kv_cache=kv_cache,
            pipeline_stages=pipeline_stages,
        )
        return cls(layout=layout, family=family, decoder=decoder, recording=recording)

    @property
    def scheme(self) -> QuantizationScheme:
        """The number formats of the graph."""
        return scheme_of(self.layout.precision, is_tied=self.decoder.tied)

    @property
    def norms(self) -> dict[str, str]:
        """The norms to observe, to smooth them or to fit what reads them: transformers' modules by role."""
        sources = tensor_sources(self.family.names, num_layers=self.layout.dimensions.num_layers)
        scheme = self.scheme
        wanted = ("int4_block",) if scheme.blocks == "fitted" else ("int8",)
        return {
            role: source.name_in(self.layout.checkpoint.tensor_names)
            for role, source in sources.items()
            if is_smoothable(role)
            and is_used(role, self.decoder)
            and not self._has_other_readers(role)
            and (scheme.head if role == "norm" else scheme.normed) in wanted
        }

    def _has_other_readers(self, norm: str) -> bool:
        """Whether experts read a norm, which are quantized in blocks and need no smoothing, or a residual."""
        if norm.endswith(".attention.norm") and self.decoder.altup is not None:
            return True
        part = norm.removeprefix("layers.").removesuffix(".mlp.norm")
        experts = self.decoder.layers[int(part)].experts if part.isdecimal() else None
        return experts is not None and not experts.beside_mlp

    def write_graph(self, version: Path, *, reference: Reference, progress: Progress) -> Kept:
        """Write the graph, or one graph per pipeline stage, and the weights.

        Args:
            version: the version folder to write into.
            reference: the results of the source, with the norms that it has observed.
            progress: displays the tasks of the export.

        Returns:
            See `write_decoder`.

        Raises:
            ExportError: the checkpoint lacks a tensor, or has a tensor that the family does not know.
        """
        checkpoint, name = self.layout.checkpoint, f"converting to {self.layout.precision}"
        with progress.task(name, total=checkpoint.num_bytes, unit="bytes") as advance:
            reporting = checkpoint.reporting(advance)
            return self._write(version, checkpoint=reporting, activations=reference.activations)

    def _write(self, version: Path, *, checkpoint: Checkpoint, activations: Mapping[str, FloatArray]) -> Kept:
        layout = self.layout
        used: set[str] = set()

        def load(name: str, rows: slice) -> FloatArray:
            used.add(name)
            return checkpoint.load(name, rows)

        def load_stored(name: str) -> StoredRows | None:
            used.add(name)
            return checkpoint.load_stored(name)

        recorded = replace(checkpoint, load=load, load_stored=load_stored)
        plain = weights = self.family.weights(recorded, self.decoder)
        if self.scheme.blocks == "fitted":
            plain = weights = fit_weights(plain, activations, num_layers=layout.dimensions.num_layers)
        elif activations:
            weights = smooth(plain, activations)
        metadata = layout.metadata(family=self.family.name)
        kept: Kept = {}
        if layout.export_format is ExportFormat.TORCHSCRIPT:
            from genserve.export.graphs.decoder_module import write_torchscript

            path = version / layout.export_format.file_name
            write_torchscript(weights, self.decoder, path, precision=layout.precision, metadata=metadata)
        else:
            parts = split_layers(plain, self.decoder, scheme=self.scheme, num_stages=layout.pipeline_stages)
            used.clear()  # some were read for the sizes of layers, and will be read again
            embedding = tensor_sources(self.family.names, num_layers=0)["embedding"]
            head = {f"{embedding.name_in(checkpoint.tensor_names)}.weight"} if self.decoder.tied else ()
            files = pipeline_files(version / layout.export_format.file_name, num_stages=len(parts))
            for stage, (path, part) in enumerate(zip(files, parts, strict=True)):
                place = {"genserve.pipeline_stage": f"{stage + 1}/{len(parts)}"} if len(parts) > 1 else {}
                kept |= self._write_onnx(
                    path,
                    weights,
                    part=part,
                    metadata=metadata | place,
                    after_layer=lambda: checkpoint.release(used.difference(head)),
                )
        self._require_no_others(used)
        return kept

    def _write_onnx(
        self,
        path: Path,
        weights: DecoderWeights,
        *,
        part: range,
        metadata: Mapping[str, str],
        after_layer: Callable[[], None],
    ) -> Kept:
        """Write the ONNX graph of the layers `part`."""
        make_layers = FusedLayers if self.scheme.activations is np.float32 else StandardLayers
        kv_cache = cache_dtype(self.layout.kv_cache, self.layout.precision)
        with OnnxGraphBuilder(path.parent, file_name=path.name) as graph:
            layers = make_layers(graph, self.scheme)
            kept = write_decoder(
                weights, self.decoder, layers, kv_cache=kv_cache, part=part, after_layer=after_layer
            )
            graph.save(metadata=metadata)
        return kept

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
    """Choose the conversion of a checkpoint: by its family, or by tracing if no family fits.

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
    require_stages(pipeline_stages, ExportFormat.TRACED)
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

    `started_s` is the start of the export by `time.perf_counter`; for the other arguments see `export_model`.

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
        parity, kept = _write_checked(conversion, version, progress=progress)
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
        num_kept=sum(kept.values()),
        num_rounded=len(kept) - sum(kept.values()),
        path=repository / layout.folders.ensemble,
    )


def _write_checked(
    conversion: Conversion | TracedConversion, version: Path, *, progress: Progress
) -> tuple[Parity, Kept]:
    """Run the source, write the graph into the folder `version`, and compare the two."""
    layout = conversion.layout
    reference = _reference(conversion, progress=progress)
    kept = conversion.write_graph(version, reference=reference, progress=progress)
    with progress.task("comparing with the source", total=num_compared(reference.ids)) as advance:
        parity = check_parity(
            reference,
            version,
            export_format=layout.export_format,
            precision=layout.precision,
            kv_cache=layout.kv_cache,
            pipeline_stages=layout.pipeline_stages,
            source=layout.checkpoint.source,
            advance=advance,
        )
    return parity, kept


def _reference(conversion: Conversion | TracedConversion, *, progress: Progress) -> Reference:
    checkpoint = conversion.layout.checkpoint
    if conversion.recording is not None:
        return conversion.recording.reference(checkpoint, norms=conversion.norms)
    from genserve.export.source_model import run_source

    transposed = conversion.family.transposed_stacks if isinstance(conversion, Conversion) else None
    with progress.task("running the source", total=checkpoint.num_bytes, unit="bytes") as advance:
        return run_source(
            with_stacks(checkpoint.reporting(advance), transposed=transposed),
            context_length=conversion.layout.dimensions.context_length,
            norms=conversion.norms,
        )
