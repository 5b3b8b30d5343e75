"""Quantized folders: tiny checkpoints in the layouts of quantizers, packed as these pack them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

__all__ = [
    "AUTO_ROUND_AWQ", "AUTO_ROUND_GPTQ",
    "AWQ", "BNB_INT8", "FP8_BLOCKS", "FP8_CHANNELS", "FP8_TENSOR", "GPTQ", "GPTQ_2", "GPTQ_8", "GPTQ_V2",
    "INT_CHANNELS", "INT_GROUPS", "MXFP4", "NVFP4", "PACKED", "PACKED_8", "PACKED_ZEROS",
    "Quantizer", "gpt_oss_in_mxfp4", "gptq_in_order", "nf4", "pack_columns", "quantized_folder",
]  # fmt: skip

Array = NDArray[Any]
Tensors = dict[str, torch.Tensor]

# E2M1 by its bits, and the table of bitsandbytes (functional.py).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Writes the tensors of a linear layer, by their names after the module's, and returns its weight too."""

    config: dict[str, Any]          # quantization_config
    write: Callable[[Array, str], tuple[Tensors, Array]]    # of a weight [N, K] and the module's name


def quantized_folder(folder: Path, quantizer: Quantizer) -> dict[str, Array]:
    """Quantize the linear layers of a Llama in place; returns their weights as floats, by name."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantizer.config}))
    tensors: Tensors = {}
    weights: dict[str, Array] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.half()
            continue
        module = name.removesuffix(".weight")
        written, weights[name] = quantizer.write(tensor.numpy(), module)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in written.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def gpt_oss_in_mxfp4(folder: Path) -> dict[str, Array]:
    """Quantize the experts of a gpt-oss in place, as OpenAI publishes it; returns their stacks as floats."""
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    tensors: Tensors = {}
    stacks: dict[str, Array] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts = [MXFP4.write(expert, name) for expert in tensor.transpose(1, 2).numpy()]
        packed = torch.stack([parts["weight_packed"] for parts, _ in experts])
        tensors[f"{name}_blocks"] = packed.reshape(*packed.shape[:2], -1, 16)
        tensors[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts, _ in experts])
        stacks[name] = np.stack([weight.T for _, weight in experts])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return stacks


@dataclass(frozen=True, slots=True)
class Grouped:
    """(code - zero) * scale."""

    codes: Array    # [N, K], from 0
    scales: Array   # [N, groups] float16
    zeros: Array    # [N, groups]
    groups: Array   # [K]

    @property
    def weight(self) -> Array:
        scales, zeros = self.scales.astype(np.float32)[:, self.groups], self.zeros[:, self.groups]
        return ((self.codes - zeros).astype(np.float32) * scales).astype(np.float32)


def grouped(
    weight: Array, *, bits: int, group: int, zero: int | None = None, groups: Array | None = None
) -> Grouped:
    """Round to the nearest code; without `zero`, each group has its own zero point."""
    outputs, inputs = weight.shape
    groups = np.arange(inputs) // group if groups is None else groups
    top = 2**bits - 1
    scales, zeros = (np.empty((outputs, groups.max() + 1), np.float32) for _ in range(2))
    for index in range(groups.max() + 1):
        part = weight[:, groups == index]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        if zero is None:
            scales[:, index] = (high - low) / top
            zeros[:, index] = np.clip(np.round(-low / scales[:, index]), 0, top)
        else:
            scales[:, index] = np.maximum(high / (top - zero), -low / zero)
            zeros[:, index] = zero
    halves = scales.astype(np.float16)
    codes = np.round(weight / halves.astype(np.float32)[:, groups]) + zeros[:, groups]
    return Grouped(np.clip(codes, 0, top).astype(np.int64), halves, zeros.astype(np.int64), groups)


def int32(words: Array) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint64).astype(np.uint32).view(np.int32).copy())


def pack_columns(values: Array, *, bits: int, places: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack the columns of [M, N] as AutoAWQ and GPTQModel do: value i of a word is column places[i]."""
    count = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // count), np.uint64)
    for column in range(words.shape[1]):
        for i in range(count):
            value = values[:, column * count + (places[i] if places else i)]
            words[:, column] |= value.astype(np.uint64) << np.uint64(bits * i)
    return int32(words)


def write_awq(weight: Array, _module: str) -> tuple[Tensors, Array]:
    """See WQLinear_GEMM.from_linear."""
    found, places = grouped(weight, bits=4, group=64), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": pack_columns(found.codes.T, bits=4, places=places),
        "qzeros": pack_columns(found.zeros.T, bits=4, places=places),
        "scales": torch.from_numpy(found.scales.T.copy()),
    }
    return tensors, found.weight


