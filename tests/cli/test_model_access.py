from __future__ import annotations

from pathlib import Path

import pytest

from genserve.cli.model_access import open_model
from genserve.errors import ModelNotFound
from tests.client.scripted_server import models_reply, scripted


def test_the_only_model_of_a_server_needs_no_name() -> None:
    reply = models_reply("a")
    with scripted(reply) as server, open_model(None, repository=Path("unused"), url=server.url) as opened:
        assert opened.name == "a"


def test_one_of_several_models_of_a_server_needs_its_name() -> None:
    reply = models_reply("a", "b")
    with scripted(reply, reply) as server:
        with open_model("b", repository=Path("unused"), url=server.url) as opened:
            assert opened.name == "b"
        with (
            pytest.raises(ModelNotFound, match="several") as caught,
            open_model(None, repository=Path("unused"), url=server.url),
        ):
            pass
    assert caught.value.remedy == "name one of: a, b"
