"""Helm chart: rendered by Helm's own library, in a process of its own, as it brings Go's runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kubernetes_schemas import documents

__all__ = ["CHART", "Rendered", "needs_helm", "render"]

CHART = Path(__file__).parents[2] / "charts" / "genserve"

# By kind; a str: Helm's error.
Rendered = dict[str, dict[str, Any]] | str

needs_helm = pytest.mark.skipif(find_spec("helm_python") is None, reason="helm-python-sdk has no wheel here")

_NOTES = "genserve/templates/NOTES.txt"
_RENDER = """
import json, sys
from helm_python import Chart, HelmError, lint

values = json.load(sys.stdin)
answers = {"lint": lint(sys.argv[1], strict=True), "rendered": []}
with Chart.load(sys.argv[1]) as chart:
    for overriding in values:
        try:
            files = chart.render(overriding, name="genserve", namespace="models")
        except HelmError as error:
            files = str(error)
        answers["rendered"].append(files)
json.dump(answers, sys.stdout)
"""


def render(values: dict[str, dict[str, Any]]) -> tuple[dict[str, Rendered], dict[str, str], dict[str, Any]]:
    """Render the chart with several values.

    Args:
        values: what overrides values.yaml, by a name of the test's choice.

    Returns:
        The documents of each, the NOTES.txt of each, and the findings of `helm lint --strict`.
    """
    command = [sys.executable, "-c", _RENDER, str(CHART)]
    given = json.dumps(list(values.values()))
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    files = dict(zip(values, answers["rendered"], strict=True))
    notes = {name: texts.pop(_NOTES) for name, texts in files.items() if isinstance(texts, dict)}
    return {name: _by_kind(texts) for name, texts in files.items()}, notes, answers["lint"]


def _by_kind(files: dict[str, str] | str) -> Rendered:
    if isinstance(files, str):
        return files
    found = [document for text in files.values() for document in documents(text)]
    by_kind = {document["kind"]: document for document in found}
    assert len(by_kind) == len(found)
    return by_kind
