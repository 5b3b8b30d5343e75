"""Strange folders in a repository: each is served or listed with a reason, and harms no other model."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.broken_repository import (
    CONFIG,
    GOOD,
    BrokenRepository,
    Write,
    serving_beside_good,
    write_model,
)


def _socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # The path of a socket has at most 107 bytes.
        folder = os.open(file.parent, os.O_DIRECTORY)
        server.bind(f"/proc/self/fd/{folder}/{file.name}")
        os.close(folder)


def _model_at(make: Write, *, file: str = "model.onnx", config: str = CONFIG) -> Write:
    def write(folder: Path) -> None:
        make(write_model(folder, None, config=config) / file)

    return write


def _version(name: str) -> Write:
    return partial(write_model, version=name)


def _without_version(folder: Path) -> None:
    shutil.rmtree(write_model(folder))


_PYTORCH = CONFIG.replace("onnxruntime", "pytorch").replace('"X"', '"X__0"').replace('"Y"', '"Y__0"')
_LABELLED = CONFIG.removesuffix("} ]\n") + 'label_filename: "labels" } ]\n'
_NO_VERSION = "at least one version must be available"

# The way to break a folder, and words of the reason.
BROKEN: dict[str, tuple[Write, str]] = {
    "no-version": (_without_version, _NO_VERSION),
    "version-0": (_version("0"), _NO_VERSION),
    "version-01": (_version("01"), _NO_VERSION),
    "version-minus-1": (_version("-1"), _NO_VERSION),
    "version-1a": (_version("1a"), _NO_VERSION),
    "version-v1": (_version("v1"), _NO_VERSION),
    "version-1.0": (_version("1.0"), _NO_VERSION),
    "version-2-63": (_version(str(2**63)), _NO_VERSION),
    "version-of-200-digits": (_version("9" * 200), _NO_VERSION),
    "model-missing": (partial(write_model, content=None), "model.onnx is missing"),
    "model-is-a-fifo": (_model_at(os.mkfifo), "model.onnx is a FIFO"),
    "model-is-a-socket": (_model_at(_socket), "model.onnx is a socket"),
    "model-is-a-device": (_model_at(lambda file: file.symlink_to("/dev/zero")), "model.onnx is a device"),
    "model-is-an-empty-folder": (_model_at(Path.mkdir), "File doesn't exist"),
    "model-links-to-itself": (_model_at(lambda file: file.symlink_to(file.name)), "model.onnx is missing"),
    "torchscript-is-a-fifo": (_model_at(os.mkfifo, file="model.pt", config=_PYTORCH), "model.pt is a FIFO"),
    "python-is-a-fifo": (
        _model_at(os.mkfifo, file="model.py", config=CONFIG.replace("onnxruntime", "python")),
        "model.py is a FIFO",
    ),
    "other-file-is-a-fifo": (lambda folder: os.mkfifo(write_model(folder) / "weights"), "weights is a FIFO"),
}
# A name of a folder, and how the index lists it.
UNPRINTABLE = {"line\nfeed": "line\\nfeed", "tab\t": "tab\\t", "not utf-8 \udcff": "not utf-8 \\udcff"}
ODD = ["with space", "-dash", "quote'\"", "semi;colon", "<b>", "%2e%2e", "x..", "é😀", "Good", "a" * 255]


def _labels_are_a_fifo(folder: Path) -> None:
    write_model(folder, config=_LABELLED)
    os.mkfifo(folder / "labels")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenRepository]:
    root = tmp_path_factory.mktemp("folders")
    for folder in (".git", "__pycache__", "lost+found"):
        (root / folder).mkdir()
    for file in (".good.swp", "notes.txt"):
        (root / file).write_bytes(GOOD)
    os.mkfifo(root / "fifo")
    (root / "to-nothing").symlink_to("nothing")
    models = {name: write for name, (write, _) in BROKEN.items()}
    models |= dict.fromkeys([*UNPRINTABLE, *ODD], write_model)
    with serving_beside_good(root, models | {"labelled": _labels_are_a_fifo}) as served:
        yield served


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_listed_with_its_reason_and_harms_no_other(
    repository: BrokenRepository, name: str
) -> None:
    repository.check_broken(name, BROKEN[name][1])
    repository.check_good()


@pytest.mark.parametrize("name", UNPRINTABLE)
def test_a_name_that_would_break_a_line_is_listed_escaped(repository: BrokenRepository, name: str) -> None:
    repository.check_broken(UNPRINTABLE[name], "not printable text in UTF-8")


@pytest.mark.parametrize("name", ODD, ids=lambda name: name[:20])
def test_a_model_with_an_odd_name_is_served(repository: BrokenRepository, name: str) -> None:
    tensor = {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}
    url = repository.http.base_url.join("/v2/models/").raw_path  # a model's name is one part of the path
    path = url + b"".join(b"%%%02X" % byte for byte in name.encode()) + b"/infer"
    request = repository.http.build_request("POST", "/", json={"inputs": [tensor]})
    request.url = request.url.copy_with(raw_path=path)
    assert repository.http.send(request).raise_for_status().json()["model_name"] == name


def test_files_and_folders_of_tools_are_no_models(repository: BrokenRepository) -> None:
    expected = {"good", "labelled", *BROKEN, *UNPRINTABLE.values(), *ODD}
    assert set(repository.index()) == expected


def test_labels_that_are_a_fifo_are_left_out(repository: BrokenRepository) -> None:
    assert repository.infer("labelled").json()["outputs"][0]["data"] == [2.0, 2.0]


def test_the_metrics_of_models_with_odd_names_can_be_read(repository: BrokenRepository) -> None:
    families = text_string_to_metric_families(repository.http.get("/metrics").text)
    models = {sample.labels.get("model") for family in families for sample in family.samples}
    assert set(ODD) <= models


@pytest.mark.extended
def test_thousands_of_folders_are_listed_beside_a_good_model(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"m{number}").mkdir()
    with serving_beside_good(tmp_path, {}, model_control_mode="explicit", load_model=("good",)) as served:
        served.check_good()
        assert len(served.index()) == 2001
