"""`genserve deploy ray` on a cluster of this machine: three replicas of a model, and one of another.

Everything that needs a cluster is in this file: to start one takes seconds, and a file runs in one process.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np
import openai
import pytest
import tritonclient.http
import yaml
from huggingface_hub import InferenceClient

from benchmarks.streamed_texts import requests_of, stream_all
from tests.support.command_line import invoke
from tests.support.live_server import LiveServer, wait_until
from tests.support.tiny_llama import add_shuffled_tokenizer

# Seconds on an idle machine; but each of many processes imports a lot.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

T = TypeVar("T")
CHAT: Any = [{"role": "user", "content": "Hello"}]
DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", FACTOR * pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
            ])
            for request in requests
        ]
"""
# A decoder stage whose steps a request can make slow, and which a test can stop: in the process of a replica,
# while there is a file with its number.
DECODER = """
import os
import time
from pathlib import Path

HOLD = Path(__file__).parents[2] / ".holds" / str(os.getpid())

class Slow:
    def __init__(self, context, *, step_ms: int):
        self.step_s = step_ms / 1000

    def __call__(self, token_ids, logits):
        time.sleep(self.step_s)
        while HOLD.exists():
            time.sleep(0.01)

class TritonPythonModel:
    logits_processors = {"slow": Slow}

    async def decode(self, sequence):
        while not sequence.finished:
            sequence.append(await sequence.sample())
"""
CONFIG = """backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A running `genserve deploy ray`."""

    repository: Path
    url: str
    dashboard: str
    file: Path          # its config

    environment: dict[str, str]

    def deploy(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = command_line(*words, "--address", self.dashboard)
        return subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment)

    def replicas(self) -> dict[str, dict[str, str]]:
        """The states of the replicas of each deployment, by their ids."""
        return {
            name: {replica["replica_id"]: replica["state"] for replica in one["replicas"]}
            for name, one in self._deployments().items()
        }

    def pids(self, name: str) -> list[int]:
        """The processes of the replicas of a deployment that run."""
        replicas = self._deployments()[name]["replicas"]
        return [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]

    def _deployments(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        details = httpx2.get(f"{self.dashboard}/api/serve/applications/", headers=headers).json()
        deployments: dict[str, Any] = details["applications"]["genserve"]["deployments"]
        return deployments


def command_line(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "genserve", "deploy", "ray", *words]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def wait_for(happened: Callable[[], bool], what: str) -> None:
    wait_until(happened, what, timeout_s=240, every_s=0.2)


@pytest.fixture(scope="module")
def deployed(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("ray")
    repository = folder / "models"
    shutil.copytree(tiny_repository, repository)
    add_version(repository, 1, factor=2)
    (repository / "tiny_decoder" / "1" / "model.py").write_text(DECODER)
    (repository / ".holds").mkdir()
    port = free_port()
    words = ["--model-repository", str(repository), "--port", str(port), "--min-replicas", "3"]
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),    # otherwise Ray writes one into the home folder
        # The defaults are for minutes of load, here and below.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    }
    file = folder / "serve.yaml"
    config = yaml.safe_load(invoke(["deploy", "ray", *words, "--dry-run"]).stdout)
    config["applications"][0]["args"]["settings"]["drain_s"] = 1    # a setting of servers, not of ingresses
    for options in config["applications"][0]["deployments"]:
        options |= {"health_check_period_s": 0.5, "graceful_shutdown_wait_loop_s": 0.1}
    file.write_text(yaml.safe_dump(config))
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command_line("--config", str(file)),
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            try:
                ready, dashboard = process.stdout.readline(), process.stdout.readline()
                assert ready.startswith("Ready at "), (folder / "stderr").read_text()
                yield Deployed(
                    repository=repository,
                    url=ready.split()[2],
                    dashboard=dashboard.split()[-1],
                    file=file,
                    environment=environment,
                )
            finally:
                process.send_signal(signal.SIGINT)
        assert process.returncode == 0, (folder / "stderr").read_text()


def add_version(repository: Path, version: int, *, factor: int) -> None:
    folder = repository / "double" / str(version)
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(f"FACTOR = {factor}\n{DOUBLE}")
    (folder.parent / "config.pbtxt").write_text(CONFIG)


def answers(url: str) -> list[Any]:
    """Return the answers of a server to three client libraries."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    whole = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, max_tokens=8)
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=8, stream=True
    )
    hub = InferenceClient(base_url=url)
    return [
        whole.choices[0].message.content,
        whole.usage.completion_tokens if whole.usage else None,
        "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        hub.chat_completion(CHAT, model="tiny", temperature=0.0, max_tokens=8).choices[0].message.content,
        tokenized_by_triton(url),
    ]


def tokenized_by_triton(url: str) -> Any:
    client = tritonclient.http.InferenceServerClient(url.removeprefix("http://"))
    text = tritonclient.http.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"Hello"]], dtype=object))
    outputs = client.infer("tiny_tokenizer", [text])
    return outputs.get_response()["outputs"], outputs.as_numpy("input_ids").tolist()


def doubled(url: str) -> list[float]:
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
    answer = httpx2.post(f"{url}/v2/models/double/infer", json=body)
    assert answer.status_code == 200, answer.text
    data: list[float] = answer.json()["outputs"][0]["data"]
    return data


def test_three_replicas_answer_as_a_single_server(deployed: Deployed, tiny_server: LiveServer) -> None:
    assert answers(deployed.url) == answers(tiny_server.url)
    assert doubled(deployed.url) == [2, 4]
    replicas = deployed.replicas()
    assert {name: len(states) for name, states in replicas.items()} == {"ingress": 1, "double": 1, "tiny": 3}


def test_prompts_that_begin_alike_reach_the_replica_that_has_cached_them(deployed: Deployed) -> None:
    client = openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="-")
    prompt = "Once upon a time " * 6
    usages = [
        client.completions.create(model="tiny", prompt=f"{prompt}{number}", max_tokens=1).usage
        for number in range(4)
    ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]    # type: ignore[union-attr]
    assert all(tokens >= 16 for tokens in cached[1:]), cached


def test_a_new_version_replaces_its_replicas_alone_and_no_request_fails(deployed: Deployed) -> None:
    before = deployed.replicas()
    with load(lambda: doubled(deployed.url), num_clients=2) as found:
        add_version(deployed.repository, 2, factor=3)
        ran = deployed.deploy("--config", str(deployed.file), "--detach")
        wait_for(lambda: doubled(deployed.url) == [3, 6], "the answer of the new version")
    assert ran.returncode == 0, ran.stderr
    assert found[0] == [2, 4]
    assert all(each in ([2, 4], [3, 6]) for each in found)
    after = deployed.replicas()
    assert (after["tiny"], after["ingress"]) == (before["tiny"], before["ingress"])
    assert after["double"].keys().isdisjoint(before["double"])


def test_streams_survive_the_kill_of_a_replica(deployed: Deployed) -> None:
    """32 streams in all dialects, greedy and seeded: none is lost, and no text differs."""
    requests = requests_of(32, tokens=150)
    whole = asyncio.run(stream_all(deployed.url, "tiny", requests))
    left = 50           # pieces of text of all answers; the tiny model has soon finished all of them
    pid = deployed.pids("tiny")[0]

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(pid, signal.SIGKILL)

    killed = asyncio.run(stream_all(deployed.url, "tiny", requests, on_text=count))
    assert [answer.error for answer in killed] == [""] * 32
    assert [answer.text for answer in killed] == [answer.text for answer in whole]
    assert min(len(answer.text) for answer in whole) > 0
    metrics = httpx2.get(f"{deployed.url}/metrics").text
    assert 'genserve_interrupted_calls_total{model="tiny",outcome="failed"} 0.0' in metrics
    [resumed] = re.findall('genserve_interrupted_calls_total{model="tiny",outcome="resumed"} (.*)', metrics)
    assert float(resumed) > 0
    wait_for(
        lambda: pid not in deployed.pids("tiny") and len(deployed.pids("tiny")) == 3,
        "a new replica in place of the one that was killed",
    )


@pytest.mark.slow
def test_answers_that_stream_during_a_rolling_update_are_complete(deployed: Deployed, tmp_path: Path) -> None:
    """The model and the ingress are updated; the new ingress shares the old one's port for a moment."""
    before = deployed.replicas()
    config = yaml.safe_load(deployed.file.read_text())
    [ingress] = [one for one in config["applications"][0]["deployments"] if one["name"] == "ingress"]
    ingress["ray_actor_options"]["runtime_env"]["env_vars"]["GENSERVE_UPDATE"] = "1"
    file = tmp_path / "updated.yaml"
    file.write_text(yaml.safe_dump(config))

    def replaced() -> bool:
        after = deployed.replicas()
        return not any(before[name].keys() & after[name].keys() for name in ("ingress", "tiny"))

    undisturbed = streamed(deployed.url)
    with load(lambda: streamed(deployed.url), num_clients=8) as found:
        folder = deployed.repository / "tiny_logits"
        shutil.copytree(folder / "1", folder / "2")
        ran = deployed.deploy("--config", str(file), "--detach")
        wait_for(replaced, "the replacement of all replicas")
    assert ran.returncode == 0, ran.stderr
    assert len(found) > 8
    assert all(text == undisturbed for text in found)


@pytest.mark.slow
def test_an_update_with_another_tokenizer_mixes_nothing_and_cuts_no_stream(deployed: Deployed) -> None:
    """Streams of some seconds run when the ingress takes the new version over, and end at the old one."""
    before = deployed.replicas()["tiny"].keys()
    old = streamed(deployed.url)
    with (
        load(lambda: streamed(deployed.url), num_clients=2) as found,
        load(lambda: streamed(deployed.url, step_ms=40), num_clients=4) as slow,
    ):
        wait_for(lambda: bool(slow), "an answer of the old version")
        add_shuffled_tokenizer(deployed.repository / "tiny_tokenizer")
        ran = deployed.deploy("--config", str(deployed.file), "--detach")
        assert ran.returncode == 0, ran.stderr
        wait_for(lambda: before.isdisjoint(deployed.replicas()["tiny"]), "the end of all old replicas")
    new = streamed(deployed.url)
    assert old != new
    assert set(found) == {old, new}
    assert set(slow) <= {old, new}


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True], ids=["engine", "process"])
def test_the_streams_of_a_replica_that_hangs_go_on_at_others(deployed: Deployed, is_stopped: bool) -> None:
    """The replica's engine is in a forward that does not return, or its process has stopped."""
    undisturbed = streamed(deployed.url)
    pid = deployed.pids("tiny")[0]
    hold = deployed.repository / ".holds" / str(pid)
    with ThreadPoolExecutor(12) as pool:
        reading = [pool.submit(streamed, deployed.url, step_ms=10) for _ in range(12)]
        wait_for(lambda: resumed(deployed.url, "running") >= 12, "all streams")
        before = resumed(deployed.url, "resumed")
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        else:
            hold.touch()
        assert [one.result() for one in reading] == [undisturbed] * 12
    assert resumed(deployed.url, "resumed") > before
    wait_for(
        lambda: pid not in deployed.pids("tiny") and len(deployed.pids("tiny")) == 3,
        "a new replica in place of the one that hangs",
    )
    if is_stopped:
        os.kill(pid, signal.SIGKILL)    # Serve would wait for its drain
    else:
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the replica that hangs")


