from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.routing.prefix_router import PrefixRouter
from genserve.engine.prefix_cache import block_key, root_key

BLOCK = 4
IDLE = ReplicaLoad()


def keys_of(text: str) -> list[bytes]:
    """The keys of a prompt whose blocks each consist of one letter."""
    keys = [root_key(None)]
    for letter in text:
        keys.append(block_key(keys[-1], [ord(letter)] * BLOCK))
    return keys[1:]


def router(**options) -> PrefixRouter[str]:
    return PrefixRouter(BLOCK, **{"num_blocks": 100, "new_weight": 1.0, "decode_tokens": 10.0} | options)


def test_a_prompt_goes_where_most_of_its_beginning_is_cached():
    prefix = router()
    prefix.routed("a", keys_of("xy"))
    prefix.routed("b", keys_of("xyz"))
    idle = {"a": IDLE, "b": IDLE, "c": IDLE}
    assert prefix.cached_tokens(keys_of("xyzw"), idle) == {"a": 8, "b": 12, "c": 0}
    assert prefix.rank(keys_of("xyzw"), idle) == ["b", "a", "c"]


def test_equal_blocks_behind_another_beginning_are_not_the_same():
    prefix = router()
    prefix.routed("a", keys_of("xyz"))
    assert prefix.cached_tokens(keys_of("wyz"), ["a"]) == {"a": 0}


def test_a_prefix_attracts_its_prompts_until_the_queue_is_longer():
    prefix = router(decode_tokens=0.0)
    prompt = keys_of("x" * 10)
    prefix.routed("a", prompt)
    assert prefix.choose(prompt, {"a": ReplicaLoad(waiting_tokens=39), "b": IDLE}) == "a"
    assert prefix.choose(prompt, {"a": ReplicaLoad(waiting_tokens=41), "b": IDLE}) == "b"


def test_computing_a_prefix_twice_costs_more_than_waiting_for_it():
    prefix = router(new_weight=2.0, decode_tokens=0.0)
    prompt = keys_of("x" * 10)
    prefix.routed("a", prompt)
    assert prefix.choose(prompt, {"a": ReplicaLoad(waiting_tokens=79), "b": IDLE}) == "a"
    assert prefix.choose(prompt, {"a": ReplicaLoad(waiting_tokens=81), "b": IDLE}) == "b"


def test_running_sequences_count_as_tokens():
    prefix = router()
    prompt = keys_of("x" * 10)
    prefix.routed("a", prompt)
    assert prefix.choose(prompt, {"a": ReplicaLoad(running=3), "b": IDLE}) == "a"
    assert prefix.choose(prompt, {"a": ReplicaLoad(running=3, waiting=2), "b": IDLE}) == "b"


def test_a_full_cache_repels_prompts_that_need_new_blocks():
    prefix = router()
    loads = {"a": ReplicaLoad(kv_usage=0.99), "b": ReplicaLoad(kv_usage=0.5, running=1)}
    prefix.routed("a", keys_of("x" * 20))
    assert prefix.choose(keys_of("x" * 20), loads) == "a"
    assert prefix.choose(keys_of("y"), loads) == "a"
    assert prefix.choose(keys_of("x" * 20 + "y" * 3), loads) == "a"
    assert prefix.choose(keys_of("y" * 20), loads) == "b"


def test_unknown_prompts_are_spread_over_idle_replicas():
    prefix = router()
    idle = dict.fromkeys("abc", IDLE)
    chosen = []
    for letter in "stuvwx":
        chosen.append(prefix.choose(keys_of(letter), idle))
        prefix.routed(chosen[-1], keys_of(letter))
    assert sorted(chosen) == list("aabbcc")


def test_the_least_recently_used_keys_are_forgotten_beyond_the_blocks_of_a_replica():
    prefix = router(num_blocks=4)
    prefix.routed("a", keys_of("xy"))
    prefix.routed("a", keys_of("uv"))
    prefix.routed("a", keys_of("xy"))
    prefix.routed("a", keys_of("w"))
    assert prefix.cached_tokens(keys_of("xy"), ["a"]) == {"a": 8}
    assert prefix.cached_tokens(keys_of("uv"), ["a"]) == {"a": 4}, "the last block goes first"


def test_a_replica_remembers_as_many_keys_as_its_own_cache_has_blocks():
    prefix = router(num_blocks=4)
    for replica, num_blocks in (("a", 0), ("b", 2), ("c", 9)):
        prefix.routed(replica, keys_of("uvwxyz"), num_blocks=num_blocks)
    assert prefix.cached_tokens(keys_of("uvwxyz"), "abc") == {"a": 16, "b": 8, "c": 24}
    loads = {name: ReplicaLoad(kv_usage=0.5, num_blocks=n) for name, n in (("d", 10), ("e", 1000))}
    assert prefix.choose(keys_of("y" * 20), loads) == "e"


def test_a_forgotten_replica_has_nothing_and_leaves_the_others_alone():
    prefix = router()
    for replica in "abc":
        prefix.routed(replica, keys_of("xy"))
    prefix.forget("b")
    prefix.forget("unknown")
    assert prefix.cached_tokens(keys_of("xy"), "abc") == {"a": 8, "b": 0, "c": 8}
    prefix.routed("d", keys_of("x"))
    assert prefix.cached_tokens(keys_of("xy"), "abcd") == {"a": 8, "b": 0, "c": 8, "d": 4}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.text("xy", max_size=6), st.booleans()), max_size=30))
def test_the_index_agrees_with_sets_of_recent_keys(operations):
    """With room for every key, a replica has exactly the prefixes that it was sent since it was forgotten."""
    prefix = router(num_blocks=1000)
    sent: dict[str, set[bytes]] = {replica: set() for replica in "abcd"}
    for replica, text, ends in operations:
        if ends:
            prefix.forget(replica)
            sent[replica] = set()
        else:
            prefix.routed(replica, keys_of(text))
            sent[replica].update(keys_of(text))
        keys = keys_of(text + "xy")
        expected = {
            other: BLOCK * next((i for i, key in enumerate(keys) if key not in known), len(keys))
            for other, known in sent.items()
        }
        assert prefix.cached_tokens(keys, "abcd") == expected


LOADS = st.builds(ReplicaLoad, running=st.integers(0, 9), waiting_tokens=st.integers(0, 999))


@given(st.lists(LOADS, min_size=1))
def test_without_cached_blocks_more_work_is_never_preferred(loads):
    ranked = router().rank(keys_of("xyz"), dict(enumerate(loads)))
    assert sorted(ranked) == list(range(len(loads)))
    work = [loads[index].waiting_tokens + 10 * loads[index].running for index in ranked]
    missing = [loads[index].waiting_tokens + 3 * BLOCK > 400 for index in ranked]
    assert all(one <= other or full for (one, other), full in zip(pairwise(work), missing[1:], strict=True))
