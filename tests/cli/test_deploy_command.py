"""The command `genserve deploy` up to the cluster; tests/deploy/test_ray_cluster.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from genserve.deploy.ray.deploy_config import FINGERPRINT
from tests.support.command_line import Ended, invoke


def run(*words: str) -> Ended:
    return invoke(["deploy", "ray", *words])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("class TritonPythonModel: pass")
    (version.parent / "config.pbtxt").write_text('backend: "python"')
    return tmp_path / "models"


def test_a_dry_run_prints_a_file_that_deploys_the_same(repository: Path, tmp_path: Path) -> None:
    printed = run("--model-repository", str(repository), "--dry-run", "--port", "9000")
    assert printed.exit_code == 0, printed.output
    config = yaml.safe_load(printed.stdout)
    assert config["proxy_location"] == "Disabled"
    [application] = config["applications"]
    assert application["args"]["settings"] == {"host": "127.0.0.1", "http_port": 9000}
    assert application["args"]["model_repository"] == [str(repository)]
    file = tmp_path / "serve.yaml"
    file.write_text(printed.stdout)
    assert run("--config", str(file), "--dry-run").stdout == printed.stdout


def test_a_file_gets_the_fingerprints_that_its_models_have_now(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(run("--model-repository", str(repository), "--dry-run").stdout)
    (repository / "m" / "2").mkdir()
    (repository / "m" / "2" / "model.py").write_text("class TritonPythonModel: pass")

    def fingerprints(text: str) -> list[str]:
        return [line for line in text.splitlines() if FINGERPRINT in line]

    before, after = file.read_text(), run("--config", str(file), "--dry-run").stdout
    assert set(fingerprints(before)).isdisjoint(fingerprints(after))
    others = [[line for line in text.splitlines() if FINGERPRINT not in line] for text in (before, after)]
    assert others[0] == others[1]


def test_models_of_other_machines_keep_the_fingerprints_of_the_file(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    text = run("--model-repository", str(repository), "--dry-run").stdout
    file.write_text(text.replace(str(repository), "/elsewhere"))
    assert run("--config", str(file), "--dry-run").stdout == file.read_text()


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        ("--detach", "error[usage]: --detach needs the --address", "see `genserve deploy"),
        ("--delete", "error[usage]: --delete needs the --address", "see `genserve deploy"),
        ("--min-replicas 3 --max-replicas 2", "--max-replicas is 2, less than --min-replicas 3", "see"),
        ("m --config x.yaml", "error[usage]: the file of --config names the models itself", "see"),
        ("--config /none.yaml", "cannot read /none.yaml", "check the path"),
        ("--host 0.0.0.0", "lets other machines connect, and no API key is set", "set GENSERVE_API_KEY"),
        ("mm", "there is no model 'mm' in ", "did you mean m?"),
    ],
)
def test_what_cannot_be_deployed_is_an_error_with_a_remedy(
    repository: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str, remedy: str
) -> None:
    monkeypatch.delenv("GENSERVE_API_KEY", raising=False)
    monkeypatch.delenv("RAY_DASHBOARD_ADDRESS", raising=False)
    of_repository = () if "--config" in words else ("--model-repository", str(repository))
    ran = run(*words.split(), *of_repository)
    assert ran.exit_code != 0
    assert message in ran.error
    assert remedy in ran.error


def test_a_file_that_lets_everybody_in_is_a_warning(repository: Path, tmp_path: Path) -> None:
    text = run("--model-repository", str(repository), "--dry-run").stdout
    file = tmp_path / "serve.yaml"
    address = ("--address", "http://127.0.0.1:9", "--detach")   # nothing is deployed
    text = text.replace("host: 127.0.0.1", "host: 127.0.0.1\n      allow_unauthenticated: true")
    file.write_text(text)
    assert "warning" not in run("--config", str(file), *address).stderr
    file.write_text(text.replace("host: 127.0.0.1", "host: 0.0.0.0"))
    warning = "warning: genserve: host 0.0.0.0 lets other machines connect, and allow_unauthenticated"
    assert warning in run("--config", str(file), *address).stderr


def test_an_address_without_a_cluster_is_an_error(repository: Path) -> None:
    ran = run("--model-repository", str(repository), "--address", "http://127.0.0.1:9", "--detach")
    assert "no Ray cluster answers at http://127.0.0.1:9" in ran.error
