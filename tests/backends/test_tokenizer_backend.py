"""The tokenizer stage as a model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.text import chat_template
from tests.support.live_server import children


def test_no_chat_template_process_is_left(tiny_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_TRAITS", {})  # or the load would start none
    before = children()
    repository = Repository([tiny_repository], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny_tokenizer"])
    assert children() - before
    repository.close()
    assert not children() - before
