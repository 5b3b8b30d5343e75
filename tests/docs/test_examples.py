"""Every program of examples/ runs against a server, as its user would run it."""

from __future__ import annotations

import gc
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.environments import build_environment
from tests.docs.snippets import ROOT

EXAMPLES = ROOT / "examples"
# Its packages are those of the client in conformance/, in an environment of its own.
APART = {"langchain"}
PYTHON = sorted(
    path
    for path in EXAMPLES.glob("*/*.py")
    if path.parent.name not in APART and not path.match("triton_*/*")    # tests/articles runs these
)


@pytest.fixture
def environment(server, workspace, monkeypatch) -> dict[str, str]:
    for name, value in {
        "GENSERVE_URL": server.url,
        "GENSERVE_GRPC": server.grpc_url,
        "GENSERVE_HOME": str(workspace),
    }.items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


def relative(path: Path) -> str:
    return path.relative_to(EXAMPLES).as_posix()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("program", PYTHON, ids=relative)
def test_a_python_program_runs(program, environment, capsys):
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out
    if "\nclient = " in program.read_text(encoding="utf-8"):
        gc.collect()    # what it leaves open, before the next test


@pytest.mark.extended
@pytest.mark.parametrize("command", ["sh curl/chat.sh", "node javascript/chat.mjs"])
def test_a_program_in_another_language_runs(command, environment):
    program, path = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    done = subprocess.run(
        [program, EXAMPLES / path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APART))
def test_a_program_with_packages_of_its_own_runs(name, environment, tmp_path):
    client = build_environment(ROOT / "conformance" / "clients" / name, cache=tmp_path, needs_torch=False)
    for program in (EXAMPLES / name).glob("*.py"):
        command = [client.command[0], program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()


def test_every_folder_is_listed_and_says_how_it_runs():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = {path.parent for path in EXAMPLES.glob("*/*") if path.suffix in (".py", ".sh", ".mjs")}
    assert len(folders) > 12
    for folder in folders:
        assert f"]({folder.name}/README.md)" in page
        text = (folder / "README.md").read_text(encoding="utf-8")
        programs = [path for path in folder.iterdir() if path.suffix in (".py", ".sh", ".mjs")]
        assert [path.name for path in programs if f"examples/{relative(path)}" not in text] == []
