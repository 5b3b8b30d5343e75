"""GGUF adapter: reads an adapter as llama.cpp's convert_lora_to_gguf.py writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from genserve.errors import ExportError
from genserve.export.adapters.adapter import Adapter, LowRank, Replacement
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.families import FAMILIES, family_of
from genserve.export.families.family import Family
from genserve.export.gguf.architectures import GGUF_ARCHITECTURES
from genserve.export.gguf.gguf_checkpoint import module_names, open_gguf
from genserve.export.gguf.gguf_file import GgufFile, GgufTensor
from genserve.sampling.logits_array import FloatArray
from genserve.textmodel.peft_adapter import CONFIG, MERGE_REMEDY, PREFIX, WEIGHTS

_DOWN, _UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"


def read_gguf_adapter(path: Path, checkpoint: Checkpoint) -> Adapter:
    """Read the adapter in a GGUF file, for a checkpoint with the names of transformers' modules.

    Raises:
        ExportError: the file is broken, has no LoRA adapter, or one for another architecture.
    """
    family = family_of(checkpoint.config)
    file, architecture = _open(path, family=family, base=checkpoint.source)
    assert family is not None
    return _read(
        file,
        architecture,
        path=path,
        config=_completed(checkpoint.config),
        num_layers=family.decoder(checkpoint.config).dimensions.num_layers,
        has_two_norms=any(name.endswith(".ln_mlp.weight") for name in checkpoint.tensor_names),
    )


def convert_gguf_adapter(
    path: Path, folder: Path, *, base: str, family: str, config: Mapping[str, int]
) -> None:
    """Write the adapter in a GGUF file as PEFT saves it.

    Args:
        path: the file.
        folder: the folder to write into.
        base: the name of the model that it is for, in messages.
        family: the family of the model.
        config: the sizes of the model, by their names in config.json: `num_hidden_layers`, `head_dim`,
            `num_attention_heads` and `num_key_value_heads`.

    Raises:
        ExportError: the file is broken, has no LoRA adapter, or one for another architecture; or the adapter
            replaces tensors, which a request cannot choose.
    """
    from safetensors.numpy import save_file

    own_family = next((each for each in FAMILIES.values() if each.name == family), None)
    file, architecture = _open(path, family=own_family, base=base)
    adapter = _read(file, architecture, path=path, config=config, num_layers=config["num_hidden_layers"])
    if not adapter.added and not adapter.replaced:
        raise ExportError(f"{path} has no tensors of an adapter", remedy="convert the adapter again")
    if adapter.replaced:
        raise ExportError(
            f"the adapter {path.name} replaces {next(iter(adapter.replaced))}, which a request cannot choose",
            remedy=MERGE_REMEDY,
        )
    tensors: dict[str, FloatArray] = {}
    ranks: dict[str, int] = {}
    for name, change in adapter.added.items():
        assert isinstance(change, LowRank)
        module = name.removesuffix(".weight")
        ranks[module] = len(change.right)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(change.right)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(change.left)
    save_file(tensors, folder / WEIGHTS)
    rank = max(ranks.values(), default=0)
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,  # B is multiplied by the scale
        "alpha_pattern": {re.escape(module): own for module, own in ranks.items() if own != rank},
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _open(path: Path, *, family: Family | None, base: str) -> tuple[GgufFile, str]:
    """Return the file of an adapter for a family, and its architecture."""
    file = open_gguf(path)
    return file, _architecture(file, path=path, family=family, base=base)


def _read(
    file: GgufFile,
    architecture: str,
    *,
    path: Path,
    config: Mapping[str, Any],
    num_layers: int,
    has_two_norms: bool = False,
) -> Adapter:
    translation = GGUF_ARCHITECTURES[architecture]
    names, _, differences = module_names(
        architecture, translation.architecture, num_layers=num_layers, has_two_norms=has_two_norms
    )
    alpha = float(file.metadata.get("adapter.lora.alpha", 0.0))
    replaced: dict[str, Replacement] = {}
    added: dict[str, LowRank] = {}
    for own_name, tensor in file.tensors.items():
        weight = own_name.removesuffix(_DOWN).removesuffix(_UP)
        module, _, part = weight.rpartition(".")
        name = f"{names.get(module, module)}.{part}"
        if own_name.endswith(_DOWN):
            up = file.tensors.get(f"{weight}{_UP}")
            low = _low_rank(tensor, up, weight=weight, alpha=alpha, path=path)
            order = translation.row_order(name, config)
            # Matrices of another size are refused when they are merged.
            fits = order is not None and len(order) == len(low.left)
            added[name] = replace(low, left=low.left[order]) if fits else low
        elif not own_name.endswith(_UP):  # a norm, as mergekit extracts them
            values = tensor.read() - np.float32(names.get(module) in differences)
            replaced[name] = _replacement(values)
    return Adapter(source=path.name, replaced=replaced, added=added)


def _architecture(file: GgufFile, *, path: Path, family: Family | None, base: str) -> str:
    """Return the architecture of the file, which must be of the family of its base."""
    kind, form = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != "adapter" or form != "lora":
        found = f"an adapter of the type {form!r}" if kind == "adapter" else "no adapter"
        raise ExportError(
            f"{path} has {found}; only LoRA is merged",
            remedy="name a file that llama.cpp's convert_lora_to_gguf.py has written",
        )
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ExportError(
            f"{path} has an adapter that begins at a certain token, which cannot be merged",
            remedy="merge a plain LoRA",
        )
    name = str(file.metadata.get("general.architecture"))
    translation = GGUF_ARCHITECTURES.get(name)
    if translation is None or family is None or FAMILIES[translation.architecture] is not family:
        raise ExportError(
            f"the adapter {path.name} is for the architecture {name!r}, which is not {base}'s",
            remedy="export the model that the adapter was trained on; or give the adapter as PEFT's folder",
        )
    return name


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the defaults of transformers."""
    from transformers import AutoConfig

    completed: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    return completed


def _low_rank(down: GgufTensor, up: GgufTensor | None, *, weight: str, alpha: float, path: Path) -> LowRank:
    """Return a change, whose scale is 1 if the file states no alpha. Source: `llama_adapter_lora_weight`."""
    if up is None or len(down.shape) != 2 or len(up.shape) != 2:
        raise _broken(weight, path)
    # The matrix of an embedding has a row for each token.
    is_embedding = weight == _EMBEDDING
    left, right = (down.read(), up.read().T) if is_embedding else (up.read(), down.read())
    rank = left.shape[1]
    if not rank or rank != len(right):
        raise _broken(weight, path)
    if alpha:
        left = left * np.float32(alpha / rank)
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ExportError(
            f"{path} has numbers that are not finite for {weight!r}",
            remedy="train the adapter with a lower learning rate, or take an earlier checkpoint of it",
        )
    return LowRank(left=left, right=right)


def _broken(weight: str, path: Path) -> ExportError:
    return ExportError(
        f"{path} does not have two matrices of the same rank for {weight!r}",
        remedy="convert the adapter again",
    )


def _replacement(values: FloatArray) -> Replacement:
    return Replacement(values.shape, lambda rows: values[rows])
