"""Torch tensors bound to a graph as its KV cache, here on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genserve.errors import RepositoryError
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.export.graphs import write_graph
from tests.export.rows import logits_of


@pytest.fixture
def path(tiny_repository: Path) -> Path:
    return tiny_repository / "tiny_logits" / "1" / "model.onnx"


class SmallDevice(DeviceMemory):
    """The memory of a device of which 100 blocks of the tiny model are free."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def free_bytes(self) -> int | None:
        return 100 * self.block_size * 512


def test_a_budget_leaves_memory_for_runs_on_a_device(path):
    def num_blocks(kv_cache_blocks: int | None) -> int:
        num_bytes = None if kv_cache_blocks is None else kv_cache_blocks * 256 * 512
        return OnnxLogits(
            path, max_num_seqs=1000, max_length=256, kv_cache_bytes=num_bytes, memory=SmallDevice()
        ).num_blocks

    assert num_blocks(None) == 50
    assert num_blocks(7) == 7
    assert num_blocks(1000) == 90


class CopiedMemory(DeviceMemory):
    """Copies buffers, as ONNX Runtime does if they are not on the device of an operator."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.copies: list[torch.Tensor] = []

    def address(self, buffer):
        self.copies.append(buffer.clone())
        return self.copies[-1].data_ptr()


def test_a_graph_that_does_not_write_its_cache_in_place_is_rejected(path):
    with pytest.raises(RepositoryError, match=r"past_key_values\.0\.key"):
        OnnxLogits(path, max_num_seqs=2, max_length=64, memory=CopiedMemory())


def test_larger_blocks_hold_the_same_tokens(path):
    ids = list(range(5, 150))
    small, large = (
        OnnxLogits(path, max_num_seqs=1, memory=memory) for memory in (None, DeviceMemory("cpu"))
    )
    assert (small.block_size, large.block_size) == (16, 256)
    assert (logits_of(small, ids) == logits_of(large, ids)).all()


@pytest.mark.filterwarnings("ignore")   # ONNX Runtime warns, and goes on
def test_a_provider_that_does_not_start_is_rejected_rather_than_replaced_by_the_cpu(
    tiny_checkpoint, tmp_path
):
    graph = write_graph(tiny_checkpoint, tmp_path, precision="fp16")
    with pytest.raises(RepositoryError, match="CUDAExecutionProvider"):
        OnnxLogits(graph.folder / "model.onnx", max_num_seqs=2, memory=DeviceMemory("cuda:0"))


@pytest.mark.filterwarnings("ignore")
def test_a_graph_with_operators_for_the_cpu_is_rejected_on_a_gpu_with_a_remedy(path):
    with pytest.raises(RepositoryError, match="runs on the CPU alone") as caught:
        OnnxLogits(path, max_num_seqs=2, memory=DeviceMemory("cuda:0"))
    assert "--precision fp16" in caught.value.remedy
