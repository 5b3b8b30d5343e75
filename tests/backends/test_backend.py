from __future__ import annotations

import subprocess
import sys

import pytest

from genserve.backends.onnxruntime import OnnxRuntimeBackend
from genserve.backends.pytorch import PyTorchBackend
from genserve.backends.registry import find_backend
from genserve.backends.tensorflow import TensorFlowBackend
from genserve.errors import RepositoryError

OF_ANOTHER = '''
class DoublingBackend:
    """A backend that another package brings."""
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package in a folder, as pip leaves it, with its entry points."""
    (tmp_path / "doubling.py").write_text(OF_ANOTHER)
    metadata = tmp_path / "doubling-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[genserve.backends]\ndoubling = doubling:DoublingBackend\nbroken = doubling_that_is_not_there:X\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("doubling", None)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("onnxruntime", OnnxRuntimeBackend), ("pytorch", PyTorchBackend), ("tensorflow", TensorFlowBackend)],
)
def test_the_backends_of_genserve_are_found_by_name(name, backend):
    assert find_backend(name) is backend


def test_a_backend_is_imported_only_when_a_model_asks_for_it():
    heavy = {"torch", "onnxruntime", "numpy", "prometheus_client"}
    code = f"import sys, genserve.backends.backend; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_backend_of_another_package_is_found_by_its_entry_point(installed):
    assert find_backend("doubling").__name__ == "DoublingBackend"


def test_an_entry_point_that_leads_nowhere_is_an_error(installed):
    with pytest.raises(RepositoryError, match="'broken' cannot be imported from doubling_that_is_not"):
        find_backend("broken")


def test_a_backend_is_not_looked_for_outside_of_the_backend_directory(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "model.py").touch()
    (tmp_path / "backends").mkdir()
    for name in ("../outside", str(tmp_path / "outside"), "a" * 300):
        with pytest.raises(RepositoryError, match="unable to find backend library"):
            find_backend(name, backend_directory=tmp_path / "backends")


def test_a_python_based_backend_is_found_in_the_backend_directory(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "model.py").touch()
    assert issubclass(find_backend("vllm", backend_directory=tmp_path), find_backend("python"))


def test_an_unknown_backend_is_rejected_with_the_known_ones(installed, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "model.py").touch()
    with pytest.raises(RepositoryError) as raised:
        find_backend("fortran", backend_directory=tmp_path)
    assert raised.value.message == (
        "unable to find backend library for backend 'fortran', "
        "try specifying runtime on the model configuration."
    )
    assert {"onnxruntime", "python", "doubling", "vllm"} <= set(
        raised.value.remedy.removeprefix("known backends: ").split(", ")
    )
