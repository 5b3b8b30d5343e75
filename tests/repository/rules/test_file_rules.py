"""What check finds in the files that a load opens, and that the load says the same."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import onnx
import pytest
import torch

from genserve.repository.model_validation import repository_diagnostics
from genserve.repository.repository import Repository
from tests.backends.networks import save_onnx, save_torchscript

FLOAT = onnx.TensorProto.FLOAT
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 134515008\n"
ONNX = """backend: "onnxruntime"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
TORCH = """backend: "pytorch"
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }
"""


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def models(tiny_repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "models")


def model(root: Path, config: str) -> Path:
    """A model `m` that is in order; returns the file that it is loaded from."""
    (root / "m").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(config)
    if "pytorch" in config:
        return save_torchscript(root / "m" / "1" / "model.pt", Double())
    nodes = [("Identity", ["x"], ["y"], {})]
    return save_onnx(
        root / "m" / "1" / "model.onnx", nodes, inputs={"x": (FLOAT, ["n"])}, outputs={"y": (FLOAT, ["n"])}
    )


def diagnostic(root: Path, name: str = "m"):
    [found] = repository_diagnostics([root])[name]
    assert found.severity.value == "error"
    assert found.remedy
    return found


def load_error(root: Path, name: str = "m") -> str:
    repository = Repository([root])
    repository.start()
    repository.close()
    return str(repository.errors[name])


@pytest.mark.parametrize("config", [ONNX, TORCH, 'backend: "onnxruntime"'])
def test_a_valid_model_file_has_no_diagnostics(tmp_path, config):
    model(tmp_path, config)
    assert repository_diagnostics([tmp_path]) == {"m": ()}


@pytest.mark.parametrize("config", [ONNX, TORCH])
def test_a_git_lfs_pointer_is_reported(tmp_path, config):
    file = model(tmp_path, config)
    file.write_bytes(POINTER)
    found = diagnostic(tmp_path)
    assert found.path == file
    assert found.message == f"{file.name} is a Git LFS pointer, not the file itself"
    assert found.remedy == "run `git lfs pull` in the repository"
    assert found.message in load_error(tmp_path)


@pytest.mark.parametrize("config", [ONNX, TORCH])
def test_an_empty_file_is_reported(tmp_path, config):
    file = model(tmp_path, config)
    file.write_bytes(b"")
    assert diagnostic(tmp_path).message == f"{file.name} is empty"
    assert f"{file.name} is empty" in load_error(tmp_path)


