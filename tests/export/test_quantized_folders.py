"""Folders that quantizers have written: their weights as floats, and in graphs with their own formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from genserve.errors import ExportError
from genserve.export import SilentProgress, export_model
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.expert_tensors import with_stacks
from genserve.export.checkpoints.quantized_checkpoint import dequantized
from genserve.export.checkpoints.rows import Rows
from genserve.export.checkpoints.stored_weight import _floats, joined
from genserve.export.export_options import Precision
from tests.export import quantized_folders
from tests.export.graphs import conversion_of, write_graph
from tests.export.quantized_folders import (
    AUTO_ROUND_AWQ,
    AUTO_ROUND_GPTQ,
    AWQ,
    BNB_INT8,
    FP8_BLOCKS,
    FP8_CHANNELS,
    FP8_TENSOR,
    GPTQ,
    GPTQ_2,
    GPTQ_8,
    GPTQ_V2,
    INT_CHANNELS,
    INT_GROUPS,
    MXFP4,
    NVFP4,
    PACKED,
    PACKED_8,
    PACKED_ZEROS,
    Quantizer,
    gpt_oss_in_mxfp4,
    gptq_in_order,
    nf4,
    quantized_folder,
)
from tests.export.rows import logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.tiny_llama import IN_WHOLE_BLOCKS, tiny_llama_checkpoint

MODULE = "model.layers.1.mlp.up_proj"

QUANTIZED_EXPERTS = {**TINY_MODELS["qwen3_moe"], "moe_intermediate_size": 64, "hidden_size": 64}
IN_ORDER = gptq_in_order(lambda _module: 1)

# By name, the type in which a graph may keep the weights.
QUANTIZERS: dict[str, tuple[Quantizer, str | None]] = {
    "awq": (AWQ, "Q4Z_64"),
    "gptq_in_order": (IN_ORDER, "Q4Z_32"),
    "packed_zeros": (PACKED_ZEROS, "Q4Z_128"),
    "int_channels": (INT_CHANNELS, "Q8_0"),
    "fp8_blocks": (FP8_BLOCKS, None),
    "mxfp4": (MXFP4, "Q5_0"),
    "nf4": (nf4(nested=True), None),
}
VARIANTS: dict[str, tuple[Quantizer, str | None]] = {
    "auto_round_awq": (AUTO_ROUND_AWQ, "Q4Z_64"),
    "gptq": (GPTQ, "Q4Z_128"),
    "gptq_2": (GPTQ_2, "Q4Z_32"),
    "gptq_8": (GPTQ_8, "Q8_0"),
    "gptq_v2": (GPTQ_V2, "Q4Z_32"),
    "packed": (PACKED, "Q4Z_128"),
    "packed_8": (PACKED_8, "Q8_0"),
    "int_groups": (INT_GROUPS, None),  # their zero points differ
    "bnb_int8": (BNB_INT8, "Q8_0"),
    "fp8_channels": (FP8_CHANNELS, None),
    "fp8_tensor": (FP8_TENSOR, None),
    "nvfp4": (NVFP4, None),  # 16 inputs have a scale
    "nf4_not_nested": (nf4(nested=False), None),
}
ALL = [
    *QUANTIZERS.items(),
    *(pytest.param(*item, id=item[0], marks=pytest.mark.extended) for item in VARIANTS.items()),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)


@pytest.mark.parametrize(("name", "case"), ALL)
def test_weights_are_those_that_the_quantizer_wrote(
    folder: Path, name: str, case: tuple[Quantizer, str | None]
) -> None:
    quantizer, kind = case
    weights = quantized_folder(folder, quantizer)
    checkpoint = read_checkpoint(folder, source="tiny")
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.is_quantized == (kind is not None)
    for weight, expected in weights.items():
        assert checkpoint.shape(weight) == expected.shape
        np.testing.assert_array_equal(checkpoint.tensor(weight), expected)
        np.testing.assert_array_equal(checkpoint.load(weight, slice(37, 101)), expected[37:101])
        stored = checkpoint.load_stored(weight)
        assert (stored.kind if stored else None) == kind
        if stored is not None and stored.is_exact:
            np.testing.assert_array_equal(_floats(stored).whole(), expected)
        assert stored is None or stored.is_exact == (name != "bnb_int8")  # it has scales in float32


def test_auto_round_packs_like_gptq_with_other_bits_for_some_modules(folder: Path) -> None:
    weights = quantized_folder(folder, AUTO_ROUND_GPTQ)
    checkpoint = read_checkpoint(folder, source="tiny")
    for name, expected in weights.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)
        stored = checkpoint.load_stored(name)
        assert stored is not None
        assert stored.kind == ("Q8_0" if "down_proj" in name else "Q4Z_64")


def test_scales_that_fp16_does_not_have_are_rounded(folder: Path) -> None:
    weights = quantized_folder(folder, BNB_INT8)
    stored = read_checkpoint(folder, source="tiny").load_stored(f"{MODULE}.weight")
    assert stored is not None
    assert not stored.is_exact
    expected = weights[f"{MODULE}.weight"]
    assert np.abs(_floats(stored).whole() - expected).max() < np.abs(expected).max() / 1000


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("quantizer", [GPTQ, GPTQ_2])
def test_the_zero_point_of_positive_weights_is_0(folder: Path, quantizer: Quantizer) -> None:
    def make_positive(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.weight"][::3] = tensors[f"{MODULE}.weight"][::3].abs()

    changed(folder, make_positive)
    expected = quantized_folder(folder, quantizer)[f"{MODULE}.weight"]
    found = read_checkpoint(folder, source="tiny").tensor(f"{MODULE}.weight")
    np.testing.assert_array_equal(found, expected)


def test_groups_of_which_all_are_0_follow_each_other(folder: Path) -> None:
    expected = quantized_folder(folder, GPTQ)[f"{MODULE}.weight"]

    def without_groups(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.g_idx"].zero_()

    changed(folder, without_groups)
    found = read_checkpoint(folder, source="tiny").tensor(f"{MODULE}.weight")
    np.testing.assert_array_equal(found, expected)


def difference(folder: Path, written: Path, *, typical: Callable[[Any], Any] = np.mean) -> float:
    """The typical difference of a row of logits from that in fp32, over their standard deviation."""
    precisions: tuple[Precision, ...] = ("source", "fp32")
    graphs = [write_graph(folder, written / name, precision=name) for name in precisions]
    found, expected = (
        logits_of(graph.logits(max_num_seqs=1, max_length=100), np.arange(3, 100)) for graph in graphs
    )
    return float(typical(np.abs(found - expected).mean(axis=1)) / expected.std())


@pytest.mark.parametrize(
    "quantizer", [AWQ, IN_ORDER, *(pytest.param(q, marks=pytest.mark.extended) for q in (PACKED_8, MXFP4))]
)
def test_the_logits_are_those_of_the_dequantized_weights(
    folder: Path, tmp_path: Path, quantizer: Quantizer
) -> None:
    quantized_folder(folder, quantizer)
    assert difference(folder, tmp_path) < 0.04  # rows are rounded to 8 bits


def formats_of(graph: Path) -> tuple[dict[str, str], list[str]]:
    """The formats of a DecoderLayer, and the weights that read rows in an order."""
    nodes = onnx.load(graph / "model.onnx", load_external_data=False).graph.node
    [layer] = (node for node in nodes if node.op_type == "DecoderLayer")
    formats = {a.name: a.s.decode() for a in layer.attribute if a.name.endswith("weight_format")}
    return formats, [name.split(".")[-2] for name in layer.input if name.endswith(".order")]


def test_inputs_in_one_order_keep_their_codes(folder: Path, tmp_path: Path) -> None:
    quantized_folder(folder, IN_ORDER)
    formats, orders = formats_of(write_graph(folder, tmp_path / "graph", precision="source").folder)
    assert set(formats.values()) == {"q4z_32"}
    assert orders == ["qkv", "output", "inner", "down"]


def test_weights_that_share_a_row_but_no_order_become_q8_0(folder: Path, tmp_path: Path) -> None:
    names = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    quantized_folder(folder, gptq_in_order(lambda module: names.index(module.split(".")[-1])))
    assert difference(folder, tmp_path) < 0.04
    [graph] = (tmp_path / "source").rglob("model.onnx")
    formats, orders = formats_of(graph.parent)
    assert formats == {
        "weight_format": "q8",
        "residual_weight_format": "q4z_32",
        "inner_weight_format": "q8",
        "down_weight_format": "q4z_32",
    }
    assert orders == ["output", "down"]


def test_a_weight_in_floats_beside_others_becomes_q8_0() -> None:
    weight = joined([Rows.of(np.ones((7, 32), np.float32))])
    assert weight is not None
    assert weight.are_exact == (False,)


def exported(folder: Path, repository: Path, precision: Precision | None = None) -> Any:
    return export_model(
        str(folder), repository=repository, name="tiny", precision=precision, progress=SilentProgress()
    )


def test_an_export_of_4_bits_keeps_them_and_says_so(folder: Path, tmp_path: Path) -> None:
    quantized_folder(folder, AWQ)
    report = exported(folder, tmp_path / "repository")
    # Seven matrices in each of two layers; the embedding, which is also the head, has floats.
    assert (report.precision, report.num_kept, report.num_rounded) == ("source", 14, 1)


def test_other_precisions_are_the_default_of_8_bits_and_can_be_chosen(folder: Path) -> None:
    quantized_folder(folder, INT_CHANNELS)
    assert conversion_of(folder, precision=None).layout.precision == "int8"
    assert conversion_of(folder, precision="source").layout.precision == "source"


def test_floats_of_8_bits_have_no_format_of_their_own(folder: Path) -> None:
    quantized_folder(folder, FP8_BLOCKS)
    assert conversion_of(folder, precision=None).layout.precision == "int8"
    with pytest.raises(ExportError, match="rounded again"):
        conversion_of(folder, precision="source")


# The places of codes in words, as AutoAWQ (AWQ_ORDER), AutoGPTQ and compressed-tensors (pack_to_int32) state
# them, for the columns or rows 0 to 7 with the codes 0 to 7.
def test_codes_are_where_the_quantizers_pack_them() -> None:
    codes = np.arange(8)[None]
    awq = quantized_folders.pack_columns(codes, bits=4, places=(0, 2, 4, 6, 1, 3, 5, 7))
    assert awq.item() == 0x75316420
    assert quantized_folders.pack_columns(codes, bits=4).item() == 0x76543210
    assert quantized_folders.pack_columns(np.arange(4)[None], bits=8).item() == 0x03020100


def test_stacks_of_gpt_oss_are_those_of_transformers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": torch.from_numpy(rng.integers(0, 256, (3, 8, 2, 16), np.uint8)),
        f"{name}_scales": torch.from_numpy(rng.integers(115, 125, (3, 8, 2)).astype(np.uint8)),
        f"{name}_bias": torch.arange(24.0).reshape(3, 8),
    }
    folder = Checkpoint(
        source="tiny",
        config={"quantization_config": {"quant_method": "mxfp4"}},
        tensor_names=frozenset(tensors),
        load=lambda name, rows: tensors[name][rows].float().numpy(),
        shape=lambda name: tuple(tensors[name].shape),
        tokenizer_files={},
    )
    apart = dequantized(folder, lambda name, at: tensors[name][at])
    checkpoint = with_stacks(apart, transposed="in turn")
    assert len(apart.tensor_names) == 3 * 2 * 2  # experts, gates and values, weights and biases
    np.testing.assert_array_equal(checkpoint.tensor(f"{name}_bias"), tensors[f"{name}_bias"].numpy())
    expected = convert_moe_packed_tensors(
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
    )
    assert checkpoint.shape(name) == (3, 64, 8)
    np.testing.assert_array_equal(checkpoint.load(name, slice(None)), expected.numpy())
    np.testing.assert_array_equal(checkpoint.load(name, slice(1, 2)), expected.numpy()[1:2])
    own = "model.layers.0.mlp.experts.2.up_proj.weight"
    stored = apart.load_stored(own)
    assert stored is not None
    assert (stored.kind, stored.is_exact) == ("Q5_0", True)
    np.testing.assert_array_equal(_floats(stored).whole(), apart.tensor(own))
    np.testing.assert_array_equal(apart.load(own, slice(1, 3)), apart.tensor(own)[1:3])


def formats_of_experts(graph: Path) -> set[str]:
    nodes = onnx.load(graph / "model.onnx", load_external_data=False).graph.node
    return {
        attribute.s.decode()
        for node in nodes
        if node.op_type == "Experts"
        for attribute in node.attribute
        if attribute.name.endswith("weight_format")
    }


def test_gpt_oss_keeps_its_experts_in_mxfp4(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS["gpt_oss"])
    stacks = gpt_oss_in_mxfp4(folder)
    checkpoint = with_stacks(read_checkpoint(folder, source="tiny"), transposed="in turn")
    for name, expected in stacks.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)
    assert conversion_of(folder, precision=None).layout.precision == "source"
    # A row that goes to another expert is far away.
    assert difference(folder, tmp_path, typical=np.median) < 0.04
    [graph] = (tmp_path / "source").rglob("model.onnx")
    assert formats_of_experts(graph.parent) == {"q5"}
    report = exported(folder, tmp_path / "repository")  # against transformers
    assert report.num_kept == 2 * 6 * 3  # layers, experts, and their weights
    assert report.perplexity_ratio < 1.01


@pytest.mark.parametrize("quantizer", [pytest.param(q, marks=pytest.mark.extended) for q in (AWQ, GPTQ_V2)])
def test_experts_of_4_bits_keep_them(tmp_path: Path, quantizer: Quantizer) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **QUANTIZED_EXPERTS)
    quantized_folder(folder, quantizer)
    assert difference(folder, tmp_path, typical=np.median) < 0.04
    [graph] = (tmp_path / "source").rglob("model.onnx")
    assert formats_of_experts(graph.parent) == {"q4z_64" if quantizer is AWQ else "q4z_32"}


def test_experts_with_inputs_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **QUANTIZED_EXPERTS)
    quantized_folder(folder, IN_ORDER)
    with pytest.raises(ExportError, match=r"layers\.0\.mlp\.experts.*desc_act") as caught:
        write_graph(folder, tmp_path / "graph", precision="source")
    assert "int8" in caught.value.remedy


def without(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{MODULE}.{part}"]

    return change


def shortened(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.{part}"] = tensors[f"{MODULE}.{part}"][:-1].contiguous()

    return change


def beyond_the_groups(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.g_idx"][3] = 99


def of_another_type(part: str, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.{part}"] = tensors[f"{MODULE}.{part}"].view(dtype)

    return change


def in_the_order_of_a_gpu(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.weight_format"] += 2


@pytest.mark.parametrize(
    ("quantizer", "change", "message"),
    [
        (AWQ, without("scales"), r"no tensor '.*up_proj.scales'"),
        pytest.param(AWQ, shortened("qzeros"), "qzeros is not", marks=pytest.mark.extended),
        (GPTQ_V2, shortened("g_idx"), "qweight has 4 bits|without a scale"),
        pytest.param(GPTQ_V2, beyond_the_groups, "groups without a scale", marks=pytest.mark.extended),
        (PACKED, shortened("weight_scale"), "weight_scale is"),
        pytest.param(PACKED, without("weight_shape"), "no tensor", marks=pytest.mark.extended),
        (INT_CHANNELS, without("weight_scale"), "has no scales"),
        pytest.param(
            FP8_BLOCKS, shortened("weight_scale_inv"), "weight_scale_inv are", marks=pytest.mark.extended
        ),
        pytest.param(
            PACKED, of_another_type("weight_packed", torch.int16), "not int32", marks=pytest.mark.extended
        ),
        (PACKED, of_another_type("weight_packed", torch.float32), "has floats"),
        pytest.param(
            BNB_INT8, in_the_order_of_a_gpu, "not supported: .*weight_format", marks=pytest.mark.extended
        ),
        (nf4(nested=True), shortened("weight.absmax"), "absmax do not belong"),
        pytest.param(
            nf4(nested=True),
            shortened("weight.nested_absmax"),
            "for other blocks",
            marks=pytest.mark.extended,
        ),
        pytest.param(nf4(nested=False), shortened("weight"), "do not belong", marks=pytest.mark.extended),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    folder: Path, quantizer: Quantizer, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    quantized_folder(folder, quantizer)
    changed(folder, change)
    with pytest.raises(ExportError, match=message) as caught:
        read_checkpoint(folder, source="tiny").tensor(f"{MODULE}.weight")
    assert caught.value.remedy


def test_the_text_model_of_a_wrapper_may_be_quantized(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)
    weights = quantized_folder(folder, AWQ)
    config = json.loads((folder / "config.json").read_text())
    wrapper = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {key: value for key, value in config.items() if key != "quantization_config"},
        "quantization_config": config["quantization_config"],
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = read_checkpoint(folder, source="tiny")
    np.testing.assert_array_equal(checkpoint.tensor(f"{MODULE}.weight"), weights[f"{MODULE}.weight"])
    stored = checkpoint.load_stored(f"{MODULE}.weight")
    assert stored is not None
