"""The memory of a GPU, on the CPU: torch tensors that a graph is bound to."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch

from genserve.backends.device_memory import DeviceMemory
from genserve.backends.logits_onnx import OnnxLogits
from genserve.errors import RepositoryError


@pytest.fixture
def path(tiny_repository: Path) -> Path:
    return tiny_repository / "tiny_logits" / "1" / "model.onnx"


def test_there_are_as_many_slots_as_the_budget_has_room_for(path, caplog):
    whole = OnnxLogits(path, num_slots=4, max_length=64, memory=DeviceMemory("cpu"))
    slot_bytes = whole.kv_cache_bytes // 4
    with caplog.at_level(logging.WARNING):
        fitting = OnnxLogits(
            path, num_slots=4, max_length=64, cache_bytes=3 * slot_bytes - 1, memory=DeviceMemory("cpu")
        )
    assert fitting.num_slots == 2
    assert fitting.kv_cache_bytes == 2 * slot_bytes
    assert "2 token sequences share a step on cpu, not 4" in caplog.text


def test_a_budget_without_room_for_one_slot_is_refused(path):
    with pytest.raises(RepositoryError, match=r"4 slots of 64 tokens cannot be reserved: one slot takes \d+"):
        OnnxLogits(path, num_slots=4, max_length=64, cache_bytes=1000, memory=DeviceMemory("cpu"))


class CopiedMemory(DeviceMemory):
    """What ONNX Runtime does with a buffer that lies elsewhere than an operator wants it: it takes a copy."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.copies: list[torch.Tensor] = []

    def address(self, buffer):
        self.copies.append(buffer.clone())
        return self.copies[-1].data_ptr()


def test_a_graph_whose_cache_is_not_written_where_it_lies_is_refused(path):
    with pytest.raises(RepositoryError, match=r"does not keep its cache on cpu: past_key_values\.0\.key"):
        OnnxLogits(path, num_slots=2, max_length=64, memory=CopiedMemory())


def test_a_provider_that_does_not_start_is_refused_rather_than_replaced_by_the_cpu(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX Runtime warns, and goes on
        with pytest.raises(RepositoryError, match="CUDAExecutionProvider does not start"):
            OnnxLogits(path, num_slots=2, max_length=64, memory=DeviceMemory("cuda:0"))
