"""Logits by ONNX Runtime: buffers, limits of the cache, NaN rows and damaged files."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.numpy import load_file, save_file

from genserve.errors import RepositoryError
from genserve.export.export_options import Precision
from genserve.kernels.blocks import pack_blocks
from genserve.textmodel.logits_config import LengthLimit
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory, HostMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.export.graphs import write_graph
from tests.export.rows import BlockPool, Row, forward_batch, logits_of
from tests.support.tiny_llama import tiny_llama_checkpoint

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def path(tiny_repository: Path) -> Path:
    return tiny_repository / "tiny_logits" / "1" / "model.onnx"


@pytest.fixture(params=["host", "device"])
def logits(request, path):
    # Stands for the memory of a GPU: torch tensors on the CPU, bound to the graph in the same way.
    memory = HostMemory() if request.param == "host" else DeviceMemory("cpu")
    return OnnxLogits(path, max_num_seqs=4, max_length=128, memory=memory)


def random_ids(count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 300, count)


def test_the_logits_are_a_view_of_one_buffer_that_grows(logits):
    pool, row = BlockPool(logits), Row(random_ids(9))
    pool.forward([row], lengths=[1])
    batches = []
    for length in (2, 1, 5):
        batches.append(forward_batch([row], [length]))
        row.num_computed += length
    pointers = [torch.from_dlpack(logits.forward(batch)).data_ptr() for batch in batches]
    assert pointers[0] == pointers[1]       # room for a row of each of 4 sequences
    assert pointers[1] != pointers[2]


def test_a_sequence_continues_from_copied_blocks(logits):
    pool, row = BlockPool(logits, seed=1), Row(random_ids(40))
    pool.forward([row], lengths=[24])
    copy = Row(row.ids, num_computed=24, blocks=[pool.free.pop() for _ in row.blocks])
    logits.copy_blocks(list(zip(row.blocks, copy.blocks, strict=True)))
    expected = pool.forward([row], lengths=[16])[0]
    np.testing.assert_array_equal(pool.forward([copy], lengths=[16])[0], expected)


def test_a_cache_has_the_blocks_that_fit_into_its_budget(path):
    whole = OnnxLogits(path, max_num_seqs=4, max_length=100)
    assert (whole.block_size, whole.num_blocks, whole.max_length) == (16, 4 * 7, 100)
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4   # tokens, layers, keys and values, heads, numbers, bytes
    assert whole.kv_cache_bytes == 28 * block_bytes
    less = OnnxLogits(path, max_num_seqs=4, max_length=100, kv_cache_bytes=11 * block_bytes - 1)
    assert (less.num_blocks, less.max_num_seqs, less.max_length) == (10, 4, 100)


def test_a_budget_below_one_sequence_shortens_the_context(path, caplog):
    with caplog.at_level(logging.WARNING):
        logits = OnnxLogits(path, max_num_seqs=4, max_length=100, kv_cache_bytes=3 * 16 * 512)
    assert (logits.num_blocks, logits.max_length) == (3, 48)
    assert "prompt and answer are limited to 48 tokens, not 100" in caplog.text


def test_a_budget_without_room_for_a_block_is_rejected(path):
    with pytest.raises(RepositoryError, match="8192 bytes") as caught:
        OnnxLogits(path, max_num_seqs=4, max_length=100, kv_cache_bytes=1000)
    assert "kv_cache_bytes" in caught.value.remedy


def test_more_tokens_than_the_context_are_rejected(path):
    with pytest.raises(RepositoryError, match=r"max_sequence_length is 257.* 256"):
        OnnxLogits(path, max_num_seqs=1, max_length=257)


def test_the_context_is_what_model_config_flag_and_memory_allow(path):
    own = OnnxLogits(path, max_num_seqs=1)
    assert (own.max_length, own.context_length, own.length_limit) == (256, 256, LengthLimit.MODEL)
    by_config = OnnxLogits(path, max_num_seqs=1, max_length=100)
    assert (by_config.max_length, by_config.length_limit) == (100, LengthLimit.CONFIG)
    by_flag = OnnxLogits(path, max_num_seqs=4, max_length=100, max_model_len=60)
    assert (by_flag.max_length, by_flag.num_blocks, by_flag.length_limit) == (60, 16, LengthLimit.FLAG)
    by_memory = OnnxLogits(path, max_num_seqs=4, kv_cache_bytes=3 * 16 * 512)
    assert (by_memory.max_length, by_memory.length_limit) == (48, LengthLimit.KV_CACHE)
    whole = OnnxLogits(path, max_num_seqs=1, max_model_len=256)
    assert (whole.max_length, whole.length_limit) == (256, LengthLimit.MODEL)


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [({"max_model_len": 257}, r"257.* 256"),
     ({"max_length": 100, "max_model_len": 101}, r"101.* 100 of its 256"),
     ({"kv_cache_bytes": 4 * 16 * 512, "max_model_len": 65}, r"65,.* for 64 tokens")],
)  # fmt: skip
def test_a_context_that_the_model_cannot_have_is_rejected_with_the_numbers(path, sizes, numbers):
    with pytest.raises(RepositoryError, match=numbers) as raised:
        OnnxLogits(path, max_num_seqs=4, **sizes)
    assert raised.value.remedy


@pytest.mark.parametrize("block", [-1, 64, 2**30])
def test_a_block_outside_the_cache_is_an_error(logits, block):
    row = Row(random_ids(5), blocks=[block])
    with pytest.raises(Exception, match="block_table"):     # onnxruntime's share no base class
        logits.forward(forward_batch([row], [5]))
    expected = logits_of(logits, random_ids(5))             # and the model goes on
    assert np.isfinite(expected).all()


def test_a_graph_without_a_cache_is_rejected_with_a_remedy(tmp_path):
    value, out = (helper.make_tensor_value_info(name, 1, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(RepositoryError, match=r"no KV cache.*genserve export"):
        OnnxLogits(tmp_path / "model.onnx", max_num_seqs=1)


def test_a_graph_of_an_older_export_is_rejected_with_a_remedy(tmp_path):
    """As genserve wrote them before the cache had blocks."""
    shape = ["batch", 2, "max_len", 16]
    values = [
        helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "sequence"]),
        helper.make_tensor_value_info("seqlens_k", onnx.TensorProto.INT32, ["batch"]),
        helper.make_tensor_value_info("rows", onnx.TensorProto.INT64, ["num_rows"]),
        helper.make_tensor_value_info("past_key_values.0.key", onnx.TensorProto.FLOAT, shape),
    ]
    out = helper.make_tensor_value_info("present.0.key", onnx.TensorProto.FLOAT, shape)
    node = helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"])
    graph = helper.make_graph([node], "g", values, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(RepositoryError, match="block_table") as caught:
        OnnxLogits(tmp_path / "model.onnx", max_num_seqs=1)
    assert "export it again" in caught.value.remedy


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(RepositoryError, match=r"model\.onnx"):
        OnnxLogits(tmp_path / "model.onnx", max_num_seqs=1)


def drop_weights(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "model.onnx.data").unlink()


def truncate_weights(folder: Path, model: onnx.ModelProto) -> None:
    content = (folder / "model.onnx.data").read_bytes()
    (folder / "model.onnx.data").write_bytes(content[: len(content) // 2])


def write_another_version_of_operators(folder: Path, model: onnx.ModelProto) -> None:
    next(entry for entry in model.metadata_props if entry.key == "genserve.operators").value = "9"


def rename_an_operator(folder: Path, model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.domain == "genserve").op_type = "Quadratic"


def drop_metadata(folder: Path, model: onnx.ModelProto) -> None:
    del model.metadata_props[:]


@pytest.mark.parametrize(
    "spoil",
    [drop_weights, truncate_weights, write_another_version_of_operators, rename_an_operator, drop_metadata],
)
def test_a_damaged_export_is_rejected_at_load(path, tmp_path, spoil):
    with pytest.raises(RepositoryError, match="export"):
        OnnxLogits(spoilt(path, tmp_path, spoil), max_num_seqs=1)


def halve_a_weight(folder: Path, model: onnx.ModelProto) -> None:
    initializer_of(model, "layers.0.mlp.inner.weight").dims[0] //= 2


def swap_axes_of_a_weight(folder: Path, model: onnx.ModelProto) -> None:
    dims = initializer_of(model, "layers.1.attention.qkv.weight").dims
    dims[:] = list(dims)[::-1]


def change_the_type_of_a_weight(folder: Path, model: onnx.ModelProto) -> None:
    initializer_of(model, "layers.0.attention.output.weight").data_type = onnx.TensorProto.INT32


def shorten_a_norm(folder: Path, model: onnx.ModelProto) -> None:
    norm = initializer_of(model, "layers.0.attention.norm.weight")
    norm.CopyFrom(numpy_helper.from_array(np.ones(5, np.float32), norm.name))


def change_the_number_of_heads(folder: Path, model: onnx.ModelProto) -> None:
    set_attribute(model, "PagedAttention", "num_heads", 8)


def change_the_size_of_heads(folder: Path, model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name.endswith(".key"):
            value.type.tensor_type.shape.dim[3].dim_value = 8


def set_attribute(model: onnx.ModelProto, op_type: str, name: str, value: int) -> None:
    node = next(node for node in model.graph.node if node.op_type == op_type)
    next(attribute for attribute in node.attribute if attribute.name == name).i = value


def change_the_number_of_a_layers_heads(folder: Path, model: onnx.ModelProto) -> None:
    set_attribute(model, "DecoderLayer", "num_heads", 8)


def claim_larger_heads(folder: Path, model: onnx.ModelProto) -> None:
    set_attribute(model, "DecoderLayer", "head_dim", 1 << 31)


def claim_a_larger_layer(folder: Path, model: onnx.ModelProto) -> None:
    set_attribute(model, "DecoderLayer", "hidden_size", 1 << 40)


def claim_more_inputs(folder: Path, model: onnx.ModelProto) -> None:
    set_attribute(model, "Linear", "in_features", 1 << 40)


@pytest.mark.parametrize(
    "spoil",
    [
        halve_a_weight,
        swap_axes_of_a_weight,
        change_the_type_of_a_weight,
        shorten_a_norm,
        change_the_number_of_heads,
        change_the_size_of_heads,
        change_the_number_of_a_layers_heads,
        claim_larger_heads,
        claim_a_larger_layer,
        claim_more_inputs,
    ],
)
def test_weights_of_other_sizes_are_an_error_and_no_crash(path, tmp_path, spoil):
    """At the load, or by the first forward: nothing is read behind the end of a buffer."""
    with pytest.raises(Exception, match=r"export|Linear|PagedAttention|DecoderLayer"):
        logits_of(OnnxLogits(spoilt(path, tmp_path, spoil), max_num_seqs=1, max_length=32), [5, 6])


def spoilt(path: Path, folder: Path, spoil: Callable[[Path, onnx.ModelProto], None]) -> Path:
    shutil.copytree(path.parent, folder, dirs_exist_ok=True)
    model = onnx.load(path, load_external_data=False)
    spoil(folder, model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def initializer_of(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(weight for weight in model.graph.initializer if weight.name == name)


@pytest.fixture(scope="module", params=[known for known in get_args(Precision) if known != "source"])
def with_a_nan(request, tmp_path_factory):
    """A model to which some of the numbers of token 7, and not its first, are none."""
    folder, in_blocks = tmp_path_factory.mktemp(request.param), request.param == "int4"
    source = tiny_llama_checkpoint(folder / "checkpoint", hidden_size=128, tie_word_embeddings=False)
    if not in_blocks:
        weights = load_file(source / "model.safetensors")
        weights["model.embed_tokens.weight"][7, 100] = np.nan
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():     # np.errstate is this thread's, and others pack weights
        warnings.simplefilter("ignore", RuntimeWarning)
        file = write_graph(source, folder / "graph", precision=request.param).folder / "model.onnx"
    if in_blocks:   # an export refuses such a scale, and a file may still have it
        file = spoilt(file, folder / "spoilt", spoil_a_scale_of_token_7)
    return OnnxLogits(file, max_num_seqs=2, max_length=32)


def spoil_a_scale_of_token_7(folder: Path, model: onnx.ModelProto) -> None:
    blocks = np.zeros((32, 4, 34), np.uint8)    # of Q8_0: a scale in fp16, and 32 codes
    zeros = pack_blocks(blocks.reshape(32, -1), "Q8_0")
    blocks[7, 3, :2] = 0x01                     # a finite scale, which tells where its bytes are
    [places] = np.nonzero(pack_blocks(blocks.reshape(32, -1), "Q8_0") != zeros)
    weight = initializer_of(model, "embedding")
    external = {entry.key: entry.value for entry in weight.external_data}
    content = np.fromfile(folder / external["location"], np.uint8)
    content[int(external.get("offset", 0)) + places] = 0xFF
    content.tofile(folder / external["location"])


def test_nan_affects_its_own_row_only_and_is_gone_with_it(with_a_nan):
    def run(first: list[int]) -> list[np.ndarray]:
        """The logits behind the last token of two rows, after a prompt and after one token more."""
        pool, rows = BlockPool(with_a_nan), [Row(np.array(ids)) for ids in ([*first, 9], [5, 6, 9, 8, 9])]
        prompts = pool.forward(rows, lengths=[len(row.ids) - 1 for row in rows])
        decodes = pool.forward(rows, lengths=[1, 1])
        return [np.stack([logits[-1] for logits in found]) for found in (prompts, decodes)]

    sound = run([5, 6])
    for found, expected in zip(run([5, 6, 7, 8, 9, 7]), sound, strict=True):
        assert np.isnan(found[0]).all()
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)
    for found, expected in zip(run([5, 6]), sound, strict=True):
        np.testing.assert_array_equal(found, expected)