def gptq(
    *, bits: int, group: int, version: int, zero: int | None, shuffled: Callable[[str], int] | None = None
) -> Quantizer:
    """See QuantLinear.pack of AutoGPTQ, and convert_gptq_v2_to_v1_format of GPTQModel for version 1.

    `shuffled` returns a seed for the order of a module's inputs.
    """

    def write(weight: Array, module: str) -> tuple[Tensors, Array]:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // group
        if shuffled is not None:
            groups = np.random.default_rng([shuffled(module), inputs]).permutation(groups)
        found = grouped(weight, bits=bits, group=group, zero=zero, groups=groups)
        zeros = pack_columns(found.zeros.T, bits=bits).numpy().view(np.uint32)
        if version == 1:
            zeros = zeros - np.uint32({2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits])
        tensors = {
            "qweight": pack_columns(found.codes, bits=bits).T,
            "qzeros": int32(zeros),
            "scales": torch.from_numpy(found.scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, found.weight

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled is not None}
    return Quantizer(config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}), write)


def auto_round_gptq() -> Quantizer:
    """AutoRound with the packing of GPTQ, without g_idx, and with 8 bits for some modules."""
    four, eight = (gptq(bits=bits, group=64, version=1, zero=1 << (bits - 1)) for bits in (4, 8))

    def write(weight: Array, module: str) -> tuple[Tensors, Array]:
        tensors, found = (eight if module.endswith("down_proj") else four).write(weight, module)
        del tensors["g_idx"]
        return tensors, found

    return Quantizer(_AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, write)


def gptq_in_order(seed_of: Callable[[str], int]) -> Quantizer:
    """GPTQ with `desc_act`."""
    return gptq(bits=4, group=32, version=1, zero=8, shuffled=seed_of)


