from __future__ import annotations

import json

import pytest

from genserve.errors import InvalidRequest
from genserve.server.http.request_body import (
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_VALUES,
    check_num_values,
    parse_json,
)


def keys(count: int) -> bytes:
    return of(**dict.fromkeys(map(str, range(count)), 1))


def of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("largest", "too_large", "limit"),
    [
        (of(a=[1] * (MAX_VALUES - 1)), of(a=[1] * MAX_VALUES), MAX_VALUES),
        (of(a=["x"] * (MAX_VALUES - 1)), of(a=["x"] * MAX_VALUES), MAX_VALUES),
        (of(a=[[]] * (MAX_CONTAINERS - 2)), of(a=[[]] * (MAX_CONTAINERS - 1)), MAX_CONTAINERS),
        (of(a=[{}] * (MAX_CONTAINERS - 2)), of(a=[{}] * (MAX_CONTAINERS - 1)), MAX_CONTAINERS),
        (keys(MAX_KEYS), keys(MAX_KEYS + 1), MAX_KEYS),
    ],
    ids=["numbers", "strings", "lists", "objects", "keys"],
)
def test_a_body_has_so_many_values_and_no_more(largest, too_large, limit):
    assert parse_json(largest) == json.loads(largest)
    with pytest.raises(InvalidRequest, match=rf"\b{limit}\b"):
        parse_json(too_large)


@pytest.mark.parametrize("text", ["[1,{", '"[', "\\", '\\"[,', '"', "\\\\", '\\\\"'], ids=ascii)
def test_what_is_in_a_string_does_not_count(text):
    body = of(prompt=text * MAX_VALUES)
    assert parse_json(body) == {"prompt": text * MAX_VALUES}


def test_invalid_json_is_counted_too():
    with pytest.raises(InvalidRequest, match=str(MAX_CONTAINERS)):
        check_num_values(b'{"a": ' + b"[" * MAX_CONTAINERS)
    with pytest.raises(InvalidRequest, match=str(MAX_VALUES)):
        check_num_values(b'"' * (2 * MAX_VALUES + 2))
