from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.config.backends import deduce_backend, known_backends
from genserve.config.schema import new_model_config
from genserve.errors import RepositoryError


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
def test_one_word_tells_the_others(text, golden, tmp_path):
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
def test_the_files_of_the_first_version_tell_the_backend(files, backend, tmp_path):
    assert deduced("", folder=tmp_path / "m", files=files)[0] == backend


def test_at_last_the_name_of_the_model_tells_it(tmp_path):
    assert deduced("", folder=tmp_path / "model.mine") == ("mine", "", "model.mine")


def test_a_model_of_no_backend_is_refused_in_tritons_words(tmp_path):
    with pytest.raises(RepositoryError) as raised:
        deduced("max_batch_size: 1", folder=tmp_path / "m", files=("1/other",))
    assert raised.value.message == (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )
    assert '`backend: "python"`' in raised.value.remedy


def test_backends_that_are_written_in_python_are_known_by_their_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").touch()
    (tmp_path / "other").mkdir()
    known = known_backends([tmp_path])
    assert {"python", "onnxruntime", "mine"} <= set(known)
    assert "other" not in known
