from __future__ import annotations

import json
from pathlib import Path

from genserve.errors import RepositoryError
from tests.support.command_line import Ended, invoke


def add_model(repository: Path, name: str, *, config: str = "") -> Path:
    """Write a decoder stage that is valid except for what `config` adds."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("class TritonPythonModel: pass")
    file = folder / "config.pbtxt"
    file.write_text(f'backend: "python"\n{config}')
    return file


def run(*repositories: Path, flags: tuple[str, ...] = ()) -> Ended:
    roots = [word for repository in repositories for word in ("--model-repository", str(repository))]
    return invoke(["check", *roots, *flags])


def test_every_diagnostic_is_listed_by_model_with_its_place_and_remedy(tmp_path: Path) -> None:
    b = add_model(tmp_path, "b", config="max_batch_size: -1\nruntime: \"a\"")
    add_model(tmp_path, "fine")
    a = add_model(tmp_path, "a", config='name: "x"')
    ran = run(tmp_path)
    assert ran.stdout == (
        "a\n"
        f"{a}:2:1: error: unexpected directory name 'a' for model 'x', directory name must equal model name\n"
        "  remedy: give both the same name, or leave `name` out\n"
        "\n"
        "b\n"
        f"{b}:2:1: error: 'max_batch_size' must be non-negative value for b\n"
        "  remedy: write 0 for a model that does not batch, or the largest batch size\n"
        f"{b}:3:1: warning: runtime is ignored: the backend's own runtime is used\n"
        "  remedy: leave it out\n"
        "\n"
        "3 models: 2 errors, 1 warning\n"
    )
    assert ran.exit_code == 1


def test_a_clean_repository_is_one_line(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    ran = run(tmp_path)
    assert (ran.stdout, ran.exit_code) == ("1 model: 0 errors, 0 warnings\n", 0)


def test_a_folder_without_models_is_an_error(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.exit_code == 1
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"error[{RepositoryError.code}]")
    assert str(tmp_path) in ran.error


def test_warnings_fail_with_strict_only(tmp_path: Path) -> None:
    add_model(tmp_path, "a", config='runtime: "a"')
    assert run(tmp_path).exit_code == 0
    assert run(tmp_path, flags=("--strict",)).exit_code == 1


def test_json_has_the_counts_and_an_object_for_each_diagnostic(tmp_path: Path) -> None:
    file = add_model(tmp_path, "a", config='runtime: "a"')
    (tmp_path / "a" / "1" / "model.py").unlink()
    ran = run(tmp_path, flags=("--json",))
    document = json.loads(ran.stdout)
    assert (document["models"], document["num_errors"], document["num_warnings"]) == (["a"], 1, 1)
    assert document["diagnostics"] == [
        {
            "model": "a",
            "severity": "warning",
            "path": str(file),
            "line": 2,
            "column": 1,
            "message": "runtime is ignored: the backend's own runtime is used",
            "remedy": "leave it out",
        },
        {
            "model": "a",
            "severity": "error",
            "path": str(file.parent / "1"),
            "line": None,
            "column": None,
            "message": "model.py is missing",
            "remedy": "add the file; `genserve pull` and `genserve export` make those of exported models",
        },
    ]
    assert ran.exit_code == 1


def test_a_repository_may_be_an_argument(tmp_path: Path) -> None:
    add_model(tmp_path / "one", "a")
    add_model(tmp_path / "two", "b")
    ran = invoke(["check", str(tmp_path / "one"), str(tmp_path / "two")])
    assert ran.stdout == "2 models: 0 errors, 0 warnings\n"


def test_flags_for_configs_and_backends_are_those_of_serve(tmp_path: Path) -> None:
    (tmp_path / "backends" / "mine").mkdir(parents=True)
    (tmp_path / "backends" / "mine" / "model.py").touch()
    file = add_model(tmp_path / "r", "a")
    (file.parent / "configs").mkdir()
    (file.parent / "configs" / "big.pbtxt").write_text('backend: "mine"')
    assert run(tmp_path / "r").exit_code == 0
    assert run(tmp_path / "r", flags=("--model-config-name", "big")).exit_code == 1
    flags = ("--model-config-name", "big", "--backend-directory", str(tmp_path / "backends"))
    assert run(tmp_path / "r", flags=flags).exit_code == 0


def test_several_repositories_are_checked_as_one(tmp_path: Path) -> None:
    add_model(tmp_path / "one", "a")
    add_model(tmp_path / "two", "b")
    assert run(tmp_path / "one", tmp_path / "two").stdout == "2 models: 0 errors, 0 warnings\n"


def test_control_characters_in_files_are_escaped(tmp_path: Path) -> None:
    add_model(tmp_path, "\x1b[2J")
    add_model(tmp_path, "m", config='runtime: "\x1b[2J"')
    stdout = run(tmp_path).stdout
    assert "rename it" in stdout
    assert "runtime" in stdout
    assert "\x1b" not in stdout
