"""Exporter: from a checkpoint to a model of a repository, in one call."""

from __future__ import annotations

import time
from pathlib import Path

from genserve.backends.libraries import import_onnxruntime
from genserve.errors import ExportError
from genserve.export.export_options import CacheType, ExportReport, FileFormat, Form, Precision, Progress
from genserve.export.model_folders import Stages, install, install_beside, staging_folder, writing_into

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

    Nothing appears in the repository before the check has passed; configs and model.py that are there stay.

    Args:
        source: a Hugging Face folder, a .gguf file, or ORG/NAME on the Hugging Face hub.
        repository: the model repository; made if it is not there.
        name: of the model in the repository.
        file_format: of the logits stage.
        precision: of weights and activations, see `precision.py`; None: int8 in ONNX, else fp32.
        kv_cache: float is fp16, of an fp32 export fp32; int8 takes half of the memory of fp16; ONNX graphs of
            the families have it.
        beside: add the graph alone to a model that is there, in a folder of this name beside its own
            model.onnx; `default_model_filename` of the logits stage chooses between them, by hand or by
            `genserve tune`.
        overwrite: replace the weights, the tokenizer and their configs if they are there; with `beside`,
            the graph of that name.
        progress: is shown the stages of the work.

    Raises:
        ExportError: the name, the source, the precision or the KV cache cannot be used, the weights are there
            already, the repository cannot be written to, or the exported graph is too far from its source.
        MissingDependency: ONNX Runtime is not installed, and the format is "onnx".
    """
    start = time.perf_counter()
    stages = Stages(name)
    if beside is None:
        _require_free(stages, repository, overwrite=overwrite)
    else:
        _require_free_beside(stages, repository, beside=beside, overwrite=overwrite)
    with progress.stage("loading torch, transformers and onnx"):
        from genserve.export.checkpoint_reader import locate, read_checkpoint
        from genserve.export.conversion import convert
        from genserve.export.parity import check_parity
        from genserve.export.source_model import run_source

        if file_format == "onnx":
            import_onnxruntime()    # runs the graph beside its source; better missed now than then
    path = locate(source)  # outside of a stage: the hub shows its own bars
    with progress.stage("reading the checkpoint"):
        checkpoint = read_checkpoint(path, source=Path(source).resolve().name)
        conversion = convert(
            checkpoint, stages=stages, form=Form(file_format), precision=precision, kv_cache=kv_cache
        )
    folders = conversion.folders
    with writing_into(repository), staging_folder(repository, stages) as staged:
        if beside is not None:
            folders.require_agreeing_config(repository, beside=True)
        else:
            if not overwrite:
                folders.require_agreeing_config(repository)
            folders.write(staged, repository=repository)
        with progress.stage("running the source", total=folders.dimensions.num_layers) as advance:
            reference = run_source(
                folders.checkpoint,
                context_length=folders.dimensions.context_length,
                norms=conversion.norms,
                advance=advance,
            )
        weights = conversion.write_graph(staged, reference=reference, progress=progress)
        with progress.stage("comparing with the source"):
            parity = check_parity(
                reference,
                weights,
                form=folders.form,
                precision=folders.precision,
                kv_cache=kv_cache,
                source=checkpoint.source,
            )
        size_bytes = sum(path.stat().st_size for path in weights.glob(f"{folders.form.file_name}*"))
        if beside is None:
            install(staged, repository, stages, overwrite=overwrite)
        else:
            install_beside(staged, repository, stages, beside=beside)
    return ExportReport(
        name=name,
        precision=folders.precision,
        kv_cache=kv_cache,
        seconds=time.perf_counter() - start,
        largest_logit_difference=parity.largest_logit_difference,
        top1_agreement=parity.top1_agreement,
        perplexity_ratio=parity.perplexity_ratio,
        divergence=parity.divergence,
        size_bytes=size_bytes,
        path=repository / name,
    )


def _require_free(stages: Stages, repository: Path, *, overwrite: bool) -> None:
    if stages.have_weights(repository) and not overwrite:
        raise ExportError(
            f"the weights of {stages.ensemble!r} are in {repository} already",
            remedy="--overwrite replaces them; or export under another --name, or --beside them",
        )


def _require_free_beside(stages: Stages, repository: Path, *, beside: str, overwrite: bool) -> None:
    folder = stages.beside(repository, beside)
    if not stages.have_weights(repository):
        raise ExportError(
            f"there is no model {stages.ensemble!r} in {repository} to put a graph beside",
            remedy="export it first, without --beside",
        )
    if folder.exists() and not overwrite:
        raise ExportError(f"{folder} is there already", remedy="--overwrite replaces it")
