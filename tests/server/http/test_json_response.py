from __future__ import annotations

import orjson
import pytest

from genserve.server.dialects.generation_handler import json_bytes


@pytest.mark.parametrize(
    "document",
    [{}, [], [{"a": 1}], {"a": [{"b": [1, 2]}, {"c": "é"}], "d": [], "e": None, "f": [1.5, 2]}, "x"],
    ids=str,
)
@pytest.mark.parametrize("repeat", [1, 3000])
def test_the_parts_of_a_document_are_those_of_orjson(document, repeat):
    for whole in (document, [document] * repeat, {"a": [document] * repeat}):
        assert json_bytes(whole) == orjson.dumps(whole)
