"""The probes of the Deployment and of the image, against a server that loads, serves, hangs and drains."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.server.api_server import Server
from genserve.server.observe import engine_watch
from genserve.settings import ServerSettings
from tests.deploy.kubernetes_schemas import documents
from tests.support.live_server import wait_until
from tests.support.python_models import write_model
from tests.support.step_gate import StepGate

ROOT = Path(__file__).parents[2]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# Is loaded once the file `go` is there.
GATED = """
import pathlib
import threading

class TritonPythonModel:
    def initialize(self, args):
        while not pathlib.Path({gate!r}).exists():
            threading.Event().wait(0.01)
"""


class Kubelet:
    """Probes a server on another port as the kubelet probes the container of the Deployment."""

    def __init__(self, *, port: int) -> None:
        manifest = ROOT / "charts" / "manifests" / "deployment.yaml"
        [deployment] = documents(manifest.read_text(encoding="utf-8"))
        [self._container] = deployment["spec"]["template"]["spec"]["containers"]
        self._port = port

    def succeeding(self) -> set[str]:
        return {probe for probe in PROBES if self._succeeds(self._container[probe])}

    def _succeeds(self, probe: dict[str, Any]) -> bool:
        action = probe["httpGet"]
        named = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        assert named[action["port"]] == 8000
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=probe["timeoutSeconds"])
        headers = {"Host": f"10.0.0.7:{named[action['port']]}", "User-Agent": "kube-probe/1.35"}
        try:
            connection.request("GET", action["path"], headers=headers | {"Connection": "close"})
            return 200 <= connection.getresponse().status < 400
        except OSError:
            return False
        finally:
            connection.close()


def docker_says_healthy(*, port: int) -> bool:
    """Run the HEALTHCHECK of the image."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    [line] = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
    program, *arguments = json.loads(line)
    assert program == "python"
    environment = os.environ | {"GENSERVE_HTTP_PORT": str(port)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "go"


@pytest.fixture
def starting(tiny_repository: Path, tmp_path: Path, gate: Path, monkeypatch) -> Iterator[Server]:
    """A server with a key, whose models are not loaded before the gate is there."""
    monkeypatch.setattr(engine_watch, "_INTERVAL_S", 0.05)
    repository = shutil.copytree(tiny_repository, tmp_path / "models")
    write_model(repository, "gated", code=GATED.format(gate=str(gate)))
    server = Server(
        ServerSettings(
            model_repository=(repository,), api_key="secret", http_port=0, grpc_port=0, metrics_port=0
        )
    )
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    wait_until(lambda: server.started)
    yield server
    gate.touch()
    server.should_exit = True
    thread.join()


def test_probes_tell_loading_ready_hanging_and_draining_apart(starting: Server, gate: Path) -> None:
    port = starting.servers[0].sockets[0].getsockname()[1]
    kubelet = Kubelet(port=port)
    assert kubelet.succeeding() == {"livenessProbe"}        # loading: no restart before the startup time
    assert not docker_says_healthy(port=port)
    gate.touch()
    wait_until(lambda: kubelet.succeeding() == set(PROBES))
    assert docker_says_healthy(port=port)

    model = starting.services.repository.text_model()
    steps = StepGate(model)
    steps.shut()
    client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer secret"})
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
    answers: list[httpx2.Response] = []

    def ask() -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=asked)))
        thread.start()
        wait_until(lambda: steps.num_begun)
        return thread

    asking = ask()
    wait_until(lambda: model.engine.stalled)
    assert kubelet.succeeding() == {"livenessProbe"}        # the engine hangs: no requests, and no restart
    steps.open()
    asking.join()
    wait_until(lambda: kubelet.succeeding() == set(PROBES))

    steps.shut()
    steps.num_begun = 0
    asking = ask()
    starting.should_exit = True
    wait_until(lambda: starting.services.draining)
    wait_until(lambda: not kubelet.succeeding())     # liveness is not probed in a pod that ends
    assert not docker_says_healthy(port=port)
    steps.open()
    asking.join()
    assert [answer.status_code for answer in answers] == [200, 200]


def test_autoscalers_and_endpoint_pickers_find_their_metrics_before_the_first_request(tiny_server) -> None:
    text = httpx2.get(tiny_server.info.metrics_url).text
    [autoscaler] = documents((ROOT / "charts" / "manifests" / "autoscaler.yaml").read_text(encoding="utf-8"))
    names = [metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]]
    # docs/proposals/003-model-server-protocol of the Gateway API inference extension.
    names += ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
    for name in names:
        assert re.search(rf'^# TYPE {name} gauge$', text, re.MULTILINE)
        assert re.search(rf'^{name}{{.*model(_name)?="tiny".*}} 0\.0$', text, re.MULTILINE)
    [labels] = re.findall(r"^vllm:cache_config_info{(.*)} 1\.0$", text, re.MULTILINE)
    assert re.search(r'block_size="16".*num_gpu_blocks="[1-9]', labels)
