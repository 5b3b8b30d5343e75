from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

import genserve
from genserve.cli.main import app, main
from tests.client.scripted_server import PATIENCE_S, event_reply, models_reply, scripted

COMMANDS = ["serve", "chat", "generate", "pull", "export", "check", "models", "version"]
MODELS = models_reply("m")


def command_line(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "genserve", *arguments]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(*arguments), input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_help_loads_nothing_heavy() -> None:
    program = """
import sys
from genserve.cli.main import main
sys.argv = ["genserve", "--help"]
try:
    main()
except SystemExit:
    heavy = {"torch", "transformers", "onnxruntime", "onnx", "fastapi", "grpc", "numpy", "prompt_toolkit"}
    print("loaded:", sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert f"genserve {command}" in shown.stdout.split("Example:")[1]


def test_the_version_is_a_command_and_a_flag() -> None:
    assert CliRunner().invoke(app, ["version"]).stdout == f"{genserve.__version__}\n"
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{genserve.__version__}\n"


def test_an_error_is_printed_with_code_and_remedy_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["genserve", "models", "--model-repository", "/nowhere"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error[repository_error]: there is no model repository at /nowhere"
    assert lines[1].startswith("  remedy: ")
    assert "genserve pull smollm2" in lines[1]


def test_wrong_usage_exits_with_2() -> None:
    ran = run("generate", "--max-tokens", "many")
    assert ran.returncode == 2
    assert "--max-tokens" in ran.stderr


def test_ctrl_c_disconnects_and_exits_with_130() -> None:
    with scripted(MODELS, event_reply(stays_open=True)) as server:
        command = command_line("generate", "Tea", "--url", server.url)
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            try:
                assert server.is_answering.wait(PATIENCE_S)
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        assert process.returncode == 130
        assert server.client_left.wait(PATIENCE_S)
    assert b"Traceback" not in stderr


def test_without_a_server_it_exits_with_1_and_a_remedy() -> None:
    with scripted() as server:
        url = server.url
    ran = run("models", "--url", url)
    assert ran.returncode == 1
    assert "error[unreachable]" in ran.stderr
    assert "genserve serve" in ran.stderr
