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

__all__ = ["Checkpoint", "FloatArray", "read_checkpoint"]

FloatArray = NDArray[np.float32]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as its authors published it; the words are those of Hugging Face's folders."""

    source: str                             # the base name of the folder or file, for messages
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


def read_checkpoint(source: str) -> Checkpoint:
    """Open a checkpoint: a Hugging Face folder, a GGUF file, or the name of a model on the hub.

    Raises:
        ExportError: there is nothing of the kind at `source`, or it cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        from genserve.export.hugging_face import read_folder

        return read_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        from genserve.export.gguf_file import read_gguf

        return read_gguf(path)
    if not path.exists() and _HUB_NAME.fullmatch(source):
        from genserve.export.hugging_face import read_hub

        return read_hub(source)
    raise ExportError(
        f"{source!r} is no checkpoint",
        remedy="give a folder with config.json and *.safetensors, a .gguf file, or ORG/NAME on the hub",
    )
