"""Broken model files: loading one fails with a reason, or its requests do; the server and others live on."""

from __future__ import annotations

import io
import os
import pickle
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from genserve.errors import InferenceError, Status
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from tests.faults.broken_repository import (
    CONFIG,
    GOOD,
    MATRIX,
    BrokenRepository,
    Write,
    graph,
    serving_beside_good,
    write_model,
)
from tests.support.live_server import wait_until
from tests.support.python_models import ask

_node = helper.make_node
_PYTORCH = CONFIG.replace("onnxruntime", "pytorch").replace('"X"', '"X__0"').replace('"Y"', '"Y__0"')
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


def _onnx(content: bytes) -> Write:
    return partial(write_model, content=content)


def _torchscript(content: bytes) -> Write:
    return partial(write_model, content=content, config=_PYTORCH, file="model.pt")


def _weight(*dims: int) -> list[TensorProto]:
    """The weight W, of 2 numbers, which claims to have these dimensions."""
    weight = numpy_helper.from_array(np.ones(2, np.float32), "W")
    weight.dims[:] = dims
    return [weight]


def _external(location: str, **entries: Any) -> Write:
    """A graph whose weight W lies in another file, of 64 bytes, at `location`."""
    weight = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[2])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": 0, "length": 8, **entries}.items():
        weight.external_data.add(key=key, value=str(value))
    content = graph(weights=[weight])

    def write(folder: Path) -> None:
        version = write_model(folder, content)
        outside = folder.parent.parent / "outside"
        outside.write_bytes(bytes(64))
        (version / "weights").write_bytes(bytes(64))
        (version / "folder").mkdir()
        (version / "link").symlink_to(outside)
        (version / "link-to-folder").symlink_to(outside.parent)

    return write


class _Marker:
    """An object whose pickle runs a command that leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/genserve-ran-a-pickle",)


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@cache
def _zip_bomb() -> bytes:
    """An archive of 250 KB whose code would take 256 MB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("constants.pkl", "version", "code/__torch__.py"):
            archive.writestr(f"model/{name}", "3\n")
        with archive.open("model/data.pkl", "w") as content:
            for _ in range(256):
                content.write(bytes(1 << 20))
    return file.getvalue()


