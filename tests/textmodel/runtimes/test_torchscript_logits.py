"""TorchScript with a KV cache; its results are tested in test_runtimes.py and tests/export."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from genserve.engine.logits_model import ForwardBatch
from genserve.errors import RepositoryError
from genserve.export.export_options import ExportFormat
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits
from tests.backends.networks import two_outputs_torchscript
from tests.export.graphs import write_graph
from tests.support.tiny_llama import tiny_llama_checkpoint
from tests.textmodel.runtimes.cached_sequences import CachedSequences


@pytest.fixture(scope="module")
def module(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    return write_graph(tiny_checkpoint, folder, export_format=ExportFormat.TORCHSCRIPT).folder / "model.pt"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module that embeds token 7 as NaN."""
    folder = tmp_path_factory.mktemp("spoiled")
    source = tiny_llama_checkpoint(folder / "checkpoint", tie_word_embeddings=False)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = np.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return write_graph(source, folder / "graph", export_format=ExportFormat.TORCHSCRIPT).folder / "model.pt"


def test_nan_does_not_outlast_its_sequence(spoiled: Path) -> None:
    """A mask hides the rest of a sequence's last block, but 0 * NaN would be NaN."""
    logits, fresh = (TorchLogits(spoiled, max_num_seqs=2, max_length=32) for _ in range(2))
    sequences = CachedSequences(logits)
    for _, row in sequences.forward({"a": [7] * 32, "b": [5, 7, *[6] * 30]}):
        assert np.isnan(row).all()
    for name in "ab":
        sequences.shorten(name, 0)
    others = CachedSequences(fresh)
    for new in ({"a": [11, 12], "b": [13, 14, 15, 16, 17]}, {"a": [18], "b": [19]}):
        rows, expected = sequences.forward(new, wanted="all"), others.forward(new, wanted="all")
        for (_, found), (_, row) in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(found, row)


def test_nan_does_not_affect_other_sequences(spoiled: Path) -> None:
    sequences = CachedSequences(TorchLogits(spoiled, max_num_seqs=2, max_length=32))
    for new in ({"a": [7, 5, 6], "b": [5, 6, 8]}, {"a": [5], "b": [6]}):
        (_, failed), (_, row) = sequences.forward(new)
        assert np.isnan(failed).all()
        assert np.isfinite(row).all()


def test_a_budget_that_shortens_the_context_is_logged(
    module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = TorchLogits(module, max_num_seqs=1, max_length=256)
    assert not caplog.text
    half = TorchLogits(module, max_num_seqs=1, max_length=256, kv_cache_bytes=whole.kv_cache_bytes // 2)
    assert half.max_length == whole.max_length // 2
    assert f"limited to {half.max_length} tokens, not 256" in caplog.text


def test_the_cache_stays_within_its_budget(module: Path) -> None:
    whole = TorchLogits(module, max_num_seqs=4, max_length=256)
    half = TorchLogits(module, max_num_seqs=4, max_length=256, kv_cache_bytes=whole.kv_cache_bytes // 2)
    assert half.num_blocks == whole.num_blocks // 2
    with pytest.raises(RepositoryError, match="no room for one block"):
        TorchLogits(module, max_num_seqs=4, max_length=256, kv_cache_bytes=100)


def test_a_decoding_loop_may_change_its_row_in_place(module: Path) -> None:
    """The row is numpy's in the host's memory, and torch's on a device, for which the CPU stands in."""
    batch = ForwardBatch(
        token_ids=np.array([5, 6, 7]),
        positions=np.array([0, 1, 0]),
        query_start_loc=np.array([0, 2, 3], np.int32),
        num_computed_tokens=np.array([0, 0], np.int32),
        block_table=np.array([[0], [1]], np.int32),
        logits_indices=np.array([1, 2]),
    )
    for memory, kind in ((None, np.ndarray), (DeviceMemory("cpu"), torch.Tensor)):
        rows = TorchLogits(module, max_num_seqs=2, memory=memory).forward(batch)
        assert isinstance(rows, kind)
        rows[1][7] = 1000.0
        assert int(rows[1].argmax()) == 7


def test_a_module_with_slots_in_place_of_blocks_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    def forward(input_ids, past, rows, kv_cache):
        return kv_cache[past, rows] + input_ids

    zeros = torch.zeros(1, dtype=torch.long)
    file, metadata = tmp_path / "model.pt", {"genserve.json": '{"genserve.num_layers": "2"}'}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)     # torch recommends torch.export instead
        traced = torch.jit.trace(forward, (zeros, zeros, zeros, torch.zeros(1, 1)), check_trace=False)
        torch.jit.save(traced, str(file), _extra_files=metadata)
    with pytest.raises(RepositoryError, match="KV cache") as caught:
        TorchLogits(file, max_num_seqs=1)
    assert "--overwrite" in caught.value.remedy


def test_a_file_that_is_not_a_module_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"nothing")
    with pytest.raises(RepositoryError, match="cannot be loaded") as caught:
        TorchLogits(tmp_path / "model.pt", max_num_seqs=1)
    assert "--overwrite" in caught.value.remedy


def test_a_module_without_a_cache_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = two_outputs_torchscript(tmp_path / "model.pt")
    with pytest.raises(RepositoryError, match="sizes of its KV cache") as caught:
        TorchLogits(path, max_num_seqs=1)
    assert "--format torchscript" in caught.value.remedy
