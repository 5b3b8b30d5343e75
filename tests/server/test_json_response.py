from __future__ import annotations

import orjson
import pytest

from genserve.server.json_response import json_bytes


@pytest.mark.parametrize(
    "document",
    [{}, [], [{"a": 1}], {"a": [{"b": [1, 2]}, {"c": "é"}], "d": [], "e": None, "f": [1.5, 2]}, "x"],
    ids=str,
)
def test_the_parts_of_a_document_are_those_of_orjson(document):
    assert json_bytes(document) == orjson.dumps(document)
