"""Exporter: from a checkpoint to a model of a repository, in one call."""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

from genserve.errors import ExportError
from genserve.export.progress import Progress
from genserve.export.report import ExportReport, Precision
from genserve.export.stages import Stages
from genserve.export.staging import install, staging_folder

__all__ = ["export_model"]


def export_model(
    source: str,
    *,
    repository: Path,
    name: str,
    precision: Precision = "int8",
    overwrite: bool = False,
    progress: Progress,
) -> ExportReport:
    """Turn a checkpoint into the four stages of the model `name`, checked against its source.

    Nothing appears in the repository before the check has passed; configs and model.py that are there stay.

    Args:
        source: a Hugging Face folder, a .gguf file, or ORG/NAME on the Hugging Face hub.
        repository: the model repository; made if it is not there.
        name: of the model in the repository.
        precision: of weights and activations, see `precision.py`.
        overwrite: replace the weights, the tokenizer and their configs if they are there.
        progress: is shown the stages of the work.

    Raises:
        ExportError: the name, the source or the precision cannot be used, the weights are there already, or
            the exported graph is too far from its source.
    """
    start = time.perf_counter()
    stages = Stages(name)
    _require_free(stages, repository, precision=precision, overwrite=overwrite)
    with progress.stage("loading torch, transformers and onnx"):
        from genserve.export.conversion import Conversion
        from genserve.export.parity import check_parity
        from genserve.export.source import locate, read_checkpoint
    path = locate(source)  # outside of a stage: the hub shows its own bars
    with progress.stage("reading the checkpoint"):
        checkpoint = read_checkpoint(path, source=Path(source).resolve().name)
        conversion = Conversion.of(checkpoint, stages=stages, precision=precision)
    with staging_folder(repository, stages) as staged:
        if not overwrite:
            conversion.require_agreeing_config(repository)
        conversion.write_files(staged)
        with progress.stage(f"converting to {precision}", total=conversion.dimensions.num_layers) as advance:
            weights = conversion.write_graph(staged, advance=advance)
        with progress.stage("comparing with the source"):
            parity = check_parity(
                conversion.checkpoint, weights, precision=precision, dimensions=conversion.dimensions
            )
        size_bytes = sum(path.stat().st_size for path in weights.glob("model.onnx*"))
        install(staged, repository, stages, overwrite=overwrite)
    return ExportReport(
        name=name,
        precision=precision,
        seconds=time.perf_counter() - start,
        largest_logit_difference=parity.largest_logit_difference,
        top1_agreement=parity.top1_agreement,
        size_bytes=size_bytes,
        path=repository / name,
    )


def _require_free(stages: Stages, repository: Path, *, precision: Precision, overwrite: bool) -> None:
    if precision not in get_args(Precision):
        raise ExportError(
            f"{precision!r} is no precision", remedy=f"known: {', '.join(get_args(Precision))}"
        )
    if stages.have_weights(repository) and not overwrite:
        raise ExportError(
            f"the weights of {stages.ensemble!r} are in {repository} already",
            remedy="--overwrite replaces them; or export under another --name",
        )
