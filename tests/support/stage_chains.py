"""The tiny model with a logits stage of another kind."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch

from tests.backends.networks import save_torchscript
from tests.support.transformers_reference import reference_model

__all__ = ["WHOLE_CONFIG", "add_chain", "whole_torchscript"]

# The config as it is written for Triton, where TorchScript's inputs have numbers.
WHOLE_CONFIG = """
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_INT64 dims: [ -1 ] },
        { name: "INPUT__1" data_type: TYPE_INT64 dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1, 320 ] } ]
parameters [ { key: "max_sequence_length" value: { string_value: "128" } } ]
"""


class Whole(torch.nn.Module):
    """Ids and mask [batch, sequence] to logits [batch, sequence, vocabulary], as users trace them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def whole_torchscript(path: Path, checkpoint: Path) -> Path:
    """The checkpoint's model without a KV cache, traced."""
    example = torch.ones((2, 3), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing reads everything deprecated in transformers
        return save_torchscript(path, Whole(reference_model(checkpoint)), example=(example, example))


def add_chain(
    tiny_repository: Path,
    root: Path,
    *,
    name: str,
    logits_config: str,
    input_ids: str = "input_ids",
    logits: str = "logits",
) -> Path:
    """Copy the tiny model's stages as `name`; return the empty version folder of its logits stage.

    Args:
        tiny_repository: a repository with the model `tiny`.
        root: the folder of the repository to write into.
        name: the name of the new ensemble.
        logits_config: the config.pbtxt of its logits stage.
        input_ids: the logits stage's name for its input.
        logits: the logits stage's name for its output.
    """
    for stage in ("", "_tokenizer", "_decoder"):
        shutil.copytree(tiny_repository / f"tiny{stage}", root / f"{name}{stage}")
        config = root / f"{name}{stage}" / "config.pbtxt"
        text = config.read_text().replace('"tiny', f'"{name}')
        text = text.replace("max_batch_size: 32", "max_batch_size: 8")
        text = text.replace('input_map { key: "input_ids"', f'input_map {{ key: "{input_ids}"')
        text = text.replace('output_map { key: "logits"', f'output_map {{ key: "{logits}"')
        config.write_text(text)
    version = root / f"{name}_logits" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(logits_config)
    return version
