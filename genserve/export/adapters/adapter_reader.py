"""Adapter reader: opens an adapter as PEFT or llama.cpp writes it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genserve.errors import ExportError
from genserve.export.adapters.adapter import Adapter, Difference, LowRank, Replacement, merged
from genserve.export.adapters.gguf_adapter import read_gguf_adapter
from genserve.export.checkpoint_reader import (
    Tensors,
    open_safetensors_file,
    present_tokenizer_files,
    read_json,
)
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.families import family_of
from genserve.export.families.text_part import TEXT_PREFIXES
from genserve.sampling.logits_array import FloatArray
from genserve.textmodel.peft_adapter import (
    CONFIG,
    LOW_RANK,
    PREFIX,
    WEIGHTS,
    changes_model,
    other_product,
    scale_of,
)

_MERGE = (
    "merge it with PEFT, PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(FOLDER), and "
    "export that folder"
)


def with_adapters(checkpoint: Checkpoint, paths: Iterable[Path]) -> Checkpoint:
    """Return the checkpoint with the adapters at `paths` merged, each into the result of those before it.

    Raises:
        ExportError: an adapter is missing or broken, is of a kind that cannot be merged, or was trained on
            another model.
    """
    for path in paths:
        family = family_of(checkpoint.config)
        completed = checkpoint if family is None else family.completed(checkpoint)
        checkpoint = merged(completed, _read_adapter(path, completed))
    return checkpoint


def _read_adapter(path: Path, checkpoint: Checkpoint) -> Adapter:
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf_adapter(path, checkpoint)
    if (path / CONFIG).is_file():
        return _read_folder(path, checkpoint)
    raise ExportError(
        f"{path} is not an adapter" + ("" if path.exists() else ": there is no such file or folder"),
        remedy=f"give a folder with {CONFIG} and {WEIGHTS}, or a .gguf file with an adapter",
    )


def _read_folder(folder: Path, checkpoint: Checkpoint) -> Adapter:
    """Read an adapter of PEFT. Source: `LoraModel`, `Linear` and `Embedding` in its tuners/lora."""
    config = read_json(folder / CONFIG)
    _require_mergeable(config, folder=folder)
    if not (folder / WEIGHTS).is_file():
        raise ExportError(
            f"{folder} has no {WEIGHTS}",
            remedy="save the adapter in safetensors, with PEFT's save_pretrained",
        )
    tensors = open_safetensors_file(folder / WEIGHTS)
    own_names = {name.removeprefix(PREFIX): name for name in tensors.files}
    low_rank: dict[str, dict[str, str]] = {}
    replaced: dict[str, Replacement] = {}
    for name, own_name in own_names.items():
        if match := LOW_RANK.fullmatch(name):
            low_rank.setdefault(match["module"], {})[match["part"]] = own_name
        else:
            tensor = _in_text_part(name.replace(".base_layer.", "."), checkpoint)
            replaced[tensor] = _replacement(tensors, own_name)
    modules: dict[str, _Module] = {}
    for own_name, names in low_rank.items():
        module = _in_text_part(own_name, checkpoint)
        modules[module] = _module(names, tensors, own_name=own_name, config=config, folder=folder)
    transposed = _transposed(modules, checkpoint, is_stated=bool(config.get("fan_in_fan_out")))
    added: dict[str, LowRank | Difference] = {}
    for module, found in modules.items():
        added[f"{module}.weight"] = found.low_rank(is_transposed=module in transposed)
        if found.bias is not None:
            added[f"{module}.bias"] = Difference(found.bias)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return Adapter(
        source=folder.resolve().name,
        base=str(config.get("base_model_name_or_path") or ""),
        replaced=replaced,
        added=added,
        keeps_tied=bool(config.get("ensure_weight_tying")),
        tokenizer_files=present_tokenizer_files(folder) if has_tokenizer else {},
    )


def _require_mergeable(config: Mapping[str, Any], *, folder: Path) -> None:
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        raise ExportError(f"{folder} has an adapter of the type {kind}; only LoRA is merged", remedy=_MERGE)
    if (name := other_product(config)) is not None:
        raise ExportError(f"{folder / CONFIG} has {name}, which cannot be merged", remedy=_MERGE)
    if changes_model(config):
        raise ExportError(
            f"the adapter in {folder} was initialized by {config['init_lora_weights']!r}, which changes the "
            "model too",
            remedy="save it with path_initial_model_for_weight_conversion of PEFT, for a plain LoRA",
        )


def _in_text_part(name: str, checkpoint: Checkpoint) -> str:
    """Return the name in the text model, for an adapter of a model with images or sound too."""
    for prefix, alone in TEXT_PREFIXES.items():
        if name.startswith(prefix) and not any(known.startswith(prefix) for known in checkpoint.tensor_names):
            return alone + name.removeprefix(prefix)
    return name


def _replacement(tensors: Tensors, name: str) -> Replacement:
    return Replacement(tensors.shape(name), lambda rows: tensors.load(name, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """The parts of a module's adapter."""

    down: FloatArray                # A: [rank, inputs], or [rank, tokens]
    up: FloatArray                  # B: [outputs, rank], multiplied by the scale
    bias: FloatArray | None         # [outputs], multiplied by the scale
    magnitude: FloatArray | None    # [outputs]
    is_embedding: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a weight [outputs, inputs]."""
        return len(self.up), self.down.shape[1]

    def low_rank(self, *, is_transposed: bool) -> LowRank:
        """Return the change of a weight [outputs, inputs]; `is_transposed`: of one [inputs, outputs]."""
        return LowRank(
            left=self.down.T if is_transposed else self.up,
            right=self.up.T if is_transposed else self.down,
            magnitude=self.magnitude,
            magnitude_of="columns" if is_transposed else "rows",
        )


def _module(
    names: Mapping[str, str], tensors: Tensors, *, own_name: str, config: Mapping[str, Any], folder: Path
) -> _Module:
    """Read the adapter of a module; `names` has the names of its parts in the file."""

    def read(*parts: str) -> FloatArray | None:
        return next((tensors.load(names[part], slice(None)) for part in parts if part in names), None)

    down, up = read("lora_A.weight", "lora_embedding_A"), read("lora_B.weight", "lora_embedding_B")
    is_whole = down is not None and up is not None and down.ndim == up.ndim == 2
    if down is None or up is None or not is_whole or not len(down) or len(down) != up.shape[1]:
        raise ExportError(
            f"{folder / WEIGHTS} does not have two matrices of the same rank for {own_name!r}",
            remedy="save the adapter again; distributed training must gather its parts first",
        )
    magnitude, bias = read("lora_magnitude_vector"), read("lora_B.bias")
    if magnitude is not None and magnitude.shape != up.shape[:1]:
        raise ExportError(
            f"{folder / WEIGHTS} has not one magnitude for each of the {len(up)} outputs of {own_name!r}",
            remedy=_MERGE,
        )
    scale = _scale(own_name, len(down), config=config, folder=folder)
    return _Module(
        down=down,
        up=up * scale,
        bias=None if bias is None else bias * scale,
        magnitude=magnitude,
        is_embedding="lora_embedding_A" in names,
    )


def _transposed(
    modules: Mapping[str, _Module], checkpoint: Checkpoint, *, is_stated: bool
) -> Collection[str]:
    """Return the modules whose weights are [inputs, outputs]: embeddings, and the Conv1D of GPT-2.

    `fan_in_fan_out` of the config is that of the last module, and shapes do not tell about a square weight.
    """
    shapes = {
        module: checkpoint.shape(f"{module}.weight")
        for module, found in modules.items()
        if f"{module}.weight" in checkpoint.tensor_names and not found.is_embedding
    }
    certain = {
        module for module, shape in shapes.items() if shape == modules[module].shape[::-1] != shape[::-1]
    }
    is_square = {module for module, shape in shapes.items() if shape == shape[::-1]}
    conv1d = certain | (is_square if is_stated or certain else set())
    return conv1d | {module for module, found in modules.items() if found.is_embedding}


def _scale(module: str, rank: int, *, config: Mapping[str, Any], folder: Path) -> np.float32:
    """Return the factor of a module's low-rank product; see `scale_of`."""
    try:
        return scale_of(module, rank, config=config)
    except (AttributeError, KeyError, TypeError, re.error) as error:
        raise ExportError(
            f"{folder / CONFIG} does not state lora_alpha or alpha_pattern as PEFT writes them",
            remedy="download the adapter again",
        ) from error
