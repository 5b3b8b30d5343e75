"""Quantized checkpoint: gives the weights that a Hugging Face folder has quantized their names again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.quantized_formats import (
    BITS,
    QuantizedTensors,
    TensorReader,
    is_part,
    module_of,
)
from genserve.kernels.blocks import BLOCK_FORMATS
from genserve.sampling.logits_array import FloatArray

_KEYS = ("quantization_config", "compression_config")   # of config.json
# The methods that are read, with a key of their configs and its values; "": the key is absent.
METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # "auto_round" alone does not tell whether 1 was subtracted from zero points.
    "auto-round": ("packing_format", ("auto_round:auto_awq", "auto_round:auto_gptq")),
    "awq": ("version", ("", "gemm", "exllama", "ipex")),
    "bitsandbytes": ("format", ("",)),
    "compressed-tensors": (
        "format",
        (
            "", "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized",
            "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
        ),
    ),
    "fbgemm_fp8": ("format", ("",)),
    "fp8": ("fmt", ("", "e4m3")),
    "gptq": ("checkpoint_format", ("", "gptq", "gptq_v2")),
    "mxfp4": ("format", ("",)),
}  # fmt: skip


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the description of quantized weights in a config.json; None: there is none."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in _KEYS:
            if found := part.get(key):
                return found if isinstance(found, Mapping) else {"quant_method": found}
    return None


def require_readable(quantization: Mapping[str, Any], *, source: str) -> None:
    """Reject weights that are quantized in a format that cannot be read.

    Raises:
        ExportError: the format is not known; the message names it.
    """
    method = quantization.get("quant_method")
    _require_objects(quantization, source=source)
    stated = _stated_bits(quantization)
    bits = next((bits for bits in stated if bits not in BITS), next(iter(stated), None))
    key, known = METHODS.get(str(method), ("", ()))
    value, sparsity = quantization.get(key), quantization.get("sparsity_config") or {}
    # Inputs that are rotated first, or zeros that are left out.
    is_changed = quantization.get("transform_config") or sparsity.get("format", "dense") != "dense"
    if str(value or "").lower() in known and not is_changed and (bits is None or bits in BITS):
        return
    named = f"by {method or 'an unknown method'}" + (f" in {bits} bits" if bits else "")
    named += f" ({key} {value})" if value else " with a transform" if is_changed else ""
    raise ExportError(
        f"{source} has weights quantized {named}, which cannot be read",
        remedy="export the checkpoint with float weights from which it was made, for instance with "
        f"--precision int4; {', '.join(METHODS)} can be read, in 2, 4 or 8 bits",
    )


def _require_objects(quantization: Mapping[str, Any], *, source: str) -> None:
    """Reject a description whose parts are not the objects that readers look into."""
    groups = quantization.get("config_groups") or {}
    parts = {"config_groups": groups, "sparsity_config": quantization.get("sparsity_config") or {}}
    if isinstance(groups, Mapping):
        for name, group in groups.items():
            parts[f"config_groups.{name}"] = group
            weights = group.get("weights") if isinstance(group, Mapping) else None
            parts[f"config_groups.{name}.weights"] = weights or {}
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            raise ExportError(
                f"{source} has a quantization_config whose {name} is {part!r}, not an object",
                remedy="config.json is broken; download it again",
            )


def _stated_bits(quantization: Mapping[str, Any]) -> list[Any]:
    """Return the numbers of bits of weights that a description states."""
    groups = (quantization.get("config_groups") or {}).values()
    found = [(group.get("weights") or {}).get("num_bits") for group in groups]
    return [bits for bits in (quantization.get("bits"), quantization.get("w_bit"), *found) if bits]


def dequantized(checkpoint: Checkpoint, read: TensorReader) -> Checkpoint:
    """Return a checkpoint with the weights that its folder has quantized, by their names.

    Args:
        checkpoint: the folder, with the names in its files, and a config that has a `quantization_of`.
        read: reads a part of a tensor.

    Raises:
        ExportError: the format is not known, or a tensor is missing or has another shape.
    """
    quantization = quantization_of(checkpoint.config)
    assert quantization is not None
    require_readable(quantization, source=checkpoint.source)
    reader = QuantizedTensors(checkpoint=checkpoint, part=read, quantization=quantization)
    weights = dict(reader.weights())
    modules = {name.removesuffix(".weight") for name in weights}
    plain = {name for name in checkpoint.tensor_names if not is_part(name, modules, checkpoint.tensor_names)}

    def load(name: str, rows: slice) -> FloatArray:
        if name not in weights:
            return reader.plain(name, rows)
        start, stop, _ = rows.indices(weights[name].shape[0])
        return weights[name].read(start, stop)

    def release(names: Collection[str]) -> None:
        released = {name.removesuffix(".weight") for name in names if name in weights}
        checkpoint.release({
            name for name in checkpoint.tensor_names if name in names or module_of(name, released)
        })

    stored = next((found for weight in weights.values() if (found := weight.stored()) is not None), None)
    return replace(
        checkpoint,
        config=_without_quantization(checkpoint.config),
        tensor_names=frozenset(plain | weights.keys()),
        load=load,
        shape=lambda name: weights[name].shape if name in weights else checkpoint.shape(name),
        load_stored=lambda name: weights[name].stored() if name in weights else None,
        release=release,
        is_quantized=stored is not None,
        # In int8, codes of 4 bits would take twice the memory; those of 8 bits would gain speed at many rows.
        prefers_source=stored is not None and BLOCK_FORMATS[stored.kind].bits < 8,
    )


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with float weights, which transformers builds."""
    return {
        key: _without_quantization(value) if key == "text_config" and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _KEYS
    }
