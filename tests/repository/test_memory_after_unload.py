"""The memory of a process returns after unloads: it does not grow over many of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.networks import save_torchscript
from tests.faults.broken_repository import CONFIG, write_model
from tests.support.python_models import write_model as write_python_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_MAX_MB_PER_CYCLE = 0.02
_TORCHSCRIPT = CONFIG.replace("onnxruntime", "pytorch").replace('"X"', '"X__0"').replace('"Y"', '"Y__0"')
_LEAKS = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.leaked = [*getattr(pb_utils, "leaked", []), b"x" * 100_000]
"""


class _AddsOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _torchscript(folder: Path) -> None:
    save_torchscript(write_model(folder, None, config=_TORCHSCRIPT) / "model.pt", _AddsOne())


def _mb_per_cycle(root: Path, model: str, *, cycles: int) -> float:
    """The slope of the memory over the second half of the cycles; prints it."""
    command = [sys.executable, "-m", "tests.repository.load_cycles", str(root), model, str(cycles)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    memory = np.array(json.loads(done.stdout))[cycles // 2 :] / 2**20
    slope = float(np.polyfit(np.arange(len(memory)), memory, 1)[0])
    print(json.dumps({"model": model, "cycles": cycles, "mb_per_cycle": round(slope, 5), "mb": memory[-1]}))
    return slope


@pytest.mark.parametrize(
    ("name", "write", "cycles"),
    [
        ("onnxruntime", write_model, 200),
        ("pytorch", _torchscript, 200),
        ("python", lambda folder: write_python_model(folder.parent, folder.name), 200),
    ],
)
def test_the_memory_of_a_model_returns(
    tmp_path: Path, name: str, write: Callable[[Path], object], cycles: int
) -> None:
    write(tmp_path / name)
    assert _mb_per_cycle(tmp_path, name, cycles=cycles) < _MAX_MB_PER_CYCLE


@pytest.mark.parametrize("name", ["tiny", "tiny_tokenizer"])
def test_the_memory_of_a_text_model_returns(tiny_repository: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(tiny_repository, tmp_path / "models")
    assert _mb_per_cycle(tmp_path / "models", name, cycles=100) < _MAX_MB_PER_CYCLE


def test_a_model_that_leaks_is_noticed(tmp_path: Path) -> None:
    write_python_model(tmp_path, "leaks", code=_LEAKS)
    assert _mb_per_cycle(tmp_path, "leaks", cycles=60) > _MAX_MB_PER_CYCLE
