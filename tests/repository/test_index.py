from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from genserve.config.diagnostics import Severity
from genserve.config.model_config import AllVersions, LatestVersions, ModelConfig, SpecificVersions
from genserve.errors import RepositoryError
from genserve.repository.index import fingerprint, links_out, scan, served_versions


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
def test_a_version_policy_selects_from_the_existing_versions(policy, there, served):
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
def test_a_policy_without_any_version_is_rejected_with_tritons_message(policy, there):
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
def test_a_change_of_a_model_changes_its_fingerprint(model, change):
    before = fingerprint(model)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_caches_and_hidden_files_do_not_change_the_fingerprint(model):
    before = fingerprint(model)
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.cpython-311.pyc").touch()
    (model / "1" / "model.pyc").touch()
    (model / "1" / ".model.py.swp").touch()
    (model / ".git").mkdir()
    assert fingerprint(model) == before


def test_a_broken_link_is_part_of_the_fingerprint(model):
    (model / "1" / "weights").symlink_to(model / "nowhere")
    assert ("1/weights", 0, -1) in fingerprint(model)


def test_a_model_without_a_config_is_listed(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.pt").touch()
    [entry] = scan([tmp_path]).values()
    assert entry.config is not None
    assert entry.config.backend == "pytorch"
    assert entry.parsed.diagnostics == ()


def test_the_models_of_all_roots_are_listed(tmp_path):
    for root, name in (("one", "b"), ("two", "a")):
        (tmp_path / root / name).mkdir(parents=True)
    assert list(scan([tmp_path / "one", tmp_path / "two"])) == ["a", "b"]


def test_a_model_folder_is_not_accepted_as_a_repository(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text("")
    with pytest.raises(RepositoryError) as caught:
        scan([tmp_path / "m"])
    assert caught.value.remedy == f"give the folder that contains it: {tmp_path}"
    assert list(scan([tmp_path])) == ["m"]


def test_a_stray_config_next_to_models_is_ignored(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "config.pbtxt").write_text("")
    assert list(scan([tmp_path])) == ["m"]


@pytest.fixture
def linked(tmp_path: Path, model: Path) -> Path:
    """A repository whose `m` is outside: its version folder, and a file in it, are links to there."""
    root = tmp_path / "repository"
    (root / "m").mkdir(parents=True)
    (root / "m" / "1").symlink_to(model / "1")
    (root / "m" / "2").mkdir()
    (root / "m" / "2" / "model.py").symlink_to(model / "1" / "model.py")
    return root


def test_links_are_followed_wherever_they_lead(linked: Path, model: Path):
    (linked / "n").symlink_to(model)
    entries = scan([linked])
    assert {name: entry.versions for name, entry in entries.items()} == {"m": (1, 2), "n": (1,)}
    assert not any(entry.parsed.diagnostics for entry in entries.values())


def test_with_strict_paths_a_model_with_links_outside_is_not_read(linked: Path, model: Path):
    (linked / "n").symlink_to(model)
    (linked / "o" / "1").mkdir(parents=True)
    (linked / "o" / "1" / "model.py").touch()
    (linked / "p").mkdir()
    (linked / "p" / "config.pbtxt").symlink_to(model / "config.pbtxt")
    entries = scan([linked], strict_paths=True)
    errors = {
        name: [each.path for each in entry.parsed.diagnostics if each.severity is Severity.ERROR]
        for name, entry in entries.items()
    }
    assert errors == {
        "m": [linked / "m" / "1"],
        "n": [linked / "n"],
        "o": [],
        "p": [linked / "p" / "config.pbtxt"],
    }
    assert entries["p"].config is None


@pytest.mark.parametrize(
    ("link", "target", "out"),
    [
        ("a", "{root}/m/1/model.py", []),
        ("a", "../m/1", []),
        ("a", "{root}/.data/1", []),
        ("a", "{other}/x", []),                 # leads into another repository
        ("a", "a", []),                         # leads round in circles
        ("a", "../m", []),
        ("a", "{root}/.data", ["a/out"]),       # leads out by way of another link
        ("a", "/etc", ["a"]),
        ("a", "../../nowhere", ["a"]),
        ("a", "{root}-beside", ["a"]),
        ("1/.hidden", "/etc/passwd", ["1/.hidden"]),
    ],
)
def test_links_to_outside_are_found(tmp_path: Path, link: str, target: str, out: list[str]):
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "m" / "1", root / ".data" / "1", other):
        folder.mkdir(parents=True)
    (root / "m" / "1" / "model.py").touch()
    (root / ".data" / "out").symlink_to("/etc")
    (root / "m" / link).symlink_to(target.format(root=root, other=other))
    found = links_out(root / "m", [root.resolve(), other.resolve()])
    assert [path.relative_to(root / "m").as_posix() for path in found] == out


def test_a_repository_that_is_a_link_itself_is_inside(tmp_path: Path, model: Path):
    (tmp_path / "link").symlink_to(model.parent)
    assert scan([tmp_path / "link"], strict_paths=True)["m"].parsed.diagnostics == ()


def test_a_changed_link_changes_the_fingerprint(linked: Path, model: Path):
    before = fingerprint(linked / "m")
    (linked / "m" / "1").unlink()
    (model / "3").mkdir()
    (linked / "m" / "1").symlink_to(model / "3")
    assert fingerprint(linked / "m") != before


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a\0b"])
def test_the_name_of_a_config_must_not_be_a_path(tmp_path: Path, name: str):
    with pytest.raises(RepositoryError, match=re.escape(repr(name))):
        scan([tmp_path], config_name=name)


def test_a_file_in_place_of_a_repository_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(RepositoryError, match=r"model\.onnx is a file, not a repository of models"):
        scan([tmp_path / "model.onnx"])