# The way to break a file, and words of the reason.
BROKEN: dict[str, tuple[Write, str]] = {
    "empty": (_onnx(b""), "model.onnx is empty"),
    "one-byte": (_onnx(b"\x08"), "Protobuf parsing failed"),
    "web-page": (_onnx(b"\n<!DOCTYPE html><html>404</html>"), "model.onnx is a web page"),
    "git-lfs-pointer": (_onnx(_POINTER), "model.onnx is a Git LFS pointer"),
    "zeros": (_onnx(bytes(5000)), "Protobuf parsing failed"),
    "random": (_onnx(Random(0).randbytes(5000)), "Protobuf parsing failed"),
    "archive": (lambda folder: _onnx(_zip_bomb())(folder), "Protobuf parsing failed"),
    **{f"cut-at-{part}0%": (_onnx(GOOD[: len(GOOD) * part // 10]), "onnx runtime") for part in range(1, 10)},
    "opset-too-new": (_onnx(graph(opset=999)), "opset"),
    "ir-version-too-new": (_onnx(graph(ir_version=99)), "Unsupported model IR version: 99"),
    "unknown-operator": (_onnx(graph(_node("Nope", ["X"], ["Y"]))), "No Op registered for Nope"),
    "unknown-domain": (_onnx(graph(_node("Nope", ["X"], ["Y"], domain="nowhere"))), "domain 'nowhere'"),
    "weight-larger-than-its-data": (_onnx(graph(weights=_weight(1, 2, 2))), "onnx runtime error"),
    "weight-of-2-62": (_onnx(graph(weights=_weight(2**62))), "onnx runtime error"),
    "weight-of-minus-5": (_onnx(graph(weights=_weight(-5))), "onnx runtime error"),
    "outside-by-two-dots": (_external("../../../outside"), "escapes model directory"),
    "outside-by-a-detour": (_external("folder/../../../../outside"), "escapes model directory"),
    "outside-by-an-absolute-path": (_external("/etc/hostname"), "Absolute path not allowed"),
    "outside-by-a-network-path": (_external("//etc/hostname"), "Absolute path not allowed"),
    "outside-by-a-link": (_external("link"), "escapes model directory"),
    "outside-by-a-linked-folder": (_external("link-to-folder/outside"), "escapes model directory"),
    "weights-are-a-folder": (_external("folder"), "regular file"),
    "weights-are-a-device": (_external("/dev/zero"), "Absolute path not allowed"),
    "weights-are-missing": (_external("nothing"), "does not exist"),
    "weights-at-minus-8": (_external("weights", offset=-8), "out of bounds"),
    "weights-beyond-the-end": (_external("weights", offset=10**6), "out of bounds"),
    "weights-over-the-end": (_external("weights", offset=60), "out of bounds"),
    "weights-of-2-60-bytes": (_external("weights", length=2**60), "size mismatch"),
    "weights-with-an-unknown-key": (_external("weights", __class__="x"), "model format error"),
    "another-output": (
        _onnx(graph(_node("Add", ["X", "W"], ["Z"]), output=("Z", TensorProto.FLOAT, MATRIX))),
        "unexpected inference output 'Y', allowed outputs are: Z",
    ),
    "another-type": (
        _onnx(
            graph(_node("Cast", ["X"], ["Y"], to=11), weights=[], output=("Y", TensorProto.DOUBLE, MATRIX))
        ),
        "configuration expects datatype TYPE_FP32 for output 'Y', model provides TYPE_FP64",
    ),
    "torchscript-empty": (_torchscript(b""), "model.pt is empty"),
    "torchscript-text": (_torchscript(b"hello" * 1000), "failed finding central directory"),
    "torchscript-pickle": (_torchscript(pickle.dumps(_Marker())), "failed finding central directory"),
    "torchscript-saved-pickle": (_torchscript(_saved(_Marker())), "constants.pkl"),
    "torchscript-weights-only": (_torchscript(_saved({"W": torch.ones(2)})), "constants.pkl"),
    "torchscript-cut": (_torchscript(_saved({"W": torch.ones(2)})[:300]), "failed finding central directory"),
    "torchscript-zip-bomb": (lambda folder: _torchscript(_zip_bomb())(folder), "failed to load model"),
}


def _constant(*shape: int) -> tuple[Any, ...]:
    """A graph that adds the sum of a constant of this shape, which is made in each run."""
    size = helper.make_tensor("size", TensorProto.INT64, [len(shape)], shape)
    return (
        _node("Shape", ["X"], ["x_shape"]),
        _node("Gather", ["x_shape", "zero"], ["batch"]),
        _node("Constant", [], ["shape"], value=size),
        _node("Mul", ["shape", "batch"], ["large_shape"]),
        _node("ConstantOfShape", ["large_shape"], ["large"]),
        _node("ReduceSum", ["large"], ["sum"], keepdims=0),
        _node("Add", ["X", "sum"], ["Y"]),
    )


_ZERO = numpy_helper.from_array(np.array([0], np.int64), "zero")
# Graphs that load, and how their requests fail.
FAILING: dict[str, tuple[bytes, str, int]] = {
    # More than the address space, so that no setting of the kernel lets the allocation succeed.
    "allocates-4-petabytes": (graph(*_constant(10**15), weights=[_ZERO]), "onnx runtime error", 500),
    "allocates-2-82-bytes": (graph(*_constant(2**40, 2**40), weights=[_ZERO]), "onnx runtime error", 400),
    "answers-with-fewer-rows": (
        graph(
            _node("Compress", ["X", "none"], ["Y"], axis=0),
            weights=[numpy_helper.from_array(np.array([False]), "none")],
        ),
        "expected batch size of at least 1 in model output, got 0",
        501,
    ),
    "index-out-of-range": (
        graph(
            _node("Cast", ["X"], ["index"], to=TensorProto.INT64),
            _node("Gather", ["W", "index"], ["Y"]),
            weights=[numpy_helper.from_array(np.ones(1, np.float32), "W")],
        ),
        "onnx runtime error",
        400,
    ),
}


def _endless() -> bytes:
    """A graph whose loop never ends: its condition stays true."""
    true = numpy_helper.from_array(np.array(True), "true")
    body = helper.make_graph(
        [_node("Identity", ["go"], ["goes_on"]), _node("Add", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, MATRIX),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, MATRIX),
        ],
    )
    return graph(_node("Loop", ["", "true", "X"], ["Y"], body=body), weights=[true])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenRepository]:
    models = {name: write for name, (write, _) in BROKEN.items()}
    models |= {name: _onnx(content) for name, (content, *_) in FAILING.items()}
    with serving_beside_good(tmp_path_factory.mktemp("files") / "models", models) as served:
        yield served


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_listed_with_its_reason_and_harms_no_other(
    repository: BrokenRepository, name: str
) -> None:
    repository.check_broken(name, BROKEN[name][1])
    repository.check_good()


def test_no_pickle_ran(repository: BrokenRepository) -> None:
    assert not Path("/tmp/genserve-ran-a-pickle").exists()


@pytest.mark.parametrize("name", FAILING)
def test_a_graph_that_fails_fails_only_its_requests(repository: BrokenRepository, name: str) -> None:
    for _ in range(2):
        answer = repository.infer(name)
        assert FAILING[name][1] in answer.json()["error"]
        assert answer.status_code == FAILING[name][2]
        repository.check_good()


def test_an_endless_loop_ends_with_the_unload_of_its_model(tmp_path: Path, caplog: Any) -> None:
    write_model(tmp_path / "endless", _endless())
    options = RepositoryOptions(control_mode=ControlMode.EXPLICIT, exit_timeout_s=0.1)
    models = Repository([tmp_path], options=options)
    models.start(["endless"])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, models, "endless", X=[[1, 1]])
        wait_until(lambda: models.find("endless").num_pending and not models.find("endless").num_waiting)
        models.unload("endless")
        error = asked.result().error
    assert isinstance(error, InferenceError)
    assert error.status is Status.UNAVAILABLE
    assert "--exit-timeout-secs" in error.remedy
    models.close()
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("instance-endless")]
    assert "genserve.batching.model_instance" not in {record.name for record in caplog.records}
