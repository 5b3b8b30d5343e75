"""Configs that a real Triton (2.51) rejected, with its messages; and those that it loaded.

`recorded/refusals.json` has the configs of one repository of Python models and ensembles, each with the
message of Triton's log; REPOSITORY stands for the path. Without a message, the model became ready.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genserve.config.diagnostics import Diagnostic, Severity
from genserve.repository.model_validation import repository_diagnostics

RECORDED = json.loads((Path(__file__).parent / "recorded" / "refusals.json").read_text())


# Only warnings here: the model is served.
WARNED = {"label"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, model in RECORDED.items():
        for version in model.get("versions", [1]):
            (root / name / str(version)).mkdir(parents=True)
            (root / name / str(version) / "model.py").write_text("class TritonPythonModel: ...")
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.pbtxt").write_text("\n".join(model["config"]))
    return root


@pytest.fixture(scope="module")
def errors(root: Path) -> dict[str, list[Diagnostic]]:
    diagnostics = repository_diagnostics([root])
    severities = {name: Severity.WARNING if name in WARNED else Severity.ERROR for name in diagnostics}
    return {
        name: [each for each in found if each.severity is severities[name]]
        for name, found in diagnostics.items()
    }


@pytest.mark.parametrize("name", [name for name, model in RECORDED.items() if "message" in model])
def test_a_config_that_triton_rejects_is_rejected_with_its_message_and_a_remedy(name, root, errors):
    # Triton reports some of these while it runs the model, in a longer text.
    message = RECORDED[name]["message"].replace("REPOSITORY", str(root))
    assert any(diagnostic.message in message for diagnostic in errors[name])
    assert all(diagnostic.remedy for diagnostic in errors[name])


@pytest.mark.parametrize("name", [name for name, model in RECORDED.items() if "message" not in model])
def test_a_config_that_triton_loads_has_no_error(name, errors):
    assert errors[name] == []
