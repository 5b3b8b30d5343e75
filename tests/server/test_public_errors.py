"""No response of any dialect contains paths of the server's files, whatever is wrong with its models."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import torch
from onnx import TensorProto
from torch import nn
from tritonclient.grpc import service_pb2, service_pb2_grpc

import genserve
from tests.backends.networks import save_onnx, save_torchscript
from tests.support.live_server import LiveServer
from tests.support.python_models import write_model

OPENS = 'open("/srv/secret/weights.bin")'
PLUGINS = f"""
    class TritonPythonModel:
        async def decode(self, sequence):
            if sequence.params.temperature:
                {OPENS}
            while not sequence.finished:
                sequence.append(await sequence.sample())

        logits_processors = {{"opens": lambda context: {OPENS}}}
        stop_rules = {{"names": lambda context: int(__file__)}}
"""
FLOATS = """
    input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
INITIALIZE = f"class TritonPythonModel:\n    def initialize(self, args):\n        {OPENS}\n"
BACKENDS = {"python": "model.py", "onnxruntime": "model.onnx", "pytorch": "model.pt"}


class Seven(nn.Module):
    """Fails on anything but seven numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(7)


def config(backend: str, *more: str) -> str:
    return "\n".join([f'backend: "{backend}"', textwrap.dedent(FLOATS), *more])


def execute(statement: str) -> str:
    return f"class TritonPythonModel:\n    def execute(self, requests):\n        {statement}\n"


def write_faults(root: Path) -> None:
    """Models that cannot be loaded, or fail when they run."""
    codes = {
        "raises": execute(OPENS),
        "quotes_itself": execute("raise ValueError(f'see {__file__}')"),
        "returns_nothing": execute("return 1"),
        "sends_a_traceback": "import traceback, triton_python_backend_utils as p\n" + execute(
            f"\n        try:\n            {OPENS}\n        except OSError:\n"
            "            return [p.InferenceResponse(error=p.TritonError(traceback.format_exc()))]"
        ),
        "not_started": INITIALIZE,
        "no_python": "def",
        "no_class": "x = 1",
        "no_such_module": "import no_such_module_anywhere",
        "no_execute": "class TritonPythonModel: pass",
        "completes_wrongly": "class TritonPythonModel:\n    @staticmethod\n"
        f"    def auto_complete_config(config):\n        {OPENS}\n",
    }
    for name, code in codes.items():
        write_model(root, name, code=code, config=config("python"))
    write_model(
        root, "in_process", code=execute(OPENS),
        config=config("python", 'parameters { key: "EXECUTION" value { string_value: "process" } }'),
    )
    write_model(root, "old", config="backend: 7")
    write_model(root, "unknown_field", config=config("python", "no_such_field: 1"))
    write_model(root, "unknown_backend", config=config("no_such_backend"))
    write_model(root, "out", config=config("python", 'default_model_filename: "../../../x/model.py"'))
    write_model(
        root, "no_states", config=config(
            "python",
            'sequence_batching { state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] '
            'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "none" } } }',
        ),
    )
    write_model(
        root, "no_warmup", config=config(
            "python",
            'model_warmup { name: "w" inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] '
            'input_data_file: "none" } } }',
        ),
    )
    for backend, file in BACKENDS.items():
        (root / f"{backend}_gone" / "1").mkdir(parents=True)
        (root / f"{backend}_gone" / "config.pbtxt").write_text(config(backend))
        (root / f"{backend}_versionless").mkdir()
        (root / f"{backend}_versionless" / "config.pbtxt").write_text(config(backend))
        shutil.copytree(root / f"{backend}_gone", root / f"{backend}_broken")
        (root / f"{backend}_broken" / "1" / file).write_bytes(b"\xff nonsense")
    (root / "onnxruntime_bare" / "1").mkdir(parents=True)
    (root / "onnxruntime_bare" / "1" / "model.onnx").write_bytes(b"nonsense")
    floats = (TensorProto.FLOAT, ["n"])
    graph = save_onnx(
        root / "onnx_other" / "1" / "model.onnx", [("Neg", ["A"], ["B"], {})],
        inputs={"A": floats}, outputs={"B": floats},
    )
    (root / "onnx_other" / "config.pbtxt").write_text(config("onnxruntime"))
    shutil.copytree(graph.parents[1], root / "onnx_reads_out")
    _weights_elsewhere(root / "onnx_reads_out" / "1" / "model.onnx")
    save_torchscript(root / "seven" / "1" / "model.pt", Seven())
    (root / "seven" / "config.pbtxt").write_text(config("pytorch"))
    (root / "step_gone").mkdir()
    (root / "step_gone" / "config.pbtxt").write_text(
        'platform: "ensemble"' + FLOATS + 'ensemble_scheduling { step [ { model_name: "raises" '
        'model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }'
    )


def _weights_elsewhere(file: Path) -> None:
    save_onnx(
        file, [("Add", ["X", "w"], ["Y"], {})],
        inputs={"X": (TensorProto.FLOAT, [1])}, outputs={"Y": (TensorProto.FLOAT, [1])},
        weights={"w": torch.ones(1).numpy()},
    )
    import onnx

    model = onnx.load(file)
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../../elsewhere.bin")
    file.write_bytes(model.SerializeToString())


def write_chains(root: Path, tiny_repository: Path) -> None:
    """A model that generates text, and copies with a broken tokenizer and a broken decoder."""
    shutil.copytree(tiny_repository, root, dirs_exist_ok=True)
    (root / "tiny_decoder" / "1" / "model.py").write_text(textwrap.dedent(PLUGINS))
    breaks = {
        "a": ("tokenizer", "tokenizer.json", "{"),
        "b": ("tokenizer", "tokenizer_config.json", "{"),
        "c": ("decoder", "model.py", OPENS),
        "d": ("logits", "model.onnx", "nonsense"),
    }
    for name, (stage, file, content) in breaks.items():
        for folder in ("", "_tokenizer", "_logits", "_decoder"):
            to = shutil.copytree(tiny_repository / f"tiny{folder}", root / f"{name}{folder}")
            text = (to / "config.pbtxt").read_text().replace('"tiny', f'"{name}')
            (to / "config.pbtxt").write_text(text)
        (root / f"{name}_{stage}" / "1" / file).write_text(content)


class Responses:
    """All responses of the server, none of which may name its files."""

    def __init__(self, repository: Path) -> None:
        resolved = {str(repository), str(repository.resolve())}
        self._hidden = {
            *resolved, tempfile.gettempdir(), str(Path(genserve.__file__).parent), sys.prefix, "/srv/secret",
            "Traceback",
        }
        self.answers: dict[str, str] = {}

    def add(self, request: str, answer: str) -> None:
        self.answers[request] = answer

    def leaks(self) -> list[str]:
        return [
            f"{request}: {answer}"
            for request, answer in self.answers.items()
            if any(hidden in answer for hidden in self._hidden)
        ]


def over_http(url: str, names: list[str], responses: Responses) -> None:
    code = base64.b64encode(INITIALIZE.encode()).decode()
    upload = {"config": '{"backend": "python"}', "file:1/model.py": code}
    tensor = {"name": "X", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    with httpx2.Client(base_url=url, timeout=60) as http:

        def ask(path: str, body: Any = None, *, method: str = "POST", **more: Any) -> None:
            answer = http.request(method, path, json=body, **more)
            responses.add(f"{method} {path} {json.dumps(body)}", f"{answer.headers} {answer.text}")

        for path in ("/docs", "/openapi.json", "/metrics", "/info", "/health", "/v1/models", "/v2",
                     "/v2/models/stats", "/nowhere", "/v2/trace/setting", "/v2/logging"):  # fmt: skip
            ask(path, method="GET")
        for name in names:
            for path in ("", "/config", "/stats", "/ready", "/trace/setting"):
                ask(f"/v2/models/{name}{path}", method="GET")
            ask(f"/v1/models/{name}", method="GET")
            for given in ({"inputs": [tensor]}, {"inputs": [text]}):
                ask(f"/v2/models/{name}/infer", given)
            for path in ("generate", "generate_stream"):
                ask(f"/v2/models/{name}/{path}", {"X": [1, 2, 3]})
                ask(f"/v2/models/{name}/{path}", {"text_input": "hi", "temperature": 1.0})
            ask(f"/v2/repository/models/{name}/load", {})
        for name in ("tiny", "a", "raises", "unknown"):
            ask(f"/v2/repository/models/{name}/load", {"parameters": {"config": '{"backend": 7}'}})
            ask(f"/v2/repository/models/{name}/load", {"parameters": upload})
            for stream in (False, True):
                for options in (
                    {"temperature": 0}, {"temperature": 1}, {"logits_processors": [{"name": "opens"}]},
                    {"stop_rules": [{"name": "names"}]},
                ):  # fmt: skip
                    whole = {"model": name, "stream": stream, "max_tokens": 3, **options}
                    ask("/v1/chat/completions", whole | {"messages": [{"role": "user", "content": "hi"}]})
                    ask("/v1/completions", whole | {"prompt": "hi"})
                    body = {"inputs": "hi", "model": name, "parameters": {"max_new_tokens": 3, **options}}
                    ask("/generate_stream" if stream else "/generate", body)
        ask("/v2/repository/index", {})
        ask("/v2/systemsharedmemory/region/r/register", {"key": "/nothing", "offset": 0, "byte_size": 8})
        for body in ({}, [], {"messages": 3}):
            for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/"):
                ask(path, body)


def over_grpc(address: str, names: list[str], responses: Responses) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(method: str, request: Any, *, streams: bool = False) -> None:
            place = f"{method} {request}"
            try:
                call = getattr(stub, method)
                answer = list(call(iter([request]))) if streams else call(request)
                responses.add(place, str(answer))
            except grpc.RpcError as error:
                responses.add(place, f"{error.details()} {error.trailing_metadata()}")

        for name in names:
            request = service_pb2.ModelInferRequest(model_name=name)
            request.inputs.add(name="X", datatype="FP32", shape=[3]).contents.fp32_contents.extend([1, 2, 3])
            ask("ModelInfer", request)
            ask("ModelStreamInfer", request, streams=True)
            ask("ModelMetadata", service_pb2.ModelMetadataRequest(name=name))
            ask("ModelConfig", service_pb2.ModelConfigRequest(name=name))
            ask("ModelStatistics", service_pb2.ModelStatisticsRequest(name=name))
            ask("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=name))
        ask("RepositoryIndex", service_pb2.RepositoryIndexRequest())


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory, tiny_repository: Path) -> Iterator[Responses]:
    root = tmp_path_factory.mktemp("faults")
    write_faults(root)
    write_chains(root, tiny_repository)
    responses = Responses(root)
    settings = {"model_control_mode": "explicit", "load_model": ("*",), "exit_on_error": False}
    with LiveServer(root, allow_client_shm=True, strict_readiness=False, **settings) as server:
        names = [*sorted(path.name for path in root.iterdir()), "unknown"]
        over_grpc(server.grpc_url, names, responses)
        over_http(server.url, names, responses)
    return responses


@pytest.mark.extended
def test_no_answer_contains_a_folder_of_the_server_or_a_traceback(responses: Responses) -> None:
    assert not responses.leaks()


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    [
        "At:\\n  raises/1/model.py(3): execute",
        "see quotes_itself/1/model.py",
        "No such file or directory: 'weights.bin'",
        "Load model from onnxruntime_broken/1/model.onnx failed",
        "old/config.pbtxt:1:10",
        "External data path escapes model directory",
        "shape '[7]' is invalid",
        "models that generate text: ",
    ],
)
def test_useful_parts_of_errors_reach_the_client(responses: Responses, words: str) -> None:
    assert any(words in answer for answer in responses.answers.values())



def load(server: LiveServer, name: str, **parameters: str) -> tuple[int, dict[str, str]]:
    url = f"{server.url}/v2/repository/models/{name}/load"
    answer = httpx2.post(url, json={"parameters": parameters}, timeout=60)
    return answer.status_code, answer.json() if answer.text else {}


def test_strict_repository_paths_reject_a_model_that_links_outside(tmp_path: Path) -> None:
    write_model(tmp_path / "elsewhere", "away")
    root = tmp_path / "models"
    write_model(root, "here")
    (root / "away").symlink_to(tmp_path / "elsewhere" / "away")
    explicit = {"model_control_mode": "explicit", "load_model": ("here",)}
    with LiveServer(root, strict_repository_paths=True, **explicit) as server:
        status, answer = load(server, "away")
        assert status == 500
        assert answer["error"] == "failed to load 'away', failed to poll from model repository"
        assert answer["remedy"].startswith("away: the link leads out of the model repository")
        assert httpx2.get(f"{server.url}/v2/models/here/ready").status_code == 200
    with LiveServer(root, **explicit) as server:
        assert load(server, "away") == (200, {})


@pytest.mark.parametrize("name", ["../../secret.py", "/srv/secret.py", "a" * 300])
def test_a_config_that_names_a_file_outside_is_rejected(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "one")
    with LiveServer(tmp_path, model_control_mode="explicit", load_model=("one",)) as server:
        given = {"backend": "python", "input": [{"name": "X"}], "default_model_filename": name}
        status, answer = load(server, "one", config=json.dumps(given))
        assert status == 500
        assert answer["error"] == "failed to load 'one', failed to poll from model repository"
        assert "put the file into the folder of each version" in answer["remedy"] or len(name) > 255
        assert httpx2.get(f"{server.url}/v2/models/one/ready").status_code == 200


def test_a_config_whose_file_name_is_too_long_leaves_the_server_to_other_models(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    write_model(tmp_path, "long", config=config("python", f'default_model_filename: "{"a" * 300}"'))
    with LiveServer(tmp_path, exit_on_error=False) as server:
        assert httpx2.get(f"{server.url}/v2/models/one/ready").status_code == 200
