from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from genserve.cli.agents import AGENTS, AgentModel
from genserve.cli.launch_command import LaunchFlags
from genserve.cli.main import USAGE
from genserve.errors import ModelNotFound
from tests.client.scripted_server import json_reply, models_reply, scripted
from tests.support.command_line import Ended, check_error, invoke

MODELS = json_reply({"object": "list", "data": [{"id": "m", "max_model_len": 40000}]})
# Stands for an agent: writes what it was started with, and ends with the status that its last argument says.
PROGRAM = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["STARTED"], "w") as file:
    json.dump({{"arguments": sys.argv[1:], "variables": dict(os.environ)}}, file)
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts programs with the names of the agents on the path, and returns the file that they write."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        (folder / agent.program).write_text(PROGRAM, encoding="utf-8")
        (folder / agent.program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GENSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STARTED", str(started := tmp_path / "started.json"))
    monkeypatch.delenv("GENSERVE_API_KEY", raising=False)
    return started


def started_with(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def launch(*words: str) -> tuple[Ended, str]:
    """Launch an agent with a server of one model; return how it ended, and the URL of the server."""
    with scripted(MODELS) as server:
        return invoke(["launch", "--url", server.url, *words]), server.url


def test_the_flag_lists_all_agents() -> None:
    assert set(get_args(get_type_hints(LaunchFlags)["agent"])) == set(AGENTS)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_runs_with_its_settings_and_arguments(programs: Path, name: str) -> None:
    ended, url = launch(name, "--", "--verbose", "a task", "3")
    assert ended.exit_code == 3
    started = started_with(programs)
    assert started["arguments"][-3:] == ["--verbose", "a task", "3"]
    home = programs.parent / "home" / "agents"
    settings = AGENTS[name].settings(AgentModel(url=url, name="m", max_length=40000), home)
    assert started["arguments"][:-3] == [*settings.arguments]
    assert {path: path.read_text(encoding="utf-8") for path in settings.files} == settings.files
    # Wherever an agent has its settings, they name the server, the model and its context.
    everything = json.dumps([started, [*settings.files.values()]])
    assert url in everything
    # Claude Code gets a longer context, and Copilot that without the answer.
    assert any(length in everything for length in ("40000", "51000", "35000"))


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_key_of_the_environment(
    programs: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    monkeypatch.setenv("GENSERVE_API_KEY", key)
    launch(name, "--", "0")
    variables = started_with(programs)["variables"]
    of_agents = ("GENSERVE_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", "COPILOT_PROVIDER_API_KEY")
    assert (key or "none") in {variables.get(variable) for variable in of_agents}


@pytest.mark.parametrize("name", AGENTS)
def test_the_printed_commands_start_the_agent_alike(programs: Path, name: str) -> None:
    launched, _ = launch(name, "--", "it's", "0")
    as_launched = started_with(programs)
    programs.unlink()
    with scripted(MODELS) as server:
        printed = invoke(["launch", name, "--url", server.url, "--print", "--", "it's", "0"])
    assert (launched.exit_code, printed.exit_code, programs.exists()) == (0, 0, False)
    assert AGENTS[name].program in shlex.split(printed.stdout.splitlines()[-1])
    subprocess.run(["sh", "-c", printed.stdout], check=True)
    as_printed = started_with(programs)
    # The two servers differ by their ports.
    port = server.url.rpartition(":")[2]
    assert as_printed["arguments"][-2:] == as_launched["arguments"][-2:] == ["it's", "0"]
    assert len(as_printed["arguments"]) == len(as_launched["arguments"])
    variables = as_printed["variables"]
    changed = {name for name, value in as_launched["variables"].items() if variables.get(name) != value}
    assert {name for name in changed if port not in variables[name]} <= {"_", "SHLVL", "PWD", "OLDPWD"}


def test_a_missing_program_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ended = invoke(["launch", "codex", "--url", "http://127.0.0.1:9"])
    assert ended.exit_code == 1
    assert "npm install --global @openai/codex" in ended.error


def test_commands_are_printed_for_a_server_only() -> None:
    ended = invoke(["launch", "codex", "--print"])
    assert ended.exit_code == USAGE
    assert "--url" in ended.error


def test_a_model_must_be_one_of_the_servers(programs: Path) -> None:
    with scripted(models_reply("one", "two")) as server:
        check_error(invoke(["launch", "pi", "--url", server.url, "--model", "three"]), ModelNotFound, "one")
    assert not programs.exists()


def test_without_a_url_a_server_runs_for_the_agent(
    programs: Path, tiny_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = f"""#!{sys.executable}
import json, os, sys, urllib.request
with urllib.request.urlopen(os.environ["COPILOT_PROVIDER_BASE_URL"] + "/models") as reply:
    models = json.load(reply)
with open(os.environ["STARTED"], "w") as file:
    json.dump([os.environ["COPILOT_MODEL"], *(model["id"] for model in models["data"])], file)
"""
    program = programs.parent / "bin" / "copilot"
    program.write_text(asks, encoding="utf-8")
    ended = invoke(["launch", "copilot", "--model", "org/Tiny", "--model-repository", str(tiny_repository)])
    assert ended.exit_code == 0, ended.stderr
    assert started_with(programs) == ["tiny", "tiny"]
