"""TorchScript with a KV cache; what it computes is in test_logits_runtimes.py and tests/export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from genserve.backends.device_memory import DeviceMemory
from genserve.backends.logits_torchscript import TorchLogits
from genserve.errors import RepositoryError
from genserve.export.form import Form
from tests.backends.networks import two_outputs_torchscript
from tests.checkpoints import tiny_llama_checkpoint
from tests.export.graphs import write_graph


@pytest.fixture(scope="module")
def module(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    return write_graph(tiny_checkpoint, folder, form=Form.TORCHSCRIPT).folder / "model.pt"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module to which token 7 is embedded as what is no number."""
    folder = tmp_path_factory.mktemp("spoiled")
    source = tiny_llama_checkpoint(folder / "checkpoint", tie_word_embeddings=False)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = np.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return write_graph(source, folder / "graph", form=Form.TORCHSCRIPT).folder / "model.pt"


def test_what_is_no_number_does_not_outlast_its_row(spoiled: Path) -> None:
    """A mask hides what lies behind a row, but 0 * NaN would be NaN."""
    logits, fresh = (TorchLogits(spoiled, num_slots=2, max_length=32) for _ in range(2))
    assert np.isnan(logits.prefill([[5, 6, 7, 8, 9, 10]], first_slot=0, past=0)).all()
    prompts = [[11, 12], [13, 14, 15, 16, 17]]
    again, expected = (model.prefill(prompts, first_slot=0, past=0) for model in (logits, fresh))
    np.testing.assert_array_equal(again, expected)
    last, past = np.array([18, 19]), np.array([2, 5])
    np.testing.assert_array_equal(logits.decode(last, past), fresh.decode(last, past))


def test_what_is_no_number_moves_with_its_row(spoiled: Path) -> None:
    logits, fresh = (TorchLogits(spoiled, num_slots=2, max_length=32) for _ in range(2))
    logits.prefill([[5, 7, 8, 9]], first_slot=1, past=0)
    logits.move(source=1, target=0, length=4)
    rows = []
    for model in (logits, fresh):
        model.prefill([[11]], first_slot=0, past=0)
        model.prefill([[13, 14, 15, 16, 17]], first_slot=1, past=0)
        rows.append(model.decode(np.array([18, 19]), np.array([1, 5])))
    np.testing.assert_array_equal(*rows)


def test_a_budget_that_shortens_the_context_is_told(
    module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = TorchLogits(module, num_slots=1, max_length=256)
    assert not caplog.text
    half = TorchLogits(module, num_slots=1, max_length=256, cache_bytes=whole.kv_cache_bytes // 2)
    assert half.max_length == whole.max_length // 2
    assert f"{half.max_length} tokens at the most, not 256" in caplog.text


def test_the_cache_keeps_to_its_budget(module: Path) -> None:
    whole = TorchLogits(module, num_slots=4, max_length=256)
    half = TorchLogits(module, num_slots=4, max_length=256, cache_bytes=whole.kv_cache_bytes // 2)
    assert half.max_cached_tokens == whole.max_cached_tokens // 2
    with pytest.raises(RepositoryError, match="holds nothing"):
        TorchLogits(module, num_slots=4, max_length=256, cache_bytes=100)


def test_memory_that_is_given_back_is_empty(module: Path) -> None:
    logits = TorchLogits(module, num_slots=2, max_length=256)
    logits.prefill([[5] * 200], first_slot=1, past=0)
    [(_, before)] = logits.cache.slots(1, num_slots=1)
    assert before[:, :, logits.page_tokens : 200].any()
    logits.give_back(1, length=10)
    assert not before[:, :, logits.page_tokens :].any()
    assert before[:, :, :10].any()


def test_a_decoding_loop_may_change_its_row_where_it_lies(module: Path) -> None:
    """Of the memory of the host it is numpy's, of a device torch's; for that the CPU stands in."""
    for memory, kind in ((None, np.ndarray), (DeviceMemory("cpu"), torch.Tensor)):
        row = TorchLogits(module, num_slots=1, memory=memory).prefill([[5, 6]], first_slot=0, past=0)[0]
        assert isinstance(row, kind)
        row[7] = 1000.0
        assert int(row.argmax()) == 7


def test_a_file_that_is_no_module_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"nothing")
    with pytest.raises(RepositoryError, match="cannot be loaded") as caught:
        TorchLogits(tmp_path / "model.pt", num_slots=1)
    assert "--overwrite" in caught.value.remedy


def test_a_module_without_a_cache_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = two_outputs_torchscript(tmp_path / "model.pt")
    with pytest.raises(RepositoryError, match="does not tell the sizes of its KV cache") as caught:
        TorchLogits(path, num_slots=1)
    assert "--format torchscript" in caught.value.remedy
