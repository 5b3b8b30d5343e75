"""docs/agents.md: the settings of each agent, and the versions that conformance runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genserve.cli.agents import AGENTS, AgentModel
from genserve.cli.launch_command import shell_commands
from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
MODEL = AgentModel(url="http://127.0.0.1:8000", name="qwen3-4b", max_length=32768)


@pytest.mark.parametrize("name", AGENTS)
def test_the_settings_of_each_agent_are_those_of_launch(name: str) -> None:
    agent = AGENTS[name]
    assert f"\n```sh\n{shell_commands(agent, agent.settings(MODEL, Path('agents')))}```\n" in PAGE


@pytest.mark.parametrize("name", AGENTS)
def test_the_version_of_each_agent_is_the_tested_one(name: str) -> None:
    agent = AGENTS[name]
    manifests = (
        json.loads(file.read_text(encoding="utf-8"))["dependencies"]
        for file in ROOT.glob("conformance/clients/*/package.json")
    )
    [version] = [packages[agent.package] for packages in manifests if agent.package in packages]
    assert f"| `{name}` | `{agent.package}` | {version} | {agent.dialect} |" in PAGE
