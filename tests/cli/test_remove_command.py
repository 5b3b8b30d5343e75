from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from genserve.cli.local_models import local_models
from genserve.cli.main import main
from genserve.errors import InvalidRequest, ModelNotFound
from tests.cli.terminal import ENTER, Terminal
from tests.cli.test_model_choice import add_model
from tests.support.command_line import invoke


def remove(repository: Path, *words: str) -> str:
    """Remove models; return the error, empty: there is none."""
    return invoke(["remove", *words, "--model-repository", str(repository)]).error


def folders(repository: Path) -> list[str]:
    return sorted(path.name for path in repository.iterdir())


def test_a_model_goes_with_its_stages(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    add_model(tmp_path, "b")
    assert remove(tmp_path, "a", "--yes") == ""
    assert folders(tmp_path) == ["b", "b_decoder", "b_logits", "b_tokenizer"]
    assert [model.missing for model in local_models(tmp_path)] == [()]


def test_a_stage_that_another_model_uses_stays(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    config = (tmp_path / "a" / "config.pbtxt").read_text()
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "config.pbtxt").write_text(config.replace('name: "a"', 'name: "twin"', 1))
    assert remove(tmp_path, "a", "--yes") == ""
    assert folders(tmp_path) == ["a_decoder", "a_logits", "a_tokenizer", "twin"]
    error = remove(tmp_path, "a_logits", "--yes")
    assert error.startswith(f"error[{InvalidRequest.code}]")
    assert f"remedy: `genserve remove twin --model-repository {tmp_path}`" in error
    assert remove(tmp_path, "a_logits", "twin", "--yes") == ""
    assert folders(tmp_path) == []


def test_an_unknown_model_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    add_model(tmp_path, "mine")
    error = remove(tmp_path, "mime", "--yes")
    assert error.startswith(f"error[{ModelNotFound.code}]")
    assert error.endswith("did you mean mine?")


def test_without_a_terminal_it_needs_yes(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    assert remove(tmp_path, "a").startswith(f"error[{InvalidRequest.code}]")
    assert len(folders(tmp_path)) == 4


def test_a_linked_model_is_unlinked(tmp_path: Path) -> None:
    add_model(tmp_path / "elsewhere", "a")
    models = tmp_path / "models"
    models.mkdir()
    for folder in (tmp_path / "elsewhere").iterdir():
        (models / folder.name).symlink_to(folder)
    assert remove(models, "a", "--yes") == ""
    assert (folders(models), len(folders(tmp_path / "elsewhere"))) == ([], 4)


def test_a_terminal_is_asked(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "a")
    words = ("remove", "a", "--model-repository", str(tmp_path / "models"))
    for typed, code, left in (("n", 1, 4), ("y", 0, 0)):
        with Terminal("genserve", *words, home=tmp_path) as terminal:
            terminal.expect("delete a, a_tokenizer, a_logits, a_decoder (0.0 MB) from")
            terminal.type(typed + ENTER)
            assert terminal.wait() == code
        assert len(folders(tmp_path / "models")) == left


def test_ctrl_c_at_the_question_removes_nothing_and_exits_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(tmp_path, "a")
    master, slave = pty.openpty()
    monkeypatch.setattr("sys.argv", ["genserve", "remove", "a", "--model-repository", str(tmp_path)])
    monkeypatch.setattr("builtins.input", _interrupted)
    with open(slave) as terminal:  # noqa: PTH123  # a descriptor
        monkeypatch.setattr("sys.stdin", terminal)
        with pytest.raises(SystemExit) as end:
            main()
    os.close(master)
    assert (end.value.code, len(folders(tmp_path))) == (130, 4)


def _interrupted(_question: str) -> str:
    raise KeyboardInterrupt
