"""Broken repository: a live server over one good model, beside any number of broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.live_server import LiveServer, wait_until

Write = Callable[[Path], object]    # writes the files of a model into its folder

CONFIG = """backend: "onnxruntime"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
MATRIX = ["batch", 2]


def graph(
    *nodes: onnx.NodeProto,
    weights: list[onnx.TensorProto] | None = None,
    output: tuple[str, int, list[int | str]] = ("Y", TensorProto.FLOAT, MATRIX),
    opset: int = 18,
    ir_version: int = 10,
) -> bytes:
    """An ONNX file with the input X, by default one that computes Y = X + 1."""
    made = helper.make_graph(
        nodes or [helper.make_node("Add", ["X", "W"], ["Y"])],
        "graph",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, MATRIX)],
        [helper.make_tensor_value_info(*output)],
        [numpy_helper.from_array(np.ones(2, np.float32), "W")] if weights is None else weights,
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(made, opset_imports=imports, ir_version=ir_version).SerializeToString()


GOOD = graph()


def adds(number: float) -> bytes:
    """An ONNX file that computes Y = X + number."""
    return graph(weights=[numpy_helper.from_array(np.full(2, number, np.float32), "W")])


def write_model(
    folder: Path,
    content: bytes | None = GOOD,
    *,
    config: str | bytes | None = CONFIG,
    file: str = "model.onnx",
    version: str = "1",
) -> Path:
    """Write a model, by default a good one; None leaves a file out. Returns the folder of its version."""
    (folder / version).mkdir(parents=True)
    if config is not None:
        (folder / "config.pbtxt").write_bytes(config.encode() if isinstance(config, str) else config)
    if content is not None:
        (folder / version / file).write_bytes(content)
    return folder / version


class BrokenRepository:
    """The server, and requests to it."""

    def __init__(self, server: LiveServer, root: Path) -> None:
        self.server = server
        self.root = root
        self.http = httpx.Client(base_url=server.url, timeout=30)

    def index(self) -> dict[str, dict[str, str]]:
        """The lines of the index, by the name of the model."""
        lines = self.http.post("/v2/repository/index").raise_for_status().json()
        return {line["name"]: line for line in lines}

    def infer(self, model: str = "good", value: float = 1.0) -> httpx.Response:
        tensor = {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [value, value]}
        return self.http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})

    def check_good(self) -> None:
        """Raise AssertionError unless the good model answers."""
        answer = self.infer().raise_for_status().json()
        assert answer["outputs"][0]["data"] == [2.0, 2.0]

    def check_broken(self, model: str, words: str) -> None:
        """Raise AssertionError unless a model is listed with a reason, of one line and with these words."""
        line = self.index()[model]
        assert line["state"] == "UNAVAILABLE"
        assert words in line["reason"]
        assert len(line["reason"].splitlines()) == 1
        assert len(line["reason"]) < 1000
        assert str(self.root) not in line["reason"]
        answer = self.infer(model)
        assert 400 <= answer.status_code < 500
        assert "error" in answer.json()


@contextmanager
def serving_beside_good(
    root: Path, models: Mapping[str, Write], **settings: Any
) -> Iterator[BrokenRepository]:
    """Serve a repository with the model "good", and with others that are written by their name."""
    write_model(root / "good")
    for name, write in models.items():
        write(root / name)
    with LiveServer(root, exit_on_error=False, **settings) as live:
        served = BrokenRepository(live, root)
        with served.http:
            wait_until(lambda: all("state" in line for line in served.index().values()))
            wait_until(lambda: not any(line["state"] == "LOADING" for line in served.index().values()))
            yield served
