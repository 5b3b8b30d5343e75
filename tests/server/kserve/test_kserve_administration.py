from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from genserve.version import __version__
from tests.server.live_kserve import LiveKServe, copy_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKServe]:
    folder = tmp_path_factory.mktemp("models")
    copy_models(("add_sub", "pass", "versions_specific"), folder)
    with LiveKServe(folder, allow_uploaded_code=True) as live:
        yield live


def test_the_server_reports_liveness_and_metadata(client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    metadata = client.get_server_metadata()
    assert (metadata["name"], metadata["version"]) == ("genserve", __version__)
    assert "binary_tensor_data" in metadata["extensions"]


def test_a_server_with_a_broken_model_is_not_ready(tmp_path: Path) -> None:
    copy_models(("pass", "broken_initialize"), tmp_path)
    with LiveKServe(tmp_path) as live:
        assert httpx2.get(f"{live.url}/v2/health/ready").status_code == 400
        assert httpx2.get(f"{live.url}/v2/models/pass/ready").status_code == 200
        answer = httpx2.get(f"{live.url}/v2/models/broken_initialize/ready")
        assert (answer.status_code, answer.json()) == (400, {"error": "Model version not ready"})


def test_models_are_described_with_their_batch_dimension(client) -> None:
    assert client.is_model_ready("add_sub", "1")
    metadata = client.get_model_metadata("add_sub")
    assert metadata["platform"] == "python"
    assert metadata["inputs"][0] == {"name": "A", "datatype": "FP32", "shape": [-1, -1]}
    assert client.get_model_config("add_sub")["max_batch_size"] == 8


def test_metadata_lists_the_ready_versions_or_the_requested_one(client) -> None:
    assert client.get_model_metadata("versions_specific")["versions"] == ["1", "3"]
    assert client.get_model_metadata("versions_specific", "3")["versions"] == ["3"]


def test_statistics_count_inferences(client) -> None:
    tensor = triton.InferInput("X", [1], "INT32")
    tensor.set_data_from_numpy(np.ones(1, np.int32))
    for _ in range(3):
        client.infer("pass", [tensor])
    # The instance counts a request before it takes the next one.
    [model_stats] = client.get_inference_statistics("pass")["model_stats"]
    assert model_stats["inference_count"] in (2, 3)
    assert model_stats["inference_stats"]["success"]["count"] == model_stats["inference_count"]
    assert model_stats["batch_stats"][0]["batch_size"] == 1
    everything = client.get_inference_statistics()["model_stats"]
    assert [entry["name"] for entry in everything] == sorted(entry["name"] for entry in everything)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("models/zzz/stats", "requested model 'zzz' is not available"),
        ("models/pass/versions/9/stats", "requested model version is not available for model 'pass'"),
    ],
)
def test_statistics_of_unknown_models_are_rejected(server, path: str, text: str) -> None:
    answer = httpx2.get(f"{server.url}/v2/{path}")
    assert (answer.status_code, answer.json()) == (400, {"error": text})


def test_models_are_unloaded_and_loaded_again(client) -> None:
    client.unload_model("add_sub")
    assert not client.is_model_ready("add_sub")
    client.load_model("add_sub")
    assert client.is_model_ready("add_sub")
    states = {entry["name"]: entry.get("state") for entry in client.get_model_repository_index()}
    assert states["add_sub"] == "READY"


