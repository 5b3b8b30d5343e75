from __future__ import annotations

import os
from pathlib import Path

import pytest

from genserve.config.model_config import AllVersions, LatestVersions, ModelConfig, SpecificVersions
from genserve.errors import RepositoryError
from genserve.repository.index import fingerprint, scan, served_versions


@pytest.mark.parametrize(
    ("policy", "there", "served"),
    [
        (LatestVersions(count=1), (1, 3, 10), (10,)),
        (LatestVersions(count=2), (10, 1, 3), (3, 10)),
        (LatestVersions(count=5), (1, 3), (1, 3)),
        (AllVersions(), (3, 1), (1, 3)),
        (SpecificVersions(versions=(3, 7, 1)), (1, 2, 3), (1, 3)),
    ],
)
def test_a_version_policy_chooses_among_the_versions_that_are_there(policy, there, served):
    assert served_versions(ModelConfig(name="m", version_policy=policy), there) == served


@pytest.mark.parametrize(
    ("policy", "there"),
    [
        (LatestVersions(count=1), ()),
        (LatestVersions(count=0), (1,)),
        (AllVersions(), ()),
        (SpecificVersions(versions=(7,)), (1, 2)),
        (SpecificVersions(versions=()), (1, 2)),
    ],
)
def test_a_policy_that_leaves_no_version_is_refused_in_tritons_words(policy, there):
    with pytest.raises(RepositoryError) as raised:
        served_versions(ModelConfig(name="m", version_policy=policy), there)
    assert raised.value.message == (
        "at least one version must be available under the version policy of model 'm'"
    )
    assert raised.value.remedy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "m" / "1" / "model.py").write_text("a = 1")
    return tmp_path / "m"


def touch(path: Path) -> None:
    """Change the time of a file, and nothing else."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: touch(model / "config.pbtxt"),
        lambda model: touch(model / "1" / "model.py"),
        lambda model: (model / "2").mkdir(),
        lambda model: (model / "1" / "helper.py").touch(),
        lambda model: (model / "1" / "model.py").unlink(),
        lambda model: (model / "1").rename(model / "3"),
        lambda model: (model / "labels.txt").write_text("a"),
    ],
)
def test_a_change_of_a_model_is_seen(model, change):
    before = fingerprint(model)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_caches_and_hidden_files_are_no_change(model):
    before = fingerprint(model)
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.cpython-311.pyc").touch()
    (model / "1" / "model.pyc").touch()
    (model / "1" / ".model.py.swp").touch()
    (model / ".git").mkdir()
    assert fingerprint(model) == before


def test_a_link_to_nowhere_is_part_of_a_model(model):
    (model / "1" / "weights").symlink_to(model / "nowhere")
    assert ("1/weights", 0, -1) in fingerprint(model)


def test_a_model_without_a_config_is_listed(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.pt").touch()
    [entry] = scan([tmp_path]).values()
    assert entry.config is not None
    assert entry.config.backend == "pytorch"
    assert entry.error is None


def test_the_models_of_all_roots_are_listed(tmp_path):
    for root, name in (("one", "b"), ("two", "a")):
        (tmp_path / root / name).mkdir(parents=True)
    assert list(scan([tmp_path / "one", tmp_path / "two"])) == ["a", "b"]


def test_a_model_given_in_place_of_its_repository_is_told_from_one(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text("")
    with pytest.raises(RepositoryError, match="m is a model, not a repository") as caught:
        scan([tmp_path / "m"])
    assert caught.value.remedy == f"give the folder that it lies in: {tmp_path}"
    assert list(scan([tmp_path])) == ["m"]


def test_a_stray_config_beside_models_is_passed_over(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "config.pbtxt").write_text("")
    assert list(scan([tmp_path])) == ["m"]
