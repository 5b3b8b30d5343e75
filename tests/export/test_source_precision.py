"""The precision "source": the weights of a quantized file run in their own formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import StoredRows
from genserve.export.checkpoints.rows import Rows
from genserve.export.checkpoints.stored_weight import joined
from genserve.export.decoder_weights import DecoderWeights, TensorSource
from genserve.export.export_options import Precision
from genserve.export.gguf.gguf_file import GgufFile
from genserve.kernels.blocks import BLOCK_FORMATS
from tests.export.ggufs import write_gguf
from tests.export.graphs import conversion_of, write_graph
from tests.export.rows import logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended
from tests.support.tiny_llama import IN_WHOLE_BLOCKS, tiny_llama_checkpoint

GGUF_KINDS = [kind for kind in BLOCK_FORMATS if not kind.startswith("Q4Z")]


def q4_k_m(name: str) -> str:
    """The mixture of llama.cpp's Q4_K_M, with other types for the rest."""
    kinds = {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}
    return (kinds | {"attn_k": "Q5_0", "attn_output": "Q5_K"}).get(name.split(".")[-2], "Q4_K")


def gates_of_another_type(name: str) -> str:
    return "Q4_0" if "ffn_gate" in name else "Q5_1" if "ffn_up" in name else "F32"


def with_floats(name: str) -> str:
    return "F16" if "attn_v" in name or "token_embd" in name else "Q4_1"


def five_types(name: str) -> str:
    """Of gates, queries, keys and values there are three, of what a mixer reads four."""
    kinds = {"attn_k": "Q5_0", "attn_v": "Q8_0", "attn_gate": "Q5_1", "ssm_alpha": "Q4_1", "ssm_beta": "F32"}
    return kinds.get(name.split(".")[-2], "Q4_0")


def difference(file: Path, folder: Path, *, typical: Callable[[Any], Any] = np.mean) -> float:
    """The typical difference of a row of logits from that in fp32, over their standard deviation."""
    precisions: tuple[Precision, ...] = ("source", "fp32")
    graphs = [write_graph(file, folder / name, precision=name) for name in precisions]
    found, expected = (
        logits_of(graph.logits(max_num_seqs=1, max_length=100), np.arange(3, 100)) for graph in graphs
    )
    return float(typical(np.abs(found - expected).mean(axis=1)) / expected.std())


@pytest.mark.parametrize(
    "kind",
    [
        *with_extended(GGUF_KINDS, always={"Q4_0", "Q8_0"}),
        q4_k_m,
        with_floats,
        gates_of_another_type,
    ],
)
@pytest.mark.parametrize("tied", with_extended([True, False], always=[True]))
def test_the_logits_are_those_of_the_dequantized_weights(
    tmp_path: Path, kind: str | Callable[[str], str], tied: bool
) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS, tie_word_embeddings=tied)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=kind)
    assert difference(file, tmp_path) < 0.04  # rows are rounded to 8 bits


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("lfm2", "Q8_0"),
        pytest.param("qwen3_5", "Q8_0", marks=pytest.mark.extended),
        ("qwen3_5", five_types),
        pytest.param("gemma3n", "Q8_0", marks=pytest.mark.extended),
        pytest.param("gemma4", "Q8_0", marks=pytest.mark.extended),
    ],
)
def test_hybrids_and_gemma_run_the_blocks_of_their_files(
    tmp_path: Path, model: str, kind: str | Callable[[str], str]
) -> None:
    """llama.cpp has heads of values of Qwen 3.5 in another order, which the last weight has as `order`."""
    sizes = {"linear_value_head_dim": 32} if model == "qwen3_5" else {}
    folder = tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS[model] | sizes)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=kind)
    # Gemma 4 does not scale scores, so that random heads amplify what rows lose by their rounding.
    assert difference(file, tmp_path, typical=np.median) < (0.1 if model == "gemma4" else 0.04)
    [graph] = (tmp_path / "source").rglob("model.onnx")
    orders = [tensor.name for tensor in onnx.load(graph, load_external_data=False).graph.initializer]
    assert any(name.endswith("mixer.output.order") for name in orders) == (model == "qwen3_5")


