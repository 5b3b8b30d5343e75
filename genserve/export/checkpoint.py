"""Checkpoint: weights, configuration and tokenizer of a trained model, from any source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.errors import ExportError
from genserve.sampling.logits_array import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as its authors published it, in the format of a Hugging Face folder."""

    source: str                             # the name of the folder or file, without its path
    config: Mapping[str, Any]               # config.json
    tensor_names: frozenset[str]
    load: Callable[[str], FloatArray]       # reads one tensor, again at each call
    tokenizer_files: Mapping[str, bytes]    # by file name: tokenizer.json, tokenizer_config.json ...

    def tensor(self, name: str) -> FloatArray:
        """Return the tensor of that name as float32.

        Raises:
            ExportError: the checkpoint has no such tensor.
        """
        if name not in self.tensor_names:
            raise ExportError(
                f"{self.source} has no tensor {name!r}",
                remedy="the checkpoint is incomplete, or its config names another architecture",
            )
        return self.load(name)
