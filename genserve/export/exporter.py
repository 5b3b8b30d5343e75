"""Exporter: turns a checkpoint into a model of a repository."""

from __future__ import annotations

import time
from pathlib import Path

from genserve.backends.libraries import import_onnxruntime
from genserve.errors import ExportError
from genserve.export.export_options import (
    CacheType,
    ExportReport,
    FileFormat,
    ModelFormat,
    Precision,
    Progress,
)
from genserve.export.model_folders import (
    ModelFolders,
    install,
    install_beside,
    staging_folder,
    writing_into,
)

__all__ = ["export_model"]


def export_model(
    source: str,
    *,
    repository: Path,
    name: str,
    file_format: FileFormat = "onnx",
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
    beside: str | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> ExportReport:
    """Turn a checkpoint into the four stages of the model `name`, checked against its source.

    Nothing appears in the repository before the check has passed. Existing configs and model.py files stay.

    Args:
        source: a Hugging Face folder, a .gguf file, or ORG/NAME on the Hugging Face hub.
        repository: the model repository; created if missing.
        name: of the model in the repository.
        file_format: of the logits stage.
        precision: of weights and activations, see `precision.py`; None: int8 in ONNX, else fp32.
        kv_cache: float is fp16, or fp32 in an fp32 export; int8 takes half the memory of fp16, in ONNX graphs
            of the known families.
        beside: add only the graph to an existing model, in a folder of this name next to its model.onnx.
            `default_model_filename` of the logits stage selects a graph, set by hand or by `genserve tune`.
        overwrite: replace existing weights and tokenizer with their configs; with `beside`, the graph of
            that name.
        progress: displays the stages of the work.

    Raises:
        ExportError: the name, source, precision or KV cache type is not usable, the weights exist, the
            repository is not writable, or the exported graph is too far from its source.
        MissingDependency: ONNX Runtime is not installed, and the format is "onnx".
    """
    start = time.perf_counter()
    folders = ModelFolders(name)
    _require_free(folders, repository, beside=beside, overwrite=overwrite)
    with progress.stage("loading torch, transformers and onnx"):
        from genserve.export.checkpoint_reader import locate, read_checkpoint
        from genserve.export.conversion import convert, write_checked

        if file_format == "onnx":
            import_onnxruntime()    # fails now rather than in the check, which runs the graph
    path = locate(source)  # outside of a stage, since the hub displays its own progress
    with progress.stage("reading the checkpoint"):
        checkpoint = read_checkpoint(path, source=Path(source).resolve().name)
        conversion = convert(
            checkpoint,
            folders=folders,
            model_format=ModelFormat(file_format),
            precision=precision,
            kv_cache=kv_cache,
        )
    layout = conversion.layout
    with writing_into(repository), staging_folder(repository, folders) as staged:
        if beside is not None or not overwrite:
            layout.require_agreeing_config(repository, beside=beside is not None)
        if beside is None:
            layout.write(staged, repository=repository)
        weights, parity = write_checked(conversion, staged, progress=progress)
        size_bytes = sum(path.stat().st_size for path in weights.glob(f"{layout.model_format.file_name}*"))
        if beside is None:
            install(staged, repository, folders, overwrite=overwrite)
        else:
            install_beside(staged, repository, folders, beside=beside)
    return ExportReport(
        name=name,
        precision=layout.precision,
        kv_cache=kv_cache,
        seconds=time.perf_counter() - start,
        largest_logit_difference=parity.largest_logit_difference,
        top1_agreement=parity.top1_agreement,
        perplexity_ratio=parity.perplexity_ratio,
        divergence=parity.divergence,
        size_bytes=size_bytes,
        path=repository / name,
    )


def _require_free(
    folders: ModelFolders, repository: Path, *, beside: str | None, overwrite: bool
) -> None:
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
            f"there is no model {folders.ensemble!r} in {repository} to add a graph to",
            remedy="export it first, without --beside",
        )
    if folder.exists() and not overwrite:
        raise ExportError(f"{folder} already exists", remedy="--overwrite replaces it")
