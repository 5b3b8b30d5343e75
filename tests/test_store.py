from __future__ import annotations

from pathlib import Path

import pytest

from genserve import LLM
from genserve.cli.local_models import local_models
from genserve.errors import RepositoryError
from genserve.store import default_repository, described, display_path, repository_flag


def test_the_store_is_in_the_data_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GENSERVE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_repository() == tmp_path / "genserve" / "model_repository"


def test_genserve_home_is_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_HOME", "~/models")
    assert default_repository() == Path.home() / "models" / "model_repository"
    assert display_path(default_repository()) == "~/models/model_repository"
    assert described(default_repository()) == "the store (~/models/model_repository)"
    assert repository_flag(default_repository()) == ""


def test_another_repository_keeps_its_path_and_needs_its_flag() -> None:
    other = Path("/srv/models")
    assert (described(other), repository_flag(other)) == ("/srv/models", " --model-repository /srv/models")
    assert repository_flag(Path("/srv/my models")) == " --model-repository '/srv/my models'"


def test_a_home_folder_that_does_not_exist_is_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_HOME", "~nobody-has-this-name/models")
    assert local_models(default_repository()) == []


def test_llm_finds_the_store_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, tiny_repository: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("GENSERVE_HOME", str(tmp_path))
    with pytest.raises(RepositoryError, match="no model in the store") as caught:
        LLM("tiny")
    assert "`genserve pull smollm2`" in caught.value.remedy
    default_repository().symlink_to(tiny_repository)
    with LLM("tiny") as llm:
        assert llm.model == "tiny"
    monkeypatch.setenv("GENSERVE_MODEL_REPOSITORY", "/nowhere")
    with pytest.raises(RepositoryError, match="/nowhere"):
        LLM("tiny")
