"""Manifests and examples for Kubernetes: valid, and consistent with the image."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from genserve.version import __version__
from tests.deploy.kubernetes_schemas import documents, problem

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "charts" / "manifests"
# Values of Helm charts, and what kustomize reads.
_NO_MANIFESTS = ("values.yaml", "picker.yaml", "prometheus_adapter.yaml", "kustomization.yaml")
FILES = [
    path
    for path in sorted([*MANIFESTS.glob("*.yaml"), *(ROOT / "examples" / "kubernetes").glob("*.yaml")])
    if path.name not in _NO_MANIFESTS
]


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_kubernetes_accepts_a_file(file: Path) -> None:
    found = documents(file.read_text(encoding="utf-8"))
    assert found
    assert [problem(document) for document in found] == [""] * len(found)


@pytest.mark.parametrize(
    ("file", "place"),
    [("deployment.yaml", ("spec", "template", "spec", "containers", 0)), ("podmonitor.yaml", ("spec",))],
    ids=["of Kubernetes", "of a CustomResourceDefinition"],
)
def test_a_field_that_does_not_exist_is_found(file: str, place: tuple[str | int, ...]) -> None:
    [document] = documents((MANIFESTS / file).read_text(encoding="utf-8"))
    changed: Any = copy.deepcopy(document)
    part = changed
    for step in place:
        part = part[step]
    part["imagePolicy"] = "Always"
    assert "imagePolicy" in problem(changed)


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_images_have_the_version_of_genserve(file: Path) -> None:
    tags = re.findall(r"genserve/genserve:(\S+)", file.read_text(encoding="utf-8"))
    assert set(tags) <= {__version__}


def test_the_kustomization_has_what_needs_nothing_else() -> None:
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    manifests = {path.name for path in FILES if path.parent == MANIFESTS}
    assert set(listed) == manifests - {"autoscaler.yaml", "podmonitor.yaml"}


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    [deployment] = documents((MANIFESTS / "deployment.yaml").read_text(encoding="utf-8"))
    return deployment["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def image() -> str:
    """The last stage of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    return text[text.rindex("\nFROM ") :]


def test_pods_run_as_the_user_of_the_image(pod, image) -> None:
    [user] = re.findall(r"^USER (\d+)$", image, re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == int(user)
    assert f"--uid {user}" in image


def test_pods_have_the_ports_of_the_image(pod, image) -> None:
    [exposed] = re.findall(r"^EXPOSE (.*)$", image, re.MULTILINE)
    assert [str(port["containerPort"]) for port in pod["containers"][0]["ports"]] == exposed.split()


def test_models_are_where_the_image_has_its_volume(pod, image) -> None:
    [volume] = re.findall(r"^VOLUME (.*)$", image, re.MULTILINE)
    [container] = pod["containers"]
    assert volume in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert f"--model-repository={volume}" in container["args"]


def test_the_image_runs_what_the_arguments_are_for(pod, image) -> None:
    [entry_point] = re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)
    assert json.loads(entry_point) == ["genserve"]
    assert "command" not in pod["containers"][0]
