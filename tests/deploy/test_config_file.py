"""Reading and writing Serve's config files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from genserve.deploy.ray.config_file import read_config, to_yaml
from genserve.deploy.ray.deploy_config import IMPORT_PATH, Scale, find_models, serve_config
from genserve.errors import ConfigError, RepositoryError


@pytest.fixture(scope="module")
def text(tiny_repository: Path) -> str:
    return to_yaml(
        serve_config(
            find_models([tiny_repository]),
            roots=[tiny_repository],
            name="app",
            settings={"max_queue": 8},
            scale=Scale(min_replicas=1, max_replicas=3),
        )
    )


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return path


def test_what_is_written_is_valid_for_serve_and_read_again(text, tmp_path):
    assert read_config(written(tmp_path, text)) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("before", "after", "message", "remedy"),
    [
        ("proxy_location:", "proxy_place:", "unknown key 'proxy_place'", "did you mean proxy_location?"),
        ("max_replicas:", "max_replica:", "unknown key 'max_replica'", "did you mean max_replicas?"),
        ("num_cpus:", "num_cpu:", "unknown key 'num_cpu'", "did you mean num_cpus?"),
        ("models:", "model:", "unknown key 'model'", "did you mean models?"),
        ("max_queue:", "max_quee:", "unknown key 'max_quee'", "did you mean max_queue?"),
        ("max_queue: 8", "grpc_port: 8", "unknown key 'grpc_port'", ""),
        ("max_queue: 8", "max_queue: -8", "args.settings: max_queue must be at least 0", "--dry-run"),
        ("max_queue: 8", "max_queue: many", "args.settings: max_queue: must be a whole number", "--dry-run"),
        ("num_cpus: 1", "num_cpus: -1", "num_cpus: must be at least 0", "--dry-run"),
        ("max_queue: 8", "http_port: 0", "http_port must be a port that clients know", "--dry-run"),
        ("max_queue: 8", "http_port: 80a", "http_port: must be a whole number", "--dry-run"),
        ("min_replicas: 1", "min_replicas: 0", "min_replicas: must be at least 1", "--dry-run"),
        ("TokenLoadPolicy", "TokenPolicy", "cannot import: module 'genserve.deploy", "--dry-run"),
    ],
)
def test_a_mistake_is_reported_with_its_place_and_a_remedy(text, tmp_path, before, after, message, remedy):
    assert before in text
    path = written(tmp_path, text.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    if "cannot import" in message:      # Serve does not say where
        return
    place, _, _ = caught.value.message.partition(": ")
    _, line, _ = place.rsplit(":", 2)
    assert after.partition(":")[0] in path.read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "a mapping"), ("", "a mapping"), ("a: [", "not YAML"), ("applications: 3", "must be a list")],
)
def test_another_file_is_rejected(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_config(written(tmp_path, text))


def test_autoscaling_by_the_policy_of_serve_is_rejected(text, tmp_path):
    config = yaml.safe_load(text)
    for options in config["applications"][0]["deployments"]:
        options.get("autoscaling_config", {}).pop("policy", None)
    with pytest.raises(ConfigError, match=r"autoscaling_config: .*TokenLoadPolicy"):
        read_config(written(tmp_path, yaml.safe_dump(config)))


def test_the_documented_file_is_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    [documented] = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if IMPORT_PATH in text]
    assert read_config(written(tmp_path, documented))["applications"]


def test_the_arguments_of_another_application_are_not_checked(text, tmp_path):
    config = yaml.safe_load(text)
    other = {"name": "other", "route_prefix": "/other", "import_path": "other:app"}
    config["applications"].append({**other, "args": {"any": {"key": 1}}})
    assert read_config(written(tmp_path, yaml.safe_dump(config))) == config


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(RepositoryError, match=r"none\.yaml"):
        read_config(tmp_path / "none.yaml")
