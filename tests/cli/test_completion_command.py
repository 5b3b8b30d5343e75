from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_model_choice import add_model
from tests.support.command_line import invoke

PATIENCE_S = 15
# Runs a program that controls its terminal, without which fish does not start.
WITH_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
# Each shell shows the line that is being edited, on Ctrl-T.
STARTS = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        'bind -x \'"\\C-t": printf "LINE<%s>\\n" "$READLINE_LINE"\'; eval "$(genserve completion bash)"',
    ),
    "zsh": (
        ["-f", "-i"],
        'autoload -U compinit; compinit -D -u; show() { print -r "LINE<$BUFFER>" }; zle -N show; '
        "bindkey '^T' show; source <(genserve completion zsh)",
    ),
    "fish": (
        ["--no-config", "-i"],
        'bind \\ct \'echo "LINE<"(commandline)">"\'; genserve completion fish | source',
    ),
}


def complete(line: str, **environment: str) -> dict[str, str]:
    """Return what argcomplete offers for the end of a line of bash, with the help of each word."""
    program = (
        "import sys, os; os.dup2(1, 8); from genserve.cli.main import main; sys.argv = ['genserve']; main()"
    )
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "fish",  # which gets the help, too
        "_ARGCOMPLETE_DFS": "\t",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
        "COMP_TYPE": "9",
    }
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | asked | environment, capture_output=True, text=True,
        check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    lines = (each.partition("\t") for each in re.split(r"[\v\n]", ran.stdout) if each)
    return {word: text for word, _, text in lines}


def test_commands_and_their_flags_are_completed() -> None:
    assert complete("genserve g") == {"generate": "Complete a prompt, or answer a file of prompts"}
    assert {"serve", "chat", "--version"} <= {*complete("genserve ")}
    assert complete("genserve generate --see") == {"--seed": "The same seed gives the same text."}
    assert [*complete("genserve serve --no-allow-g")] == ["--no-allow-grpc"]
    assert "--max-tokens" in complete("genserve generate Tea ")


@pytest.mark.parametrize(
    ("begun", "completed"),
    [
        ("export --precision i", ["int8", "int4"]),
        ("export --precision=fp1", ["--precision=fp16"]),
        pytest.param("generate --set repetition_p", ["repetition_penalty="], marks=pytest.mark.extended),
        ("generate --set ignore_eos=", ["ignore_eos=true", "ignore_eos=false"]),
        pytest.param(
            "generate --set logprobs_mode=p", ["logprobs_mode=processed"], marks=pytest.mark.extended
        ),
        pytest.param("generate --set min_p=", [], marks=pytest.mark.extended),
    ],
)
def test_values_are_completed(begun: str, completed: list[str]) -> None:
    assert [*complete(f"genserve {begun}")] == completed


def test_models_of_the_repository_on_the_line_are_completed(tmp_path: Path) -> None:
    add_model(tmp_path, "tea")
    add_model(tmp_path, "coffee")
    assert {"coffee", "tea"} <= {*complete(f"genserve tune --model-repository {tmp_path} ")}
    assert [*complete(f"genserve generate --model-repository={tmp_path} --model t")] == ["tea"]
    assert [*complete("genserve chat te", GENSERVE_MODEL_REPOSITORY=str(tmp_path))] == ["tea"]


class Shell:
    """An interactive shell in a terminal, with `genserve` on its path."""

    def __init__(self, shell: str, *, folder: Path) -> None:
        program = folder / "genserve"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m genserve "$@"\n')
        program.chmod(0o755)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(sys.path),
            "HOME": str(folder),
            "TERM": "xterm",
            "PS1": "$ ",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", WITH_TERMINAL, shell, *STARTS[shell][0]],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def start(self, commands: str) -> None:
        self._type(f"{commands}; echo REA''DY\r")
        self._expect("READY")

    def complete(self, line: str) -> str:
        """Return the line after a Tab at its end."""
        self._type(f"\x15{line}\t\x14")
        return self._expect(r"LINE<(.*?)>")

    def _type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def _expect(self, pattern: str) -> str:
        read = ""
        while (found := re.search(pattern, read)) is None:
            ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
            assert ready, f"no {pattern!r} in {read!r}"
            read += os.read(self._master, 65536).decode(errors="replace")
        return found[found.re.groups]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture(scope="module", params=sorted(STARTS))
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "models").mkdir()
    add_model(folder / "models", "smollm2")
    shell = Shell(request.param, folder=folder)
    try:
        shell.start(STARTS[request.param][1])
        yield shell
    finally:
        shell.close()


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("genserve generate --set repetition_p", "genserve generate --set repetition_penalty="),
        pytest.param(
            "genserve export --precision=fp1", "genserve export --precision=fp16 ", marks=pytest.mark.extended
        ),
        pytest.param(
            "genserve tune --model-repository models sm",
            "genserve tune --model-repository models smollm2 ",
            marks=pytest.mark.extended,
        ),
        ("genserve tune --model-repository mod", "genserve tune --model-repository models/"),
        ("echo x | genserve gen", "echo x | genserve generate "),
    ],
)
def test_a_real_shell_completes_the_line(shell: Shell, typed: str, line: str) -> None:
    assert shell.complete(typed) == line


@pytest.mark.parametrize("name", sorted(STARTS))
def test_the_script_is_valid(name: str) -> None:
    script = invoke(["completion", name]).stdout
    assert "_ARGCOMPLETE" in script
    if shutil.which(name):
        subprocess.run([name, "-n"], input=script, text=True, check=True)
