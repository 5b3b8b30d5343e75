"""The code blocks of the documentation: Python and shell run against a server, everything else is parsed.

Where a page says 8000, 8001 and 8002, a test has the ports of its server; the model that the pages call
smollm2 is a tiny random one. `-ra` lists the blocks that do not run, with their reasons.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import promql_parser
import pytest
import tritonclient.grpc as triton
import trustme
import yaml
from google.protobuf import text_format

from genserve import LLM, Client, Completion
from genserve.config.schema import new_model_config
from tests.docs.command_lines import check_command, commands
from tests.docs.snippets import ROOT, Snippet, snippets
from tests.support.live_server import LiveServer, line_with, serving

SNIPPETS = snippets()
SHELL = ("sh", "bash", "shell")
# A block without a language is text: it has no command.
PARSED = {
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
}
# Programs that change nothing outside of the folder where a block runs.
RUNNABLE = ("cat", "curl", "diff", "echo", "genserve", "head", "ls", "printf", "python", "tail")
OTHERS = ("python", "pbtxt", "nginx", "js", "text", "")
_COMMAND = re.compile(r"^(\$ )?(genserve|pip|uvx?|docker|make|curl|python|pytest) ", re.MULTILINE)


def of_languages(*languages: str) -> list:
    """Return the parameters of a test over the blocks in these languages."""
    return [
        pytest.param(one, id=one.place, marks=[pytest.mark.slow] if one.is_slow else [])
        for one in SNIPPETS
        if one.language in languages
    ]


def localized(text: str, server: LiveServer) -> str:
    """Return a text with the ports of this server, and with a repository that is there."""
    text = text.replace("/path/to/models", "model_repository")
    ports = {8000: server.url, 8001: server.grpc_url, 8002: server.info.metrics_url}
    for port, address in ports.items():
        ours = re.search(r":(\d+)", address.removeprefix("http:"))
        assert ours is not None
        text = re.sub(rf"\b(127\.0\.0\.1|localhost):{port}\b", rf"\1:{ours[1]}", text)
    return text


def skip_if_marked(snippet: Snippet) -> None:
    if snippet.not_run:
        pytest.skip(snippet.not_run)


def model_files(words: str) -> list:
    """Return the blocks that are a model.py with these words."""
    return [
        param
        for param in of_languages("python")
        if "\nclass TritonPythonModel" in f"\n{param.values[0].text}" and words in param.values[0].text
    ]


PROGRAMS = [param for param in of_languages("python") if param not in model_files("")]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("snippet", PROGRAMS)
def test_python_runs(snippet, server, workspace, monkeypatch, capsys, tmp_path):
    code = compile(localized(snippet.text, server), snippet.place, "exec")
    skip_if_marked(snippet)
    if snippet.is_slow:     # it may write
        workspace = shutil.copytree(workspace, tmp_path / "folder", symlinks=True)
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("GENSERVE_HOME", str(workspace))
    monkeypatch.syspath_prepend(workspace)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out or "print" not in snippet.text
    if "client = " in snippet.text:
        gc.collect()  # what it leaves open, before the next test


@pytest.fixture(scope="module")
def likeliest(workspace: Path) -> Completion:
    """The answer of greedy decoding."""
    with LLM(model_repository=workspace / "model_repository") as llm:
        return llm.generate("hello", max_tokens=12, ignore_eos=True)


@pytest.mark.extended
@pytest.mark.parametrize("snippet", model_files("async def decode("))
def test_every_decoding_loop_is_greedy_at_temperature_0(snippet, workspace, likeliest, tmp_path):
    repository = shutil.copytree(workspace / "model_repository", tmp_path / "repository")
    (repository / "smollm2_decoder" / "1" / "model.py").write_text(snippet.text)
    with LLM(model_repository=repository) as llm:
        assert llm.generate("hello", max_tokens=12, ignore_eos=True) == likeliest


@pytest.mark.extended
@pytest.mark.parametrize("snippet", model_files("def execute("))
def test_a_bls_loop_is_greedy(snippet, workspace, likeliest, tmp_path):
    repository = shutil.copytree(workspace / "model_repository", tmp_path / "repository")
    (repository / "loop" / "1").mkdir(parents=True)
    (repository / "loop" / "1" / "model.py").write_text(snippet.text)
    (repository / "loop" / "config.pbtxt").write_text(
        'backend: "python" input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ 1, -1 ] } ] '
        'output [ { name: "output_ids" data_type: TYPE_INT64 dims: [ -1 ] } ]'
    )
    with LiveServer(repository) as server, triton.InferenceServerClient(server.grpc_url) as client:
        text = triton.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"hello"]], dtype=object))
        prompt = client.infer("smollm2_tokenizer", [text]).as_numpy("input_ids")
        ids = triton.InferInput("input_ids", prompt.shape, "INT64")
        ids.set_data_from_numpy(prompt)
        answer = client.infer("loop", [ids]).as_numpy("output_ids")
    assert tuple(answer[prompt.size :][: len(likeliest.token_ids)]) == likeliest.token_ids


@pytest.mark.parametrize("snippet", of_languages(*SHELL))
def test_shell_commands_are_right(snippet):
    """Each command line is one that its program accepts."""
    for command in commands(snippet.text):
        check_command(command)
        assert snippet.not_run or command[0] in RUNNABLE, f"{command[0]}: say why it is not run"


@pytest.mark.extended
@pytest.mark.parametrize("snippet", [one for one in of_languages(*SHELL) if "curl" in one.values[0].text])
def test_curl_runs(snippet, server, workspace):
    skip_if_marked(snippet)
    for command in commands(snippet.text):
        if command[0] == "curl":
            line = shlex.join(["curl", "-fsS", *(localized(word, server) for word in command[1:])])
            done = subprocess.run(
                line, shell=True, cwd=workspace, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.strip() or "/health" in line


@pytest.mark.extended
def test_the_guide_of_triton_repositories_works_with_the_server_that_it_starts(workspace, capsys):
    guide = [snippet for snippet in SNIPPETS if snippet.page.name == "triton_repository.md"]
    [serve] = [line for one in guide for line in commands(one.text) if "--load-model=smollm2" in line]
    [program] = [one.text for one in guide if one.language == "python"]
    flags = serve[serve.index("serve") + 1 :]
    with serving(
        workspace / "model_repository", *flags, cwd=workspace, stderr=subprocess.DEVNULL
    ) as process:
        banner = line_with(process, "Model")
        while "over gRPC at " not in banner:
            banner += process.stdout.readline()
        assert "not loaded" not in banner
        exec(program.replace("127.0.0.1:8001", banner.rpartition("over gRPC at ")[2].strip()), {})
    assert "[[" in capsys.readouterr().out      # token ids


@pytest.mark.parametrize("snippet", of_languages(*PARSED))
def test_data_is_parsed(snippet):
    assert PARSED[snippet.language](snippet.text)


@pytest.mark.extended
def test_alerts_are_about_metrics_of_the_server(server):
    [text] = [snippet.text for snippet in SNIPPETS if "alert: " in snippet.text]
    metrics = httpx2.get(server.info.metrics_url).text
    for rule in yaml.safe_load(text)["groups"][0]["rules"]:
        promql_parser.parse(rule["expr"])
        for name in re.findall(r"genserve_\w+", rule["expr"]):
            assert f"# TYPE {name.removesuffix('_bucket')} " in metrics


@pytest.mark.parametrize("snippet", of_languages("pbtxt"))
def test_configs_have_the_fields_of_the_schema(snippet):
    message = new_model_config()
    text_format.Parse(snippet.text, message)
    assert message.ListFields()


@pytest.fixture
def nginx(tmp_path: Path) -> Callable[[str], list[Any]]:
    """Return the command that runs nginx with a config."""
    path = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip("there is no nginx")
    issued = trustme.CA().issue_cert("llm.example.com")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "llm.pem")
    issued.private_key_pem.write_to_path(tmp_path / "llm.key")

    def command(config: str) -> list[Any]:
        config = config.replace("/etc/nginx/", f"{tmp_path}/")
        (tmp_path / "nginx.conf").write_text(
            f"daemon off;\npid {tmp_path}/nginx.pid;\nerror_log stderr;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{config}}}\n"
        )
        return [path, "-q", "-e", "stderr", "-p", tmp_path, "-c", tmp_path / "nginx.conf"]

    return command


@pytest.mark.parametrize("snippet", of_languages("nginx"))
def test_nginx_accepts_its_config(snippet, nginx):
    checked = subprocess.run([*nginx(snippet.text), "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.extended
def test_streams_pass_through_nginx(nginx, server):
    of_nginx = [snippet.text for snippet in SNIPPETS if snippet.language == "nginx"]
    [text] = [text for text in of_nginx if "location /llm/" in text]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = localized(text, server).replace("listen 80;", f"listen 127.0.0.1:{port};")
    url = f"http://127.0.0.1:{port}/llm"
    with subprocess.Popen(nginx(config)) as process:
        try:
            with Client(url, max_retries=8) as client:
                with client.stream("hello", max_tokens=4, ignore_eos=True) as stream:
                    assert len(list(stream)) == 4
                assert client.chat("hello", max_tokens=4).usage.completion_tokens > 0
        finally:
            process.terminate()


def test_every_block_is_of_a_known_kind():
    assert {snippet.language for snippet in SNIPPETS} <= {*SHELL, *PARSED, *OTHERS}
    texts = [one for one in SNIPPETS if one.language in ("text", "") and not one.not_run]
    assert [one.place for one in texts if _COMMAND.search(one.text)] == [], "write ```sh"


@pytest.fixture
def shell(workspace: Path, server: LiveServer, tmp_path: Path) -> dict[str, Any]:
    """The folder and the environment of a shell block; in it, `genserve serve` ends when it is ready."""
    folder = shutil.copytree(workspace, tmp_path / "folder", symlinks=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "clients-ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "server.pem")
    issued.private_key_pem.write_to_path(folder / "server.key")
    shim = tmp_path / "bin" / "genserve"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/docs/shim.py "$@"\n')
    shim.chmod(0o755)
    environment = {
        "PATH": f"{shim.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GENSERVE_HOME": str(folder),
        "GENSERVE_URL": server.url,
        "GENSERVE_GRPC": server.grpc_url,
    }
    return {"cwd": folder, "env": os.environ | environment}


@pytest.mark.slow
@pytest.mark.parametrize(
    "snippet", [param.values[0] for param in of_languages(*SHELL)], ids=lambda snippet: snippet.place
)
def test_shell_runs(snippet, server, shell):
    skip_if_marked(snippet)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", localized(snippet.text, server)],
        **shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
