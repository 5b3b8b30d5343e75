from __future__ import annotations

from typing import Any

import pytest

from genserve.server.response_store import ResponseNotFound, ResponseStore


def item(item_id: str, *, num_chars: int = 1) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "text": "x" * num_chars}


Items = tuple[dict[str, Any], ...]


def add(store: ResponseStore, name: str, *, num_chars: int = 1, earlier: Items = ()) -> None:
    response = {"id": name, "output": [item(f"out_{name}", num_chars=num_chars)]}
    store.add(response, inputs=[*earlier, item(f"in_{name}")], num_earlier=len(earlier))


def is_stored(store: ResponseStore, name: str) -> bool:
    try:
        store.get(name)
    except ResponseNotFound:
        return False
    return True


def size_of_one() -> int:
    store = ResponseStore(max_bytes=10**6)
    add(store, "a")
    return store.num_bytes


def test_the_least_recently_used_response_is_evicted():
    store = ResponseStore(max_bytes=2 * size_of_one())
    add(store, "a")
    add(store, "b")
    store.get("a")
    add(store, "c")
    assert len(store) == 2
    assert [is_stored(store, name) for name in "abc"] == [True, False, True]


def test_the_store_never_exceeds_its_size():
    store = ResponseStore(max_bytes=10_000)
    for number in range(50):
        add(store, str(number), num_chars=97 * number % 4000)
        assert store.num_bytes <= 10_000
    assert 1 < len(store) < 10, "many small ones and few large ones"
    for name in [str(number) for number in range(50) if is_stored(store, str(number))]:
        store.delete(name)
    assert (store.num_bytes, len(store)) == (0, 0)


def test_a_response_larger_than_the_store_evicts_nothing():
    store = ResponseStore(max_bytes=5000)
    add(store, "a")
    add(store, "b", num_chars=5000)
    assert is_stored(store, "a")
    assert not is_stored(store, "b")


def test_a_conversation_does_not_depend_on_its_earlier_responses():
    store = ResponseStore(max_bytes=10_000)
    add(store, "a")
    add(store, "b", earlier=tuple(store.get("a").items()))
    store.delete("a")
    assert [one["id"] for one in store.get("b").items()] == ["in_a", "out_a", "in_b", "out_b"]


def test_items_are_found_while_their_response_is_stored():
    store = ResponseStore(max_bytes=10_000)
    add(store, "a")
    add(store, "b", earlier=tuple(store.get("a").items()))
    assert store.item("out_a") == item("out_a")
    assert store.item("in_b") == item("in_b")
    store.delete("a")
    with pytest.raises(ResponseNotFound, match="out_a"):
        store.item("out_a")
