"""Checkpoint: weights, configuration and tokenizer of a trained model, wherever they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError

__all__ = ["Checkpoint", "FloatArray", "locate", "read_checkpoint"]

FloatArray = NDArray[np.float32]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as its authors published it; the words are those of Hugging Face's folders."""

    source: str                             # the name of the folder or file, without its place
    config: Mapping[str, Any]               # config.json
    tensor_names: frozenset[str]
    load: Callable[[str], FloatArray]       # reads one tensor anew each time
    tokenizer_files: Mapping[str, bytes]    # by file name: tokenizer.json, tokenizer_config.json ...

    def tensor(self, name: str) -> FloatArray:
        """The tensor of that name as float32.

        Raises:
            ExportError: the checkpoint has no such tensor.
        """
        if name not in self.tensor_names:
            raise ExportError(
                f"{self.source} has no tensor {name!r}",
                remedy="the checkpoint is incomplete, or not of the architecture that its config names",
            )
        return self.load(name)


def locate(source: str) -> Path:
    """The folder or file of a checkpoint: that of this path, or a download of ORG/NAME from the hub.

    Raises:
        ExportError: there is nothing of the kind at `source`, or the download failed.
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and _HUB_NAME.fullmatch(source):
        from genserve.export.hugging_face import download

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
        from genserve.export.hugging_face import read_folder

        return read_folder(path, source=source)
    from genserve.export.gguf_file import read_gguf

    return read_gguf(path, source=source)