def packed(
    *, bits: int, group: int | None, zero: int | None, dtype: torch.dtype = torch.bfloat16
) -> Quantizer:
    """See PackedQuantizationCompressor of compressed-tensors: codes from -2^(bits - 1), which is added."""

    def write(weight: Array, _module: str) -> tuple[Tensors, Array]:
        found = grouped(weight, bits=bits, group=group or weight.shape[1], zero=zero)
        scales = torch.from_numpy(found.scales).to(dtype)
        found = Grouped(found.codes, scales.float().numpy(), found.zeros, found.groups)
        tensors = {
            "weight_packed": pack_columns(found.codes, bits=bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if zero is None:
            tensors["weight_zero_point"] = pack_columns(found.zeros.T, bits=bits).T
        return tensors, found.weight

    return Quantizer(_compressed("pack-quantized"), write)


def _compressed(name: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def integers(*, group: int | None, has_zeros: bool = False) -> Quantizer:
    """See IntQuantizationCompressor: numbers of type int8."""

    def write(weight: Array, _module: str) -> tuple[Tensors, Array]:
        found = grouped(weight, bits=8, group=group or weight.shape[1], zero=None if has_zeros else 128)
        tensors = {
            "weight": torch.from_numpy((found.codes - 128).astype(np.int8)),
            "weight_scale": torch.from_numpy(found.scales),
        }
        if has_zeros:
            tensors["weight_zero_point"] = torch.from_numpy((found.zeros - 128).astype(np.int8))
        return tensors, found.weight

    return Quantizer(_compressed("int-quantized"), write)


def write_bnb_int8(weight: Array, _module: str) -> tuple[Tensors, Array]:
    """See Linear8bitLt: the largest magnitude of an output becomes 127."""
    largest = np.abs(weight).max(axis=1)
    codes = np.round(weight * (127 / largest[:, None])).astype(np.int8)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.astype(np.float32) * (largest / 127)[:, None]


def fp8(*, block: tuple[int, int] | None, scale: str) -> Quantizer:
    """E4M3 with a scale for blocks (rows, columns; 0: all of them)."""

    def write(weight: Array, _module: str) -> tuple[Tensors, Array]:
        sizes = [size or count for size, count in zip(block or (0, 0), weight.shape, strict=True)]
        table = np.empty([math.ceil(c / s) for c, s in zip(weight.shape, sizes, strict=True)], np.float32)
        numbers, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), np.empty_like(weight)
        for row, column in np.ndindex(*table.shape):
            at = tuple(slice(i * s, (i + 1) * s) for i, s in zip((row, column), sizes, strict=True))
            table[row, column] = np.abs(weight[at]).max() / 448
            numbers[at] = torch.from_numpy(weight[at] / table[row, column]).to(torch.float8_e4m3fn)
            values[at] = numbers[at].float().numpy() * table[row, column]
        scales = torch.from_numpy(table if block else table.reshape(()))
        return {"weight": numbers, scale: scales}, values

    config = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    return Quantizer(_compressed("float-quantized") if scale == "weight_scale" else config, write)


def fp4(*, group: int) -> Quantizer:
    """See NVFP4PackedCompressor and MXFP4PackedCompressor: E2M1, the first of two in the low half."""

    def write(weight: Array, _module: str) -> tuple[Tensors, Array]:
        blocks = weight.reshape(len(weight), -1, group)
        wanted = np.abs(blocks).max(axis=2) / 6
        divisor = np.float32(448 / wanted.max())
        if group == 32:
            exponents = np.ceil(np.log2(wanted)).astype(np.int32)
            scale: dict[str, torch.Tensor] = {
                "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8))
            }
            scales = np.ldexp(np.float32(1), exponents)
        else:
            numbers = torch.from_numpy(wanted * divisor).to(torch.float8_e4m3fn)
            scale = {"weight_scale": numbers, "weight_global_scale": torch.tensor([divisor])}
            scales = numbers.float().numpy() / divisor
        codes = np.abs(blocks[..., None] / scales[..., None, None] - FP4).argmin(axis=3)
        flat = codes.reshape(len(weight), -1).astype(np.uint8)
        tensors = {"weight_packed": torch.from_numpy(flat[:, ::2] | flat[:, 1::2] << 4), **scale}
        return tensors, (FP4[codes] * scales[..., None]).reshape(weight.shape)

    return Quantizer(_compressed("mxfp4-pack-quantized" if group == 32 else "nvfp4-pack-quantized"), write)


def nf4(*, nested: bool) -> Quantizer:
    """See quantize_4bit of bitsandbytes: the first number of two is the high half."""

    def write(weight: Array, _module: str) -> tuple[Tensors, Array]:
        blocks = weight.reshape(-1, 64)
        absmax = np.abs(blocks).max(axis=1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
        parts: Tensors = {"absmax": torch.from_numpy(absmax)}
        if nested:
            table = np.sort(np.random.default_rng(0).uniform(-1, 1, 256)).astype(np.float32)
            offset = absmax.mean()
            groups = np.arange(len(absmax)) // 256
            largest = np.array([np.abs(absmax[groups == g] - offset).max() for g in range(groups.max() + 1)])
            places = np.abs((absmax - offset)[:, None] / largest[groups][:, None] - table).argmin(axis=1)
            absmax = table[places] * largest[groups] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            parts = {
                "absmax": torch.from_numpy(places.astype(np.uint8)),
                "nested_absmax": torch.from_numpy(largest.astype(np.float32)),
                "nested_quant_map": torch.from_numpy(table),
            }
        codes = np.abs(blocks[..., None] / absmax[:, None, None] - NF4).argmin(axis=2)
        flat = codes.reshape(-1).astype(np.uint8)
        parts |= {
            "quant_map": torch.from_numpy(NF4.copy()),
            "quant_state.bitsandbytes__nf4": torch.frombuffer(
                bytearray(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        tensors = {f"weight.{name}": value for name, value in parts.items()}
        tensors["weight"] = torch.from_numpy(flat[::2] << 4 | flat[1::2])[:, None]
        return tensors, (NF4[codes] * absmax[:, None]).reshape(weight.shape).astype(np.float32)

    return Quantizer({"quant_method": "bitsandbytes", "load_in_4bit": True}, write)


_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "data_type": "int"}
AUTO_ROUND_AWQ = Quantizer(_AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, write_awq)
AUTO_ROUND_GPTQ = auto_round_gptq()
AWQ = Quantizer({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, write_awq)
GPTQ = gptq(bits=4, group=128, version=1, zero=None)
GPTQ_V2 = gptq(bits=4, group=32, version=2, zero=None)
GPTQ_2 = gptq(bits=2, group=32, version=1, zero=None)
GPTQ_8 = gptq(bits=8, group=128, version=1, zero=128)
PACKED = packed(bits=4, group=128, zero=8)
PACKED_ZEROS = packed(bits=4, group=None, zero=None)
PACKED_8 = packed(bits=8, group=None, zero=128, dtype=torch.float16)
INT_CHANNELS = integers(group=None)
INT_GROUPS = integers(group=64, has_zeros=True)
BNB_INT8 = Quantizer({"quant_method": "bitsandbytes", "load_in_8bit": True}, write_bnb_int8)
FP8_BLOCKS = fp8(block=(128, 128), scale="weight_scale_inv")
FP8_CHANNELS = fp8(block=(1, 0), scale="weight_scale")
FP8_TENSOR = fp8(block=None, scale="weight_scale")
MXFP4 = fp4(group=32)
NVFP4 = fp4(group=16)
