"""Adapters: random ones in the format of PEFT, and transformers' models that compute with them unmerged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.support.transformers_reference import reference_model

__all__ = ["adapted_model", "write_adapter"]

_PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    base: Path,
    *,
    targets: Sequence[str],
    saved: Sequence[str] = (),
    rank: int = 4,
    ranks: Mapping[str, int] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write an adapter as PEFT 0.21 saves it, with random tensors in place of zeros and trained ones.

    Args:
        folder: the folder.
        base: the folder of the model.
        targets: the ends of the names of modules that get a low-rank product.
        saved: the ends of the names of modules that are saved as a whole (`modules_to_save`).
        rank: the rank of the products that `ranks` (`rank_pattern`) does not name.
        ranks: ranks by the ends of names.
        seed: the seed of the random numbers.
        config: further fields of adapter_config.json.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, 0.3, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(tuple(saved)):
            for part, tensor in module.state_dict().items():
                tensors[f"{name}.{part}"] = tensor + random(*tensor.shape) / 3
        if not name.endswith(tuple(targets)):
            continue
        is_embedding = isinstance(module, torch.nn.Embedding)
        inputs, outputs = module.weight.shape
        if isinstance(module, torch.nn.Linear):
            inputs, outputs = outputs, inputs
        own = next((each for end, each in (ranks or {}).items() if name.endswith(end)), rank)
        down, up = ("embedding_A", "embedding_B") if is_embedding else ("A.weight", "B.weight")
        tensors[f"{name}.lora_{down}"] = random(own, inputs)
        tensors[f"{name}.lora_{up}"] = random(outputs, own)
        if config.get("use_dora"):
            tensors[f"{name}.lora_magnitude_vector"] = 1 + random(outputs).abs()
        if config.get("lora_bias"):
            tensors[f"{name}.lora_B.bias"] = random(outputs)
        if config.get("bias") == "lora_only":
            tensors[f"{name}.base_layer.bias"] = random(outputs)
    folder.mkdir(parents=True)
    named = {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 6,
        "target_modules": list(targets),
        "modules_to_save": list(saved) or None,
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": {},
        "use_rslora": False,
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),
        "bias": "none",
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def adapted_model(base: Path, folder: Path) -> PreTrainedModel:
    """The model with hooks that add the low-rank products to the results of its modules."""
    model = reference_model(base)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parts = {
            part.removeprefix(f"{name}."): tensor
            for part, tensor in tensors.items()
            if part.startswith(f"{name}.") and name
        }
        for part in ("weight", "bias"):
            saved = parts.get(part, parts.get(f"base_layer.{part}"))
            if saved is not None:
                setattr(module, part, torch.nn.Parameter(saved))    # no longer tied to another
        if any(part.startswith("lora_") for part in parts):
            _hook(module, name, parts, config=config)
    return model


def _hook(module: Any, name: str, parts: Mapping[str, torch.Tensor], *, config: Mapping[str, Any]) -> None:
    is_embedding = "lora_embedding_A" in parts
    down, up = (
        parts[f"lora_embedding_{each}" if is_embedding else f"lora_{each}.weight"] for each in "AB"
    )
    patterns = config["alpha_pattern"].items()
    alpha = next((a for end, a in patterns if re.search(rf"{end}$", name)), config["lora_alpha"])
    scale = alpha / (len(down) ** 0.5 if config["use_rslora"] else len(down))
    extra = parts.get("lora_B.bias", torch.zeros(len(up)))
    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T   # [outputs, inputs]
    factors = torch.ones(len(up))
    if "lora_magnitude_vector" in parts:
        factors = parts["lora_magnitude_vector"] / (weight + scale * up @ down).norm(dim=1)

    def adapt(_module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        low = down.T[args[0]] if is_embedding else args[0] @ down.T
        bias = getattr(module, "bias", None)
        bias = torch.zeros(len(up)) if bias is None else bias
        return factors * (output - bias + scale * low @ up.T) + bias + scale * extra

    module.register_forward_hook(adapt)