def resumed(url: str, what: str) -> float:
    """How many calls of the ingress have been resumed, or are running."""
    name = {
        "resumed": 'genserve_interrupted_calls_total{model="tiny",outcome="resumed"}',
        "running": 'genserve_num_requests_running{model="tiny"}',
    }[what]
    metrics = httpx2.get(f"{url}/metrics?replicas=sum").text
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


@pytest.mark.slow
def test_replicas_follow_the_load_from_one_to_three_and_back(deployed: Deployed, tmp_path: Path) -> None:
    config = yaml.safe_load(deployed.file.read_text())
    [tiny] = [one for one in config["applications"][0]["deployments"] if one["name"] == "tiny"]
    del tiny["num_replicas"]
    tiny["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 3,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 2.0,
        "look_back_period_s": 2.0,
        "policy": {
            "policy_function": "genserve.deploy.ray.autoscaling:TokenLoadPolicy",
            "policy_kwargs": {"target_usage": 0.1, "target_waiting_tokens": 100.0},
        },
    }
    file = tmp_path / "scaled.yaml"
    file.write_text(yaml.safe_dump(config))
    assert deployed.deploy("--config", str(file), "--detach").returncode == 0

    def states() -> list[str]:
        return sorted(deployed.replicas()["tiny"].values())

    wait_for(lambda: states() == ["RUNNING"], "one replica before the load")
    undisturbed = streamed(deployed.url)
    with load(lambda: streamed(deployed.url), num_clients=8) as found:
        wait_for(lambda: states() == ["RUNNING"] * 3, "three replicas under load")
    wait_for(lambda: states() == ["RUNNING"], "one replica after the load")
    assert all(text == undisturbed for text in found)


def streamed(url: str, *, step_ms: int | None = None) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    stream = client.completions.create(
        model="tiny",
        prompt="Hello",
        temperature=0,
        max_tokens=200,
        stream=True,
        extra_body={
            "ignore_eos": True,
            "logits_processors": []
            if step_ms is None
            else [{"name": "slow", "args": {"step_ms": step_ms}}],
        },
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


@contextmanager
def load(request: Callable[[], T], *, num_clients: int) -> Iterator[list[T]]:
    """Repeat a request in several threads until the block ends; yields the answers, and raises its errors."""
    found: list[T] = []
    ended = False

    def repeat() -> None:
        while not ended:
            found.append(request())

    with ThreadPoolExecutor(num_clients) as pool:
        clients: list[Future[None]] = [pool.submit(repeat) for _ in range(num_clients)]
        try:
            yield found
        finally:
            ended = True
    for client in clients:
        client.result()
