"""Pickled weights: checkpoints in PyTorch's .bin format, read without running what a pickle may hold."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from genserve.errors import ExportError

__all__ = ["open_pickled"]


def open_pickled(files: Iterable[Path]) -> Mapping[str, torch.Tensor]:
    """The tensors of some .bin files by name, mapped into memory and read when they are looked at.

    Raises:
        ExportError: a file is broken, has more than tensors in it, or is of before PyTorch 1.6.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not all(isinstance(value, torch.Tensor) for value in loaded.values()):
                raise TypeError("what is not a tensor is no weight")
            tensors |= loaded
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError, TypeError) as error:
            raise ExportError(
                f"{path} is broken, or holds more than plain tensors, which could run code when it is read",
                remedy="convert it to safetensors: transformers' from_pretrained(...).save_pretrained(...)",
            ) from error
    return tensors
