"""Exporter: converts a checkpoint into a model in a repository."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.backends.libraries import import_onnxruntime, require_export_packages
from genserve.errors import ExportError
from genserve.export.export_options import (
    ENCODER_TYPES,
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
    max_sequence_length: int | None = None,
    beside: str | None = None,
    overwrite: bool = False,
    allow_pickled_weights: bool = False,
    delete_download: bool = False,
    adapters: Sequence[Path] = (),
    progress: Progress,
) -> ExportReport:
    """Convert a checkpoint into the ensemble `name` and its three stages, and compare it with its source.

    The model is installed only if the comparison passes. Existing configs and model.py files stay.

    Args:
        source: a Hugging Face folder, a .gguf file, or ORG/NAME on the Hugging Face hub, ORG/NAME:Q4_K_M for
            one of its GGUF files.
        repository: the model repository; created if missing.
        name: the name that the model gets in the repository.
        file_format: the format of the logits stage's file.
        precision: the number format of weights and activations, see `quantization.py`; None: int8 in ONNX,
            fp32 otherwise.
        kv_cache: float is fp16, or fp32 in an fp32 export; int8 needs an ONNX graph of a known family.
        pipeline_stages: the number of graphs with a part of the layers each; more than one needs an ONNX
            graph of a known family.
        max_sequence_length: the tokens of a sequence that the config allows; None: the model's own context.
        beside: add only the graph to an existing model, in a folder of this name next to its model.onnx.
            `default_model_filename` of the logits stage selects a graph, set by hand or by `genserve tune`.
        overwrite: replace weights, tokenizer and their configs; with `beside`, the graph of that name.
        allow_pickled_weights: read weights in PyTorch's .bin files, if there are no others.
        delete_download: delete from the hub's cache what was downloaded for the model: each shard of the
            weights once it is converted, and the rest once the model is installed.
        adapters: LoRA or DoRA adapters to merge, each into the result of those before it: folders of PEFT, or
            GGUF files of llama.cpp. The merged model is the source of the comparison.
        progress: displays the tasks of the export.

    Raises:
        ExportError: an argument is not usable, the weights exist, the repository is not writable, or the
            exported graph is too far from its source.
        MissingDependency: there is no recording of the source, and a package of the extra `export` is not
            installed; or the format is "onnx", and ONNX Runtime is not installed.
    """
    started_s = time.perf_counter()
    folders = ModelFolders(name)
    _require_free(folders, repository, beside=beside, overwrite=overwrite)
    if file_format == "onnx":
        import_onnxruntime()  # fail now rather than in the check, which runs the graph
    from genserve.export.adapters.adapter_reader import with_adapters
    from genserve.export.checkpoint_reader import read_checkpoint
    from genserve.export.conversion import convert, write_model
    from genserve.export.hub import forget_download, locate

    # Outside a task, since the hub displays its own progress.
    path = locate(source, allow_pickled_weights=allow_pickled_weights)
    is_download = not Path(source).expanduser().exists()
    recording = _find_recording(path, file_format=file_format, is_changed=bool(adapters), progress=progress)
    with progress.task("reading the checkpoint"):
        checkpoint = read_checkpoint(
            path,
            source=Path(source).resolve().name,
            allow_pickled_weights=allow_pickled_weights,
            deletes_shards=delete_download and is_download,
        )
        checkpoint = with_adapters(checkpoint, adapters)
        conversion = convert(
            checkpoint,
            recording=recording,
            folders=folders,
            export_format=ExportFormat(file_format),
            precision=precision,
            kv_cache=kv_cache,
            pipeline_stages=pipeline_stages,
        )
        conversion = replace(conversion, layout=conversion.layout.limited(max_sequence_length))
    report = write_model(
        conversion, repository, beside=beside, overwrite=overwrite, progress=progress, started_s=started_s
    )
    if delete_download and is_download:
        forget_download(path)
    return report


def is_adapter(source: str) -> bool:
    """Whether a source is the folder of an adapter of PEFT, without the model that it is for."""
    folder = Path(source).expanduser()
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists()


def is_encoder(source: str) -> bool:
    """Whether a source is the folder of an encoder, such as BERT, or of any model with a pooling."""
    folder = Path(source).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    is_pooled = (folder / "modules.json").exists()  # of sentence-transformers
    return isinstance(config, dict) and (is_pooled or config.get("model_type") in ENCODER_TYPES)


def _find_recording(
    path: Path, *, file_format: FileFormat, is_changed: bool, progress: Progress
) -> Recording | None:
    """Return the recording of a source; without one, import what runs the source, and return None.

    `is_changed`: adapters are merged into the source.
    """
    from genserve.export.reference import find_recording

    recording = find_recording(path) if path.is_file() and not is_changed else None
    if recording is None or file_format == "torchscript":
        require_export_packages(f"exporting {path.name}")
        with progress.task("loading torch and transformers"):
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
