"""docs/agents.md: the versions of the agents are those that conformance runs."""

from __future__ import annotations

import json

import pytest

from genserve.cli.agents import AGENTS
from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", AGENTS)
def test_the_version_of_each_agent_is_the_tested_one(name: str) -> None:
    agent = AGENTS[name]
    manifests = (
        json.loads(file.read_text(encoding="utf-8"))["dependencies"]
        for file in ROOT.glob("conformance/clients/*/package.json")
    )
    [version] = [packages[agent.package] for packages in manifests if agent.package in packages]
    assert f"| `{name}` | `{agent.package}` | {version} | {agent.dialect} |" in PAGE
