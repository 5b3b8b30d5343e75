from __future__ import annotations

from typing import Any

import httpx2
import pytest

from genserve.errors import ResponseNotFound
from genserve.server.dialects.openai.response_store import ResponseStore
from tests.support.live_server import LiveServer


def item(item_id: str, *, num_chars: int = 1) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "text": "x" * num_chars}


Items = tuple[dict[str, Any], ...]


def add(
    store: ResponseStore, name: str, *, num_chars: int = 1, earlier: Items = (), key: str = ""
) -> None:
    response = {"id": name, "output": [item(f"out_{name}", num_chars=num_chars)]}
    store.add(response, inputs=[*earlier, item(f"in_{name}")], num_earlier=len(earlier), key=key)


def is_stored(store: ResponseStore, name: str, *, key: str = "") -> bool:
    try:
        store.get(name, key=key)
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


def test_a_key_that_floods_the_store_evicts_its_own_responses():
    store = ResponseStore(max_bytes=6 * size_of_one())
    for name in "abcdef":
        add(store, name, key="one")
    for number in range(100, 200):
        add(store, str(number), key="two")
        assert store.num_bytes <= store.max_bytes
    assert [is_stored(store, name, key="one") for name in "abcdef"] == 3 * [False] + 3 * [True]
    add(store, "g", key="one")      # beyond its half
    assert [is_stored(store, name, key="one") for name in "defg"] == [False, True, True, True]
    for name in "efg":
        store.delete(name, key="one")
    for number in range(200, 300):  # the rest is free again
        add(store, str(number), key="two")
    assert len(store) >= 5


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


def test_another_key_finds_neither_a_response_nor_its_items():
    store = ResponseStore(max_bytes=10_000)
    answer = {"id": "a", "output": [item("out")]}
    store.add(answer, inputs=[item("mine")], num_earlier=0, key="alice")
    num_bytes = store.num_bytes
    for key in ("", "bob"):
        for ask in (store.get, store.delete):
            with pytest.raises(ResponseNotFound):
                ask("a", key=key)
        for name in ("out", "mine"):
            with pytest.raises(ResponseNotFound):
                store.item(name, key=key)
    # Clients choose the ids of items.
    store.add({"id": "b", "output": []}, inputs=[item("mine", num_chars=9)], num_earlier=0, key="bob")
    assert store.item("mine", key="alice") == item("mine")
    store.delete("b", key="bob")
    assert store.item("mine", key="alice") == item("mine")
    assert store.num_bytes == num_bytes


def test_a_response_with_the_id_of_another_one_takes_its_place():
    store = ResponseStore(max_bytes=10_000)
    add(store, "a", num_chars=99)
    add(store, "a")
    assert (store.num_bytes, len(store)) == (size_of_one(), 1)


def test_a_stored_response_belongs_to_the_key_of_its_request(tiny_repository, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text('[alice]\nkey = "swordfish-1"\n[bob]\nkey = "swordfish-2"\n')
    keys.chmod(0o600)
    own, other = ({"authorization": f"Bearer swordfish-{number}"} for number in (1, 2))
    asked = {"input": [{"role": "user", "content": "a secret", "id": "msg_1"}], "max_output_tokens": 2}
    with LiveServer(tiny_repository, api_key_file=keys) as server, httpx2.Client(base_url=server.url) as http:

        def status(**body):
            return [
                http.post("/v1/responses", json=asked | body, headers=headers).status_code
                for headers in (own, other)
            ]

        answer = http.post("/v1/responses", json=asked, headers=own).json()
        url = f"/v1/responses/{answer['id']}"
        for path in (url, f"{url}/input_items"):
            assert [http.get(path, headers=one).status_code for one in (other, own)] == [404, 200]
        assert status(previous_response_id=answer["id"]) == [200, 400]
        for item_id in ("msg_1", answer["output"][0]["id"]):
            assert status(input=[{"type": "item_reference", "id": item_id}, *asked["input"]])[1] == 404
        assert status(input=[{"type": "item_reference", "id": "msg_1"}])[0] == 200
        assert [http.delete(url, headers=one).status_code for one in (other, own)] == [404, 200]
