"""The bytes and operations of a step, compared with torch's count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.operations import Machine, Part, read_parts
from genserve.export import Precision, SilentProgress, export_model
from tests.export.tiny_models import TINY_MODELS
from tests.export.tiny_models import tiny_checkpoint as checkpoint_of

TOKENS = 24


def parts_of(checkpoint: Path, folder: Path, precision: Precision) -> list[Part]:
    export_model(
        str(checkpoint), repository=folder, name="tiny", precision=precision, overwrite=False,
        progress=SilentProgress(),
    )
    return read_parts(folder / "tiny_logits" / "1" / "model.onnx")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_operations_agree_with_torchs_count(
    tiny_checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    parts = parts_of(tiny_checkpoint, tmp_path, precision)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, attn_implementation="eager")
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros((1, TOKENS), dtype=torch.int64), use_cache=False)
    # It computes all scores of every token with every other one, those of the future too.
    operations = sum(p.operations_per_row * TOKENS + p.operations_per_token * TOKENS**2 for p in parts)
    assert operations == counter.get_total_flops()


def test_weights_in_float32_take_four_bytes_for_two_operations(tiny_checkpoint: Path, tmp_path: Path) -> None:
    head, layers, attention = parts_of(tiny_checkpoint, tmp_path, "fp32")
    for part in (head, layers):
        assert part.weight_bytes == 2 * part.operations_per_row
        assert part.arithmetic == "float32"
    assert attention.weight_bytes == 0


def test_weights_in_int8_take_a_quarter_and_their_scales(tiny_checkpoint: Path, tmp_path: Path) -> None:
    head, layers, _ = parts_of(tiny_checkpoint, tmp_path, "int8")
    for part in (head, layers):
        assert 0.5 < part.weight_bytes / part.operations_per_row < 0.75
        assert part.arithmetic == "int8"


def test_the_cache_of_a_token_is_that_of_the_config(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).config
    [attention] = [p for p in parts_of(tiny_checkpoint, tmp_path, "fp32") if p.cache_bytes_per_token]
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert attention.cache_bytes_per_token == numbers * np.dtype(np.float32).itemsize


def test_the_floor_is_the_longer_one_of_reading_and_computing() -> None:
    machine = Machine(bytes_per_s=100, operations_per_s={"float32": 10, "int8": 1000})
    part = Part(
        name="attention",
        arithmetic="float32",
        weight_bytes=50,
        operations_per_row=2,
        cache_bytes_per_token=10,
        operations_per_token=2,
    )
    assert part.floor_s(machine, rows=1, context=0) == 0.5             # 50 bytes
    assert part.floor_s(machine, rows=2, context=100) == 40.4          # 404 operations


def test_a_row_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "mlp_only_layers": [], "num_hidden_layers": 3}
    layers = []
    for chosen in (1, 3):
        config = TINY_MODELS["qwen3_moe"] | sizes | {"num_experts_per_tok": chosen}
        source = checkpoint_of(tmp_path / f"source{chosen}", **config)
        layers.append(parts_of(source, tmp_path / f"repository{chosen}", "fp32")[1])
    weights = 3 * 2 * 3 * 64 * 96   # of two experts in three layers, each with three matrices
    assert layers[1].weight_bytes - layers[0].weight_bytes == 4 * weights
    assert layers[1].operations_per_row - layers[0].operations_per_row == 2 * weights
