"""examples/triton_trees: trees in ONNX, and a Python model that calls them and a text model by BLS."""

from __future__ import annotations

import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from examples.networks import EXAMPLES
from genserve.export import export_model
from genserve.export.export_options import SilentProgress
from tests.support.live_server import LiveServer
from tests.support.tiny_llama import tiny_llama_checkpoint

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("trees")
    repository = shutil.copytree(EXAMPLES / "triton_trees" / "models", root / "models")
    export_model(
        str(tiny_llama_checkpoint(root / "checkpoint", context=512)),
        repository=repository,
        name="smollm2",
        precision="fp32",
        progress=SilentProgress(),
    )
    with LiveServer(repository) as server:
        yield server


def tensor(name: str, array: np.ndarray, datatype: str) -> httpclient.InferInput:
    made = httpclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def test_a_reply_is_written_where_the_trees_see_a_risk(server: LiveServer) -> None:
    calm, angry = [1, 1, 0, 1], [40, 6, 5, 1]
    features = np.array([calm, angry, calm], dtype=np.float32)
    tickets = np.array([[b"one"], [b"two"], [b"three"]], dtype=object)
    with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
        [alone] = client.infer("risk", [tensor("X", features[1:2], "FP32")]).as_numpy("probabilities")
        inputs = [tensor("FEATURES", features, "FP32"), tensor("TICKET", tickets, "BYTES")]
        answer = client.infer("reply", inputs)
    risks, replies = answer.as_numpy("RISK"), answer.as_numpy("REPLY")
    assert risks.shape == replies.shape == (3, 1)
    assert risks[1, 0] == alone[1]
    assert alone.sum() == pytest.approx(1)
    assert [risk >= 0.5 for [risk] in risks] == [bool(reply) for [reply] in replies] == [False, True, False]


def test_the_client_prints_the_risks_that_its_readme_shows(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GENSERVE_URL", server.url)
    folder: Path = EXAMPLES / "triton_trees"
    runpy.run_path(str(folder / "client.py"), run_name="__main__")
    tickets = re.findall(r"^\d+% .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(tickets) == 2
    assert tickets == re.findall(r"^\d+% .*$", (folder / "README.md").read_text(), re.MULTILINE)
