"""A model repository as a Serve config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genserve.deploy.ray.deploy_config import (
    FINGERPRINT,
    INGRESS,
    Scale,
    find_models,
    num_cpus,
    serve_config,
    with_fingerprints,
)
from genserve.errors import RepositoryError
from genserve.machine import default_threads


def add_model(root: Path, name: str, config: str = "", *, version: int = 1) -> Path:
    """Write a Python model that is valid except for what `config` adds."""
    folder = root / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.py").write_text("class TritonPythonModel: pass")
    (folder / "config.pbtxt").write_text(f'backend: "python"\n{config}')
    return folder


def add_ensemble(root: Path, name: str, *steps: str) -> None:
    (root / name).mkdir()
    written = ", ".join(f'{{ model_name: "{step}" model_version: -1 }}' for step in steps)
    (root / name / "config.pbtxt").write_text(
        f'platform: "ensemble"\nensemble_scheduling {{ step [ {written} ] }}'
    )


def options_of(root: Path, *names: str, scale: Scale | None = None, **settings: Any) -> dict[str, Any]:
    """The options of each deployment, by name."""
    config = serve_config(
        find_models([root], names),
        roots=[root],
        name="app",
        settings=settings,
        scale=scale or Scale(),
    )
    return {options["name"]: options for options in config["applications"][0]["deployments"]}


def fingerprints(root: Path) -> dict[str, str]:
    return {
        name: options["ray_actor_options"]["runtime_env"]["env_vars"][FINGERPRINT]
        for name, options in options_of(root).items()
        if name != INGRESS
    }


def resources(root: Path, name: str) -> tuple[float, float]:
    actor = options_of(root)[name]["ray_actor_options"]
    return actor["num_cpus"], actor["num_gpus"]


def test_each_model_that_is_no_part_of_another_has_a_deployment_behind_the_ingress(tiny_repository, tmp_path):
    for folder in tiny_repository.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    add_model(tmp_path, "alone")
    add_model(tmp_path, "step")
    add_ensemble(tmp_path, "whole", "step")
    assert list(options_of(tmp_path)) == [INGRESS, "alone", "tiny", "whole"]


def test_a_generation_model_asks_for_the_cores_of_this_machine(tiny_repository):
    assert options_of(tiny_repository)["tiny"]["ray_actor_options"]["num_cpus"] == default_threads()


def test_a_range_of_replicas_is_scaled_by_the_policy_and_a_number_is_fixed(tiny_repository):
    fixed = options_of(tiny_repository, scale=Scale(min_replicas=2, max_replicas=2))["tiny"]
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    scaled = options_of(tiny_repository, scale=Scale(min_replicas=1, max_replicas=3))["tiny"]
    assert "num_replicas" not in scaled
    scaling = scaled["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 3)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", (1, 0)),
        ("instance_group [ { count: 3 kind: KIND_CPU } ]", (3, 0)),
        ("instance_group [ { kind: KIND_GPU } ]", (1, 1)),
        ("instance_group [ { kind: KIND_GPU gpus: [ 2, 5 ] }, { kind: KIND_GPU gpus: [ 2 ] } ]", (1, 2)),
        ("instance_group [ { count: 2 kind: KIND_AUTO } ]", (2, 0)),
    ],
)
def test_instance_groups_become_resources(tmp_path, groups, expected):
    add_model(tmp_path, "m", groups)
    assert resources(tmp_path, "m") == expected


def test_the_models_of_an_ensemble_share_the_gpus_of_a_replica(tmp_path):
    add_model(tmp_path, "a", "instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]")
    add_model(tmp_path, "b", "instance_group [ { kind: KIND_GPU gpus: [ 1, 2 ] } ]")
    add_ensemble(tmp_path, "whole", "a", "b")
    assert resources(tmp_path, "whole") == (1, 2)


def test_threads_of_an_instance_are_cpus(tmp_path):
    parameters = 'parameters { key: "intra_op_thread_count" value { string_value: "4" } }'
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        f'backend: "onnxruntime"\ninstance_group [ {{ count: 2 kind: KIND_CPU }} ]\n{parameters}'
    )
    assert resources(tmp_path, "m") == (8, 0)


def test_a_new_version_changes_the_fingerprint_of_its_model_alone(tmp_path):
    add_model(tmp_path, "a")
    add_model(tmp_path, "b")
    before = fingerprints(tmp_path)
    add_model(tmp_path, "b", version=2)
    after = fingerprints(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"b"}


def test_a_step_belongs_to_the_fingerprint_of_its_ensemble(tmp_path):
    add_model(tmp_path, "step")
    add_ensemble(tmp_path, "whole", "step")
    before = fingerprints(tmp_path)
    assert list(before) == ["whole"]
    (tmp_path / "step" / "1" / "weights.bin").write_bytes(b"new")
    assert fingerprints(tmp_path)["whole"] != before["whole"]


def test_models_that_code_calls_run_in_its_replicas(tmp_path):
    add_model(tmp_path, "caller", "instance_group [ { count: 1 } ]")
    add_model(tmp_path, "called", "instance_group [ { count: 2 } ]")
    [model] = find_models([tmp_path], needed={"caller": ["called"]})
    assert (model.name, [part.name for part in model.parts]) == ("caller", ["called"])


def test_fingerprints_replace_those_of_a_file_and_nothing_else(tmp_path):
    add_model(tmp_path, "m")
    models = find_models([tmp_path])
    env = {"env_vars": {FINGERPRINT: "old", "OTHER": "kept"}}
    options = {"name": "m", "num_replicas": 5, "ray_actor_options": {"num_cpus": 3, "runtime_env": env}}
    other = {"name": "another", "import_path": "other:app"}
    config = {"applications": [other, {"name": "app", "deployments": [options]}]}
    changed = with_fingerprints(config, models, application="app")
    assert changed["applications"][0] == other
    [model] = changed["applications"][1]["deployments"]
    assert model["ray_actor_options"]["runtime_env"]["env_vars"] == {
        FINGERPRINT: models[0].fingerprint, "OTHER": "kept"
    }
    assert (model["num_replicas"], model["ray_actor_options"]["num_cpus"]) == (5, 3)


def test_a_local_cluster_has_cpus_for_all_replicas_and_one_more_of_each(tmp_path):
    add_model(tmp_path, "m", "instance_group [ { count: 3 kind: KIND_CPU } ]")
    scaled = {"name": "scaled", "autoscaling_config": {"max_replicas": 4}}
    deployments = [*options_of(tmp_path).values(), scaled]
    assert num_cpus({"applications": [{"deployments": deployments}]}) == 2 * 1 + 2 * 3 + 5 * 1


def test_a_model_that_does_not_exist_is_rejected_with_the_closest_name(tmp_path):
    add_model(tmp_path, "resnet")
    with pytest.raises(RepositoryError, match="'resnett'") as caught:
        find_models([tmp_path], ["resnett"])
    assert "resnet?" in caught.value.remedy


def test_a_repository_without_models_is_rejected(tmp_path):
    with pytest.raises(RepositoryError, match="no model in"):
        find_models([tmp_path])


def test_a_broken_model_is_rejected_at_its_line(tmp_path):
    folder = add_model(tmp_path, "m", "max_batch_size: -1")
    with pytest.raises(RepositoryError, match=rf"{folder}/config.pbtxt:2:1: "):
        find_models([tmp_path])


def test_a_model_without_versions_is_rejected(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(RepositoryError, match="no version folder"):
        find_models([tmp_path])


def test_a_model_cannot_have_the_name_of_the_ingress(tmp_path):
    add_model(tmp_path, INGRESS)
    with pytest.raises(RepositoryError, match="name of the ingress"):
        find_models([tmp_path])
