from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import genserve
from genserve.cli.main import main
from tests.cli.test_model_choice import add_model
from tests.client.scripted_server import PATIENCE_S, event_reply, models_reply, scripted
from tests.support.command_line import invoke

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
main()
heavy = {"torch", "transformers", "onnxruntime", "onnx", "fastapi", "grpc", "numpy", "prompt_toolkit"}
print("loaded:", sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "loaded: []"


def test_the_version_is_a_command_and_a_flag() -> None:
    assert invoke(["version"]).stdout == f"{genserve.__version__}\n"
    assert invoke(["--version"]).stdout == f"{genserve.__version__}\n"


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


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        ("generate --max-tokens many", "'many' is not an integer", "see `genserve generate --help`"),
        ("generate --max-token 3", "there is no flag --max-token", "did you mean --max-tokens?"),
        ("pull m --precision in8", "'in8' is not one of 'int8', 'int4'", "did you mean int8?"),
        ("pull m --precision x", "'x' is not one of 'int8', 'int4'", "see `genserve pull --help`"),
        ("chatt", "there is no command 'chatt'", "did you mean `genserve chat`?"),
        ("serve --prot 80", "there is no flag --prot", "did you mean --http-port?"),
        ("run m", "there is no command 'run'", "did you mean `genserve chat m`?"),
        ("ps", "there is no command 'ps'", "did you mean `genserve models --url http://127.0.0.1:8000`?"),
        ("rm m", "there is no command 'rm'", "did you mean `genserve remove m`?"),
        ("xyz", "there is no command 'xyz'", "the commands are serve, chat, generate"),
        ("pull", "NAME is missing", "see `genserve pull --help`"),
        ("pull a b", "unexpected arguments: b", "write `genserve pull [OPTIONS] NAME`"),
        ("chat m what is it", "unexpected arguments: is it", "[QUESTION]`, with quotes around several words"),
        ("serve --model m", "there is no flag --model", "write `genserve serve [OPTIONS] [MODEL...]`"),
        ("pull --name m", "there is no flag --name", "write `genserve pull [OPTIONS] NAME`"),
        ("help chatt", "there is no command 'chatt'", "did you mean `genserve chat --help`?"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_remedy(words: str, message: str, remedy: str) -> None:
    result = invoke(words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first.startswith("error[usage]: ")
    assert message in first
    assert remedy in second


@pytest.mark.parametrize("command", [[], ["models"]])
def test_help_is_a_command_too(command: list[str]) -> None:
    assert invoke(["help", *command]).stdout == invoke([*command, "--help"]).stdout


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_that_of_wrong_usage() -> None:
    result = invoke([])
    assert result.exit_code == 2
    assert "Usage: genserve [OPTIONS] COMMAND" in result.stderr


@pytest.mark.parametrize("words", ["--help", "models --help", "version"])
def test_a_reader_that_leaves_ends_the_command_quietly_with_141(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(command_line(*words.split()), stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_closed_standard_streams_are_no_error(tmp_path: Path) -> None:
    # With its number free, the next file would take the place of standard output.
    command = shlex.join(command_line("models", "--model-repository", str(tmp_path)))
    ran = subprocess.run(f"{command} <&- >&-", shell=True, stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_a_full_disk_is_an_error_and_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(command_line("version"), stdout=full, stderr=subprocess.PIPE, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith(b"error: cannot write: No space left")


def test_a_path_that_cannot_be_read_is_an_error_and_no_traceback() -> None:
    ran = run("models", "--model-repository", "x" * 300)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: {'x' * 300}: File name too long\n  remedy: ")


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    add_model(tmp_path, "tée")
    command = command_line("models", "--model-repository", str(tmp_path))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ran.returncode == 0
    assert b"t\\xe9e" in ran.stdout


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


def test_ctrl_c_during_the_imports_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}
    ran = subprocess.run(command_line("version"), env=environment, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (130, b"")
