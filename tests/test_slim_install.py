"""The core without its extras: the packages of the extras are blocked in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn import ReLU

from tests.backends.networks import save_torchscript
from tests.support.slim_environment import slim_environment

TORCHSCRIPT = """
platform: "pytorch_libtorch"
max_batch_size: 4
input { name: "x__0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y__0" data_type: TYPE_FP32 dims: [ -1 ] }
"""

ANSWERS = """
import sys
from genserve import LLM

with LLM("tiny", model_repository=sys.argv[1]) as llm:
    print(llm.chat("hello", max_tokens=4, temperature=0).usage.completion_tokens)
"""

LOAD = """
import sys
from pathlib import Path
from genserve.repository.repository import Repository

repository = Repository([Path(sys.argv[1])])
repository.start()
print(repository.errors["script"])
repository.close()
"""

TENSORS = """
import numpy as np
from genserve.backends.python.pb_utils import Tensor
from genserve.errors import MissingDependency

array = np.arange(3, dtype=np.float32)
tensor = Tensor.from_dlpack("x", array)
assert np.shares_memory(np.from_dlpack(tensor), array)
try:
    Tensor.from_dlpack("x", tensor.to_dlpack())
except MissingDependency as error:
    print(error)
"""


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that cannot import the packages of the extras."""
    return slim_environment(tmp_path_factory.mktemp("slim"))


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, check=False, timeout=60
    )


def test_text_is_generated_without_the_extras(tiny_repository: Path, slim: dict[str, str]) -> None:
    done = run("-c", ANSWERS, str(tiny_repository), env=slim)
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr


def test_the_load_of_a_torchscript_model_names_its_extra(slim: dict[str, str], tmp_path: Path) -> None:
    save_torchscript(tmp_path / "script" / "1" / "model.pt", ReLU())
    (tmp_path / "script" / "config.pbtxt").write_text(TORCHSCRIPT)
    done = run("-c", LOAD, str(tmp_path), env=slim)
    assert "serving a TorchScript model needs PyTorch" in done.stdout, done.stderr
    assert "pip install 'genserve[torch]'" in done.stdout


def test_numpys_arrays_are_shared_and_capsules_need_torch(slim: dict[str, str]) -> None:
    done = run("-c", TENSORS, env=slim)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Tensor.from_dlpack needs PyTorch (pip install 'genserve[torch]')\n"