@pytest.mark.parametrize("model", ["bloom_6_heads", "gpt2", "qwen2_all", "qwen3"])
def test_other_families_take_their_rows_apart(tmp_path: Path, model: str) -> None:
    """GPT-2's weights are transposed, so that their blocks have inputs of another layer; they become Q8_0."""
    models = TINY_MODELS | {"qwen2_all": TINY_MODELS["qwen2"] | {"use_sliding_window": False}}
    folder = tiny_checkpoint(tmp_path / "tiny", **models[model])
    by_32 = read_checkpoint(folder, source="tiny")
    if any(by_32.tensor(name).shape[-1] % 32 for name in by_32.tensor_names if "norm" not in name):
        pytest.skip("its sizes are not multiples of 32")
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind="Q8_0")
    assert difference(file, tmp_path) < 0.03


def as_openai_publishes_it(name: str) -> str:
    return "MXFP4" if "_exps" in name else "Q8_0"


def experts_in_q4_k(name: str) -> str:
    kinds = {"ffn_down_exps": "Q6_K", "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K"}
    return kinds.get(name.split(".")[-2], "Q8_0")


@pytest.mark.parametrize(
    ("model", "kind", "formats"),
    [
        ("gpt_oss", as_openai_publishes_it, {"q5"}),
        pytest.param("mixtral_256", experts_in_q4_k, {"q4k", "q6k"}, marks=pytest.mark.extended),
        pytest.param("mixtral_256", "Q4_0", {"q4"}, marks=pytest.mark.extended),
        pytest.param("granitemoe", "Q8_0", {"q8"}, marks=pytest.mark.extended),
        pytest.param("qwen2_moe_64", "Q5_0", {"q5"}, marks=pytest.mark.extended),
        ("gemma4_experts_64", "Q8_0", {"q8"}),
        pytest.param("llama4", "Q4_0", {"q4"}, marks=pytest.mark.extended),
    ],
)
def test_experts_keep_their_formats(
    tmp_path: Path, model: str, kind: str | Callable[[str], str], formats: set[str]
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "sliding_window": None}
    shared = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
    models = TINY_MODELS | {
        "mixtral_256": TINY_MODELS["mixtral"] | wide,
        "qwen2_moe_64": TINY_MODELS["qwen2_moe"] | shared,
        "gemma4_experts_64": TINY_MODELS["gemma4_experts"] | {"moe_intermediate_size": 64},
    }
    folder = tiny_checkpoint(tmp_path / "tiny", **models[model])
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=kind)
    assert difference(file, tmp_path, typical=np.median) < 0.04  # a few rows go to other experts
    [graph] = (tmp_path / "source").rglob("model.onnx")
    found = [
        attribute.s.decode()
        for node in graph_of(graph.parent).node
        if node.op_type == "Experts"
        for attribute in node.attribute
        if attribute.name in ("weight_format", "down_weight_format")
    ]
    assert set(found) == formats