def test_a_model_is_loaded_from_the_files_of_the_request(client, server) -> None:
    model = server.repository.find("pass").config.name
    source = (Path(__file__).parents[2] / "conformance/triton/models" / model / "1/model.py").read_bytes()
    config = (
        '{"backend":"python","input":[{"name":"X","data_type":"TYPE_INT32","dims":[1]}],'
        '"output":[{"name":"Y","data_type":"TYPE_INT32","dims":[1]}]}'
    )
    client.load_model("fresh", config=config, files={"file:1/model.py": source})
    assert client.is_model_ready("fresh")


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("models/zzz/load", b"", 500, "failed to load 'zzz', failed to poll from model repository"),
        ("models/pass/load", b'{"parameters":{"x":"y"}}', 400, "unexpected error on creating Triton "),
        ("models/pass/load", b'{"parameters":{"config":1}}', 400, "attempt to access JSON non-string "),
        ("other/models/pass/load", b"", 501, "'repository_name' specification is not supported"),
    ],
)
def test_invalid_loads_are_rejected_with_tritons_message(
    server, path: str, body: bytes, status: int, text: str
) -> None:
    answer = httpx2.post(f"{server.url}/v2/repository/{path}", content=body)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)


def test_log_and_trace_settings_are_changed_and_kept(client) -> None:
    assert client.get_log_settings()["log_verbose_level"] == 0
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    client.update_log_settings({"log_verbose_level": 0})
    assert client.update_trace_settings("pass", {"trace_rate": "5"})["trace_rate"] == "5"
    assert client.get_trace_settings()["trace_rate"] == "1000"
    assert client.update_trace_settings("pass", {"trace_rate": None})["trace_rate"] == "1000"
    with pytest.raises(InferenceServerException, match="trace file location can not be updated"):
        client.update_trace_settings(settings={"trace_file": "x"})


def test_shared_memory_is_disabled_by_default(client) -> None:
    assert client.get_system_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
        client.register_system_shared_memory("r", "/r", 8)
    assert client.get_cuda_shared_memory_status() == []


@pytest.mark.parametrize(
    ("verb", "path", "status", "text"),
    [
        ("GET", "/v2/", 404, "Not Found"),
        ("GET", "/v2/models", 404, "Not Found"),
        ("GET", "/v2/health/live/", 404, "Not Found"),
        ("POST", "/v2/models/pass/versions/x/infer", 404, "Not Found"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("GET", "/v2/models/pass/infer", 405, "Method Not Allowed"),
        ("GET", "/v2/models/zzz", 404, "Request for unknown model: 'zzz' is not found"),
        ("GET", "/v2/models/pass/versions/9/config", 404, "Request for unknown model: 'pass' version 9 is"),
    ],
)
def test_wrong_paths_and_methods_are_rejected_with_tritons_message(server, verb, path, status, text) -> None:
    answer = httpx2.request(verb, server.url + path)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)


def test_requests_need_the_api_key(tmp_path: Path) -> None:
    copy_models(("pass",), tmp_path)
    with LiveKServe(tmp_path, api_key="secret") as live:
        assert httpx2.get(f"{live.url}/v2").status_code == 401
        assert httpx2.get(f"{live.url}/v2", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_sequence_goes_on_while_another_version_of_its_model_comes_and_goes(tmp_path: Path) -> None:
    copy_models(("sequence_direct",), tmp_path)
    folder = tmp_path / "sequence_direct"
    with (folder / "config.pbtxt").open("a") as config:
        config.write("version_policy { all { } }")

    def total(x: int, *, sequence: int, version: int, start: bool = False) -> int:
        tensor = triton.InferInput("X", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[x]], np.int32))
        answer = client.infer(
            "sequence_direct",
            [tensor],
            model_version=str(version),
            sequence_id=sequence,
            sequence_start=start,
        )
        found: int = answer.as_numpy("TOTAL").item()
        return found

    with LiveKServe(tmp_path) as live, triton.InferenceServerClient(live.address) as client:
        assert total(1, sequence=5, version=1, start=True) == 1
        shutil.copytree(folder / "1", folder / "2")
        client.load_model("sequence_direct")
        assert total(10, sequence=6, version=2, start=True) == 10
        assert total(2, sequence=5, version=1) == 3
        shutil.rmtree(folder / "2")
        client.load_model("sequence_direct")
        assert total(4, sequence=5, version=1) == 7