@pytest.mark.parametrize("config", [ONNX, TORCH])
@pytest.mark.parametrize("content", [b"garbage" * 400, None])
def test_damaged_files_are_reported(tmp_path, config, content):
    file = model(tmp_path, config)
    whole = file.read_bytes()
    file.write_bytes(content or whole[: len(whole) // 2])
    found = diagnostic(tmp_path)
    assert found.path == file
    assert "onnx runtime error" in found.message or "is not a TorchScript archive" in found.message
    assert found.message[:20] in load_error(tmp_path)


@pytest.mark.parametrize("config", [ONNX, TORCH])
def test_other_models_are_checked_after_a_damaged_one(tmp_path, config):
    file = model(tmp_path, config)
    shutil.copytree(tmp_path / "m", tmp_path / "whole")
    whole = file.read_bytes()
    random = Random(1)
    num_found = 0
    for _ in range(50):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        file.write_bytes(damaged)
        diagnostics = repository_diagnostics([tmp_path])
        assert diagnostics["whole"] == ()
        assert all(diagnostic.message and diagnostic.remedy for diagnostic in diagnostics["m"])
        num_found += bool(diagnostics["m"])
    assert num_found


@pytest.mark.parametrize(
    ("config", "name", "severity"),
    [
        (ONNX, "model.onnx", "error"),
        (ONNX, "notes", "warning"),
        (ONNX.replace("onnxruntime", "python"), "model.py", "error"),
    ],
)
def test_an_unreadable_file_is_reported(tmp_path, config, name, severity):
    file = model(tmp_path, config).with_name(name)
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/self/mem")  # nobody can read its beginning, not even root
    diagnostics = [each for each in repository_diagnostics([tmp_path])["m"] if "read" in each.message]
    assert [diagnostic.severity.value for diagnostic in diagnostics] == [severity]
    assert diagnostics[0].message == f"{name} cannot be read: {os.strerror(errno.EIO)}"
    assert diagnostics[0].remedy


@pytest.mark.parametrize("field", ["ir_version", "opset"])
def test_a_graph_too_new_for_the_runtime_is_reported(tmp_path, field):
    file = model(tmp_path, ONNX)
    graph = onnx.load(file)
    if field == "opset":
        graph.opset_import[0].version = 999
    else:
        graph.ir_version = 999
    onnx.save(graph, file)
    assert "onnx runtime error" in diagnostic(tmp_path).message


def test_a_config_of_another_graph_is_reported_at_its_tensor(tmp_path):
    model(tmp_path, ONNX.replace('name: "x" data_type: TYPE_FP32', 'name: "x" data_type: TYPE_INT64'))
    found = diagnostic(tmp_path)
    assert found.where == f"{tmp_path}/m/config.pbtxt:2:1"
    assert "expects datatype TYPE_INT64 for input 'x', model provides TYPE_FP32" in found.message
    assert found.message in load_error(tmp_path)


def test_weights_without_code_are_reported(tmp_path):
    file = model(tmp_path, TORCH)
    torch.save({"weight": torch.zeros(2)}, file)
    assert "it holds weights without code" in diagnostic(tmp_path).message
    assert "torch.jit.save" in diagnostic(tmp_path).remedy


def test_check_opens_torchscript_without_torch(tmp_path):
    model(tmp_path, TORCH)
    code = (
        "import sys; from pathlib import Path; from genserve.repository.model_validation import *;"
        f"assert repository_diagnostics([Path({str(tmp_path)!r})]) == {{'m': ()}};"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_a_saved_model_without_its_graph_is_reported(tmp_path):
    (tmp_path / "m" / "1" / "model.savedmodel" / "variables").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(TORCH.replace("pytorch", "tensorflow"))
    assert "there is no saved_model.pb" in diagnostic(tmp_path).message


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", b"{"), ("tokenizer.json", POINTER), ("tokenizer_config.json", b"[]")],
)
def test_a_broken_tokenizer_is_reported(models, file, content):
    (models / "tiny_tokenizer" / "1" / file).write_bytes(content)
    found = diagnostic(models, "tiny_tokenizer")
    assert file in found.message
    assert found.message in load_error(models, "tiny")


@pytest.mark.parametrize("size", [0, 10, -100])
def test_external_weights_of_a_logits_graph_must_be_complete(models, size):
    data = models / "tiny_logits" / "1" / "model.onnx.data"
    os.truncate(data, size if size >= 0 else data.stat().st_size + size)
    found = diagnostic(models, "tiny_logits")
    assert "out of bounds" in found.message
    assert "out of bounds" in load_error(models, "tiny")
    data.unlink()
    assert "External data path does not exist" in diagnostic(models, "tiny_logits").message
    data.write_bytes(POINTER)
    assert "model.onnx.data is a Git LFS pointer" in diagnostic(models, "tiny_logits").message
    assert "model.onnx.data is a Git LFS pointer" in load_error(models, "tiny")


def test_a_graph_without_logits_is_reported(models):
    file = models / "tiny_logits" / "1" / "model.onnx"
    nodes = [("Identity", ["x"], ["y"], {})]
    save_onnx(file, nodes, inputs={"x": (FLOAT, ["n"])}, outputs={"y": (FLOAT, ["n"])})
    assert "has no KV cache: its inputs are x" in diagnostic(models, "tiny_logits").message
    assert "has no KV cache: its inputs are x" in load_error(models, "tiny")


def test_a_context_longer_than_the_graphs_is_rejected_at_its_parameter(models):
    config = models / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "256"', f'string_value: "{2**40}"'))
    found = diagnostic(models, "tiny_logits")
    assert all(each in found.message for each in ("max_sequence_length", str(2**40), "model.onnx", "256"))
    assert "max_sequence_length" in config.read_text().splitlines()[found.line - 1]
    assert found.message in load_error(models, "tiny")
