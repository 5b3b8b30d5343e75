"""Load requests: configs and files in place of those of the folder."""

from __future__ import annotations

import gc
import json
import re
import tempfile
from errno import EEXIST
from os import strerror
from pathlib import Path

import pytest
from google.protobuf import json_format

from genserve.config.parse import parse_message
from genserve.errors import InferenceError, Status
from tests.repository.test_model_lifecycle import ENSEMBLE, index, opened, until
from tests.support.python_models import ask, value, write_model


def test_the_config_of_a_load_request_holds_until_the_next(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=1)
    config = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    with opened(tmp_path, "one") as repository:
        repository.load("one", config=json.dumps(config))
        assert repository.find("one").config.max_batch_size == 2
        repository.load("one")
        assert repository.find("one").config.max_batch_size == 0


def test_an_ensemble_loaded_with_a_config_loads_its_steps(tmp_path: Path) -> None:
    write_model(tmp_path, "one", number=1)
    write_model(tmp_path, "three", number=3)
    write_model(tmp_path, "both", config=ENSEMBLE.replace('"two"', '"one"'))
    message = parse_message(ENSEMBLE.replace('"two"', '"three"'))
    with opened(tmp_path) as repository:
        repository.load("both", config=json_format.MessageToJson(message))
        assert value(ask(repository, "both", X=[1])) == [5]
        repository.unload("three")
        assert not repository.is_ready("both")
        repository.load("three")
        assert value(ask(repository, "both", X=[1])) == [5]
        repository.load("both")
        assert value(ask(repository, "both", X=[1])) == [3]


def test_the_files_of_a_load_request_replace_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "one", number=1)
    code = (folder / "1" / "model.py").read_bytes().replace(b"x + 1", b"x + 100")
    config = {
        "backend": "python",
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": ["-1"]}],
        "output": [{"name": "Y", "dataType": "TYPE_FP32", "dims": [-1]}],
    }
    with opened(tmp_path, "one") as repository:
        with pytest.raises(InferenceError) as caught:
            repository.load("one", files={"1/model.py": code})
        assert (caught.value.status, "config" in caught.value.remedy) == (Status.INTERNAL, True)
        repository.load("one", config=json.dumps(config), files={"1/model.py": code})
        assert value(ask(repository, "one", X=[1])) == [101]


def test_the_config_of_a_load_request_is_not_kept(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    text = '{"backend": "python", "max_batch_size": 4, "parameters": {"k": {"string_value": "v"}}, %s}'
    tensors = '"input": [{"name":"X","data_type":"TYPE_FP32","dims":[-1]}], "output": []'
    with opened(tmp_path, "one") as repository:
        repository.load("one", config=text % tensors)
        assert repository.find("one").config.max_batch_size == 4
        write_model(tmp_path, "one", number=2)
        repository.load("one")
        assert repository.find("one").config.max_batch_size == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/one", "a\\b", "a\0b", ".hidden", "x" * 300])
def test_an_invalid_model_name_is_rejected(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as repository, pytest.raises(InferenceError, match=re.escape(repr(name))) as caught:
        repository.load(name, config="{}", files={"1/model.py": b""})
    assert caught.value.status is Status.INVALID_ARG


@pytest.mark.parametrize("path", ["", ".", "/", "../x", "../../x", "/../x", "1/../../x", "a\0b", "x" * 300])
def test_a_path_out_of_the_folder_is_rejected(tmp_path: Path, path: str) -> None:
    with opened(tmp_path) as repository, pytest.raises(InferenceError) as caught:
        repository.load("one", config="{}", files={path: b""})
    assert caught.value.status is Status.INVALID_ARG
    assert "file:1/model.py" in caught.value.remedy


def test_conflicting_paths_are_rejected(tmp_path: Path) -> None:
    with opened(tmp_path) as repository, pytest.raises(InferenceError, match=f"'a/b'.*{strerror(EEXIST)}"):
        repository.load("one", config="{}", files={"a": b"", "a/b": b""})


def test_the_files_of_a_load_request_are_removed_with_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "one")
    code = (folder / "1" / "model.py").read_bytes()
    config = '{"backend": "python", "input": [], "output": []}'
    uploads = tmp_path / ".uploads"
    uploads.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(uploads))
    with opened(tmp_path, "one") as repository:
        for _ in range(3):
            repository.load("one", config=config, files={"1/model.py": code})
        assert list(uploads.iterdir())
        repository.unload("one")
        until(lambda: index(repository)["one"][0] == "UNAVAILABLE")

        def gone() -> bool:
            gc.collect()  # a thread that has just ended a version may have held its folder
            return not list(uploads.iterdir())

        until(gone)


def test_the_files_that_a_killed_server_left_are_removed_by_the_next_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "models", "one")
    left = tmp_path / ".genserve-upload.killed12.tmp"
    left.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with opened(folder.parent, "one") as repository:
        code = (folder / "1" / "model.py").read_bytes()
        config = '{"backend": "python", "input": [], "output": []}'
        repository.load("one", config=config, files={"1/model.py": code})
        assert not left.exists()
        assert list(tmp_path.glob(".genserve-upload.*.tmp"))


@pytest.mark.parametrize(
    ("field", "file"),
    [
        (
            '"output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1], "label_filename": "FILE"}]',
            "../../x",
        ),
        ('"default_model_filename": "FILE"', "/etc/passwd"),
    ],
)
def test_the_config_of_a_load_request_names_no_files_elsewhere(tmp_path: Path, field: str, file: str) -> None:
    write_model(tmp_path, "one")
    with opened(tmp_path) as repository, pytest.raises(InferenceError) as caught:
        repository.load("one", config=f'{{"backend": "python", "input": [], {field.replace("FILE", file)}}}')
    assert caught.value.status is Status.INTERNAL
    assert f"'{file}'" in caught.value.remedy