def graph_of(folder: Path) -> Any:
    return onnx.load(folder / "model.onnx", load_external_data=False).graph


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=q4_k_m)
    graph = graph_of(write_graph(file, tmp_path / "graph", precision="source").folder)
    readers = [node.op_type for node in graph.node if "embedding" in node.input]
    assert readers == ["Embedding", "Linear"]
    [embedding] = (weight for weight in graph.initializer if weight.name == "embedding")
    assert list(embedding.dims) == [320 // 32 * 6720]
    read = {name for node in graph.node for name in node.input}
    assert {weight.name for weight in graph.initializer} <= read


def test_the_formats_of_a_layer_are_those_of_the_file(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=q4_k_m)
    graph = graph_of(write_graph(file, tmp_path / "graph", precision="source").folder)
    [layer] = (node for node in graph.node if node.op_type == "DecoderLayer")
    formats = {a.name: a.s.decode() for a in layer.attribute if a.name.endswith("weight_format")}
    assert formats == {
        "weight_format": "q4k:256,q5:128,q6k:128",
        "residual_weight_format": "q5k",
        "inner_weight_format": "q4k",
        "down_weight_format": "q6k",
    }


def test_the_last_stage_of_a_pipeline_has_a_head_of_its_own(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=q4_k_m)
    two = write_graph(file, tmp_path / "two", precision="source", pipeline_stages=2)
    names = [
        {weight.name for weight in onnx.load(path, load_external_data=False).graph.initializer}
        for path in sorted(two.folder.glob("*.onnx"))
    ]
    assert "embedding" in names[0]
    assert "logits.weight" in names[1]


def test_a_source_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny")
    with pytest.raises(ExportError, match="not quantized") as caught:
        conversion_of(folder, precision="source")
    assert "int8" in caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "scale"), [("Q4_0", 9000), ("Q5_0", 5000), ("Q4_1", np.inf), ("Q6_K", np.nan)]
)
def test_a_scale_that_fp16_cannot_hold_is_an_error_that_names_the_weight(
    tmp_path: Path, kind: str, scale: float
) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind=kind)
    tensor = GgufFile.open(file).tensors["blk.0.ffn_down.weight"]
    content = bytearray(file.read_bytes())
    last_block = content.index(tensor.blocks.tobytes()) + tensor.blocks.size - tensor.blocks.shape[1]
    half = last_block + (208 if kind == "Q6_K" else 0)
    content[half : half + 2] = np.float16(scale).tobytes()
    file.write_bytes(content)
    with pytest.raises(ExportError, match=f"{kind} blocks of layers.0.mlp.down.weight") as caught:
        write_graph(file, tmp_path / "graph", precision="source")
    assert "int8" in caught.value.remedy


def test_a_change_of_numbers_takes_no_rows(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **IN_WHOLE_BLOCKS)
    file = write_gguf(folder, tmp_path / "tiny.gguf", kind="Q4_1")
    conversion = conversion_of(file)

    def rows(change: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.uint8] | None:
        names = {"head": TensorSource(("model.layers.0.mlp.up_proj",), unpack=lambda rows, _: change(rows))}
        decoder = replace(conversion.decoder, tied=False)
        weights = DecoderWeights.of(conversion.layout.checkpoint, names=names, decoder=decoder)
        found = weights.stored("head.weight")
        return None if found is None else found.rows.whole()

    unchanged, odd = rows(lambda tensor: tensor), rows(lambda tensor: tensor.reshape(256, 2, -1)[:, 1])
    assert unchanged is not None
    assert np.array_equal(odd, unchanged[1::2])
    assert rows(lambda tensor: tensor.T) is None
    assert rows(lambda tensor: tensor + np.float32(1)) is None
    assert rows(lambda tensor: tensor * np.float32(2)) is None


def test_parts_of_one_type_are_one_segment() -> None:
    def part(kind: str, count: int) -> StoredRows:
        return StoredRows(kind=kind, rows=Rows.of(np.zeros((count, 20), np.uint8)), inputs=32)

    weight = joined([part("Q4_1", 5), part("Q4_1", 6), Rows.of(np.ones((7, 32), np.float32))])
    assert weight is not None
    assert (weight.weight_format, weight.shape) == ("q4:11,q8:7", (18, 32))
    assert joined([Rows.of(np.ones((7, 33), np.float32))]) is None


def test_the_smallest_part_is_rounded_if_there_are_too_many_types() -> None:
    kinds, rng = {"Q4_0": 40, "Q5_0": 30, "Q4_1": 10, "Q5_1": 20}, np.random.default_rng(0)
    floats = {kind: rng.normal(size=(count, 32)).astype(np.float32) for kind, count in kinds.items()}
    order = rng.permutation(32).astype(np.int32)
    parts = [
        StoredRows(
            kind=kind, rows=Rows.of(gguf.quantize(each, GGMLQuantizationType[kind])), inputs=32, order=order
        )
        for kind, each in floats.items()
    ]
    weight = joined(parts)
    assert weight is not None
    assert [(part.kind, part.shape[0]) for part in weight.parts] == [("Q4_0", 40), ("Q5_0", 30), ("Q8_0", 30)]
    assert weight.are_exact == (True, True, False, False)
    found = gguf.dequantize(weight.parts[2].rows.whole(), GGMLQuantizationType.Q8_0)
    assert np.abs(found - np.concatenate([floats["Q4_1"], floats["Q5_1"]])).max() < 0.3
    np.testing.assert_array_equal(weight.order, order)
