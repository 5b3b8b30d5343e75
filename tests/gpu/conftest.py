"""Tests on a GPU: all of them are skipped where there is none.

`GENSERVE_GPU_TESTS=cpu` runs them on the CPU as far as that goes, to try the tests themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from genserve.export import SilentProgress, export_model, pull
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory

DEVICE = os.environ.get("GENSERVE_GPU_TESTS", "cuda:0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = f"needs a GPU: torch {torch.__version__} finds none"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # What libraries warn of on a GPU, nobody may have seen before; it is not what is tested.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if DEVICE.startswith("cuda") and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def memory(device: str) -> DeviceMemory:
    return DeviceMemory(device)


@pytest.fixture(scope="session")
def half_repository(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """A random model of two layers as model `tiny`, fp16."""
    repository = tmp_path_factory.mktemp("half")
    export_model(
        str(tiny_checkpoint), repository=repository, name="tiny", precision="fp16", progress=SilentProgress()
    )
    return repository


@pytest.fixture(scope="session")
def half_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, fp16."""
    repository = tmp_path_factory.mktemp("half_smollm2")
    pull("smollm2", repository=repository, precision="fp16", progress=SilentProgress())
    return repository
