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
    ("build", "largest", "limit"),
    [
        (lambda count: of(a=[1] * count), MAX_VALUES - 1, MAX_VALUES),
        (lambda count: of(a=["x"] * count), MAX_VALUES - 1, MAX_VALUES),
        (lambda count: of(a=[[]] * count), MAX_CONTAINERS - 2, MAX_CONTAINERS),
        (lambda count: of(a=[{}] * count), MAX_CONTAINERS - 2, MAX_CONTAINERS),
        (keys, MAX_KEYS, MAX_KEYS),
    ],
    ids=["numbers", "strings", "lists", "objects", "keys"],
)
def test_a_body_has_so_many_values_and_no_more(build, largest, limit):
    body = build(largest)
    assert parse_json(body) == json.loads(body)
    with pytest.raises(InvalidRequest, match=rf"\b{limit}\b"):
        parse_json(build(largest + 1))


@pytest.mark.parametrize("text", ["[1,{", '"[', "\\", '\\"[,', '"', "\\\\", '\\\\"'], ids=ascii)
def test_what_is_in_a_string_does_not_count(text):
    body = of(prompt=text * MAX_VALUES)
    assert parse_json(body) == {"prompt": text * MAX_VALUES}


def test_invalid_json_is_counted_too():
    with pytest.raises(InvalidRequest, match=str(MAX_CONTAINERS)):
        check_num_values(b'{"a": ' + b"[" * MAX_CONTAINERS)
    with pytest.raises(InvalidRequest, match=str(MAX_VALUES)):
        check_num_values(b'"' * (2 * MAX_VALUES + 2))
