from __future__ import annotations

import json
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.server.kserve import number_lists
from genserve.server.kserve.number_lists import NotNumbersError, cut_lists, read_numbers, write_list

NUMBERS = st.one_of(st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False))
ROWS = st.lists(NUMBERS, min_size=1, max_size=4)
NESTED = st.lists(NUMBERS | ROWS | st.lists(ROWS, min_size=1, max_size=3), min_size=4, max_size=12)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n ", ":\t")])


@pytest.fixture(autouse=True, scope="module")
def _short_slices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_lists, "SLICE_BYTES", 40)
        patch.setattr(number_lists, "SLICE_ELEMENTS", 7)
        yield


def flat(values: list[Any]) -> list[Any]:
    return list(chain.from_iterable(flat(value) if isinstance(value, list) else [value] for value in values))


def read(text: bytes) -> list[Any]:
    return list(read_numbers(memoryview(text), lambda values, _: np.array(values, dtype=object)))


@given(NESTED, SPACES)
def test_a_list_is_read_as_a_whole_parser_does(values, spaces):
    text = json.dumps(values, separators=spaces).encode()
    assert read(text) == flat(values)


@given(NESTED, SPACES, st.data())
def test_a_damaged_list_is_read_only_if_it_is_json(values, spaces, data):
    text = bytearray(json.dumps(values, separators=spaces).encode())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(1, len(text) - 1))
        change = data.draw(st.sampled_from([b"", b"[", b"]", b",", b"1"]))
        text[place : place + data.draw(st.integers(0, 1))] = change
    try:
        expected = flat(orjson.loads(bytes(text)))
    except orjson.JSONDecodeError:
        with pytest.raises(NotNumbersError):
            read(bytes(text))
        return
    try:
        assert read(bytes(text)) == expected
    except NotNumbersError:     # the whole parser reads it then
        assert [] in list(sublists(orjson.loads(bytes(text))))


def sublists(values: list[Any]):
    yield values
    for value in values:
        if isinstance(value, list):
            yield from sublists(value)


@given(st.lists(NESTED, max_size=3), st.text(), SPACES)
def test_a_document_with_its_lists_in_place_of_their_markers_is_the_same(lists, text, spaces):
    inputs = [{"name": text, "data": values, "shape": [1]} for values in lists]
    document = {"id": '"data": [1, 2]', "inputs": inputs, "data": [text]}
    source = json.dumps(document, separators=spaces).encode()
    cut = cut_lists(source)
    rest = orjson.loads(bytes(cut.text))
    for entry in rest["inputs"]:
        if (marker := str(entry["data"][0])) in cut.lists:
            entry["data"] = orjson.loads(cut.lists[marker])
    assert rest == document


@given(st.lists(NUMBERS), st.lists(st.text()))
def test_a_list_is_written_as_a_whole(numbers, texts):
    assert write_list(numbers) == orjson.dumps(numbers)
    assert write_list(texts) == orjson.dumps(texts)
    array = np.array(numbers, dtype=np.float64)
    assert write_list(array) == orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
