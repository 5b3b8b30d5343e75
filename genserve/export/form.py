"""Form: as what a logits stage is written."""

from __future__ import annotations

from enum import Enum

__all__ = ["Form"]


class Form(Enum):
    """The kinds of files, and how each keeps its KV cache."""

    ONNX = "onnx"                   # a graph of ours, its cache written in place
    TORCHSCRIPT = "torchscript"     # a module of ours, the same
    TRACED = "traced"               # what torch exports of transformers' own model; its cache grows by copies

    @property
    def words(self) -> str:
        """What a person calls it."""
        return {"onnx": "an ONNX graph", "torchscript": "TorchScript", "traced": "a traced model"}[self.value]

    @property
    def file_name(self) -> str:
        """Of the stage's file; weights may lie beside it, under names that begin so."""
        return "model.pt" if self is Form.TORCHSCRIPT else "model.onnx"
