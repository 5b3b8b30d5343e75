"""Exporter: converts a checkpoint into a model of a repository."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.backends.libraries import import_onnxruntime, require_export_packages
from genserve.errors import ExportError
from genserve.export.export_options import (
    CacheType,
    ExportFormat,
    ExportReport,
    FileFormat,
    Precision,
    Progress,
)
from genserve.export.model_folders import ModelFolders

if TYPE_CHECKING:
    from genserve.export.reference import Recording


def export_model(
    source: str,
    *,
    repository: Path,
    name: str,
    file_format: FileFormat = "onnx",
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
    beside: str | None = None,
    overwrite: bool = False,
    allow_pickled_weights: bool = False,
    progress: Progress,
) -> ExportReport:
    """Convert a checkpoint into the ensemble `name` and its three stages, and compare it with its source.

    The model is installed only if the comparison passes. Existing configs and model.py files stay.

    Args:
        source: a Hugging Face folder, a .gguf file, or ORG/NAME on the Hugging Face hub.
        repository: the model repository; created if missing.
        name: of the model in the repository.
        file_format: of the logits stage.
        precision: of weights and activations, see `quantization.py`; None: int8 in ONNX, else fp32.
        kv_cache: float is fp16, or fp32 in an fp32 export; int8 needs an ONNX graph of a known family.
        pipeline_stages: graphs that the layers are cut into; several need an ONNX graph of a known family.
        beside: add only the graph to an existing model, in a folder of this name next to its model.onnx.
            `default_model_filename` of the logits stage selects a graph, set by hand or by `genserve tune`.
        overwrite: replace weights, tokenizer and their configs; with `beside`, the graph of that name.
        allow_pickled_weights: read weights in PyTorch's .bin files, if there are no others.
        progress: displays the stages of the work.

    Raises:
        ExportError: an argument is not usable, the weights exist, the repository is not writable, or the
            exported graph is too far from its source.
        MissingDependency: a package of the extra `export` is not installed, and there is no recording of the
            source; or ONNX Runtime is not, and the format is "onnx".
    """
    started_s = time.perf_counter()
    folders = ModelFolders(name)
    _require_free(folders, repository, beside=beside, overwrite=overwrite)
    if file_format == "onnx":
        import_onnxruntime()        # fails now rather than in the check, which runs the graph
    from genserve.export.checkpoint_reader import locate, read_checkpoint
    from genserve.export.conversion import convert, write_model

    # Outside of a stage, since the hub displays its own progress.
    path = locate(source, allow_pickled_weights=allow_pickled_weights)
    recording = _find_recording(path, file_format=file_format, progress=progress)
    with progress.stage("reading the checkpoint"):
        checkpoint = read_checkpoint(
            path, source=Path(source).resolve().name, allow_pickled_weights=allow_pickled_weights
        )
        conversion = convert(
            checkpoint, recording=recording, folders=folders, export_format=ExportFormat(file_format),
            precision=precision, kv_cache=kv_cache, pipeline_stages=pipeline_stages,
        )
    return write_model(
        conversion, repository, beside=beside, overwrite=overwrite, progress=progress, started_s=started_s
    )


def _find_recording(path: Path, *, file_format: FileFormat, progress: Progress) -> Recording | None:
    """Return the recording of a source, or else load the packages that run the source and return None."""
    from genserve.export.reference import find_recording

    recording = find_recording(path) if path.is_file() else None
    if recording is None or file_format == "torchscript":
        require_export_packages(f"exporting {path.name}")
        with progress.stage("loading torch and transformers"):
            import_module("genserve.export.source_model")
    return recording


def _require_free(folders: ModelFolders, repository: Path, *, beside: str | None, overwrite: bool) -> None:
    has_weights = folders.have_weights(repository)
    if beside is None:
        if has_weights and not overwrite:
            raise ExportError(
                f"the weights of {folders.ensemble!r} already exist in {repository}",
                remedy="--overwrite replaces them; or export under another --name, or --beside them",
            )
        return
    folder = folders.additional_graph(repository, beside)
    if not has_weights:
        raise ExportError(
            f"no model {folders.ensemble!r} in {repository} to add a graph to",
            remedy="export it first, without --beside",
        )
    if folder.exists() and not overwrite:
        raise ExportError(f"{folder} already exists", remedy="--overwrite replaces it")
