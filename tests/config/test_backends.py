"""Backends: which one runs a model, and the values of `--backend-config`."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.config.backends import BackendConfig, deduce_backend, known_backends
from genserve.config.schema import new_model_config
from genserve.errors import GenserveError, RepositoryError


def deduced(text: str, *, folder: Path, files: tuple[str, ...] = ()) -> tuple[str, str, str]:
    """Backend, platform and file name."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    message = text_format.Parse(text, new_model_config())
    deduce_backend(message, folder)
    return message.backend, message.platform, message.default_model_filename


@pytest.mark.parametrize(
    ("text", "golden"),
    [
        ('platform: "onnxruntime_onnx"', ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('platform: "pytorch_libtorch"', ("pytorch", "pytorch_libtorch", "model.pt")),
        ('platform: "tensorflow_savedmodel"', ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
        ('platform: "tensorflow_graphdef"', ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ('platform: "ensemble"', ("", "ensemble", "")),
        ('backend: "onnxruntime"', ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('backend: "pytorch" default_model_filename: "a.pt"', ("pytorch", "pytorch_libtorch", "a.pt")),
        ('backend: "python"', ("python", "", "model.py")),
        ('backend: "mine"', ("mine", "", "")),
        ('default_model_filename: "model.py"', ("python", "", "model.py")),
        ('default_model_filename: "model.graphdef"', ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ('platform: "python"', ("", "python", "")),
    ],
)
def test_backend_platform_and_file_name_follow_from_each_other(text, golden, tmp_path):
    assert deduced(text, folder=tmp_path / "m") == golden


@pytest.mark.parametrize(
    ("files", "backend"),
    [
        (("1/model.py",), "python"),
        (("1/model.onnx", "1/model.py"), "onnxruntime"),
        (("1/model.onnx/weights",), "onnxruntime"),
        (("1/model.pt",), "pytorch"),
        (("1/model.savedmodel/saved_model.pb",), "tensorflow"),
        (("1/model.py", "2/model.onnx", "configs/model.pt"), "python"),
    ],
)
def test_the_backend_follows_from_the_files_of_the_first_version(files, backend, tmp_path):
    assert deduced("", folder=tmp_path / "m", files=files)[0] == backend


def test_the_backend_follows_from_the_model_name_last(tmp_path):
    assert deduced("", folder=tmp_path / "model.mine") == ("mine", "", "model.mine")


def test_a_model_without_backend_is_rejected_with_tritons_message(tmp_path):
    with pytest.raises(RepositoryError) as raised:
        deduced("max_batch_size: 1", folder=tmp_path / "m", files=("1/other",))
    assert raised.value.message == (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )
    assert '`backend: "python"`' in raised.value.remedy


def test_backends_in_python_are_known_by_their_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").touch()
    (tmp_path / "other").mkdir()
    known = known_backends([tmp_path])
    assert {"python", "onnxruntime", "mine"} <= set(known)
    assert "other" not in known


def test_a_setting_of_one_backend_overrides_that_of_all_backends():
    for words in (
        ["default-max-batch-size=16", "onnxruntime,default-max-batch-size=8"],
        ["onnxruntime,default-max-batch-size=8", "default-max-batch-size=16"],
    ):
        assert BackendConfig.parse(words) == BackendConfig(default_max_batch_size=8)
    assert BackendConfig.parse(["default-max-batch-size=16"]).default_max_batch_size == 16
    assert BackendConfig.parse([]) == BackendConfig(default_max_batch_size=4)


def test_the_folder_of_backends_may_be_a_setting(tmp_path):
    words = [f"backend-directory={tmp_path}"]
    assert BackendConfig.parse(words).backend_directory == tmp_path
    assert BackendConfig.parse(words, backend_directory=tmp_path).backend_directory == tmp_path
    with pytest.raises(GenserveError) as raised:
        BackendConfig.parse(words, backend_directory=Path("/other"))
    assert "--backend-directory" in raised.value.remedy


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("python,shm-default-byte-size=16777216", "through a pipe"),
        ("python,stub-timeout-seconds=60", "until it exits"),
        ("onnxruntime,enable-global-threadpool=1", "`intra_op_thread_count` in the model's parameters"),
        ("tensorflow,gpu-memory-fraction=0.5", "TensorFlow takes memory as it needs it"),
        ("mine,shm-region-prefix-name=a,b", "through a pipe"),
    ],
)
def test_a_setting_that_changes_only_resources_is_ignored_with_a_reason(tmp_path, caplog, word, reason):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").touch()
    assert BackendConfig.parse([word], backend_directory=tmp_path).default_max_batch_size == 4
    (record,) = caplog.records
    assert f"--backend-config={word} is ignored: " in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("word", "message", "remedy"),
    [
        ("default-max-batch-size", "is not BACKEND,SETTING=VALUE", "onnxruntime,default-max-batch-size=8"),
        (",default-max-batch-size=8", "is not BACKEND,SETTING=VALUE", ""),
        ("onnxruntime,default-max-batch-size=", "is not BACKEND,SETTING=VALUE", ""),
        ("onnxruntime,default-max-batch-size=-1", "to '-1', which is not a batch size", "integer"),
        ("tensorrt,version=8", "an unknown backend 'tensorrt'", "known backends: tensorflow, onnx"),
        ("python,shm-size=4", "'shm-size', which is not a setting of the backend 'python'", "shm-default"),
        ("pytorch,threads=4", "which is not a setting of the backend 'pytorch'", "'pytorch': none"),
        ("min-compute-capability=6.0", "is not a setting for all backends", "backend-directory, default-"),
    ],
)
def test_an_unknown_setting_is_rejected_with_the_known_ones(word, message, remedy):
    with pytest.raises(GenserveError) as raised:
        BackendConfig.parse([word])
    assert message in raised.value.message
    assert remedy in raised.value.remedy
