"""Source: from what a person names - a folder, a file, a name on the hub - to its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.gguf_file import read_gguf
from genserve.export.hugging_face import download, read_folder

__all__ = ["locate", "read_checkpoint"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate(source: str) -> Path:
    """The folder or file of a checkpoint: that of this path, or a download of ORG/NAME from the hub.

    Raises:
        ExportError: there is nothing of the kind at `source`, or the download failed.
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and _HUB_NAME.fullmatch(source):
        return download(source)
    raise ExportError(
        f"{source!r} is no checkpoint",
        remedy="give a folder with config.json and *.safetensors, a .gguf file, or ORG/NAME on the hub",
    )


def read_checkpoint(path: Path, *, source: str) -> Checkpoint:
    """Open the Hugging Face folder or the GGUF file at `path`; `source` is its name for messages.

    Raises:
        ExportError: it cannot be read.
    """
    if path.is_dir():
        return read_folder(path, source=source)
    return read_gguf(path, source=source)
