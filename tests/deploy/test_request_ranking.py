from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica.replica_load import LoadEstimates, ReplicaLoad, total_load
from genserve.deploy.replica_messages import Call
from genserve.deploy.routing.request_ranking import RequestRanking
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import InferenceError
from genserve.inference import InferenceRequest, RequestFlags
from genserve.sampling.sampling_params import SamplingParams

IDLE = ReplicaLoad(block_size=4, num_blocks=100)


def generation(*token_ids: int, **params) -> GenerationRequest:
    return GenerationRequest(
        model="m",
        prompt="",
        prompt_token_ids=token_ids,
        params=SamplingParams(**params),
        seeds=(0,),
    )


def of_sequence(correlation_id: int | str, flags: RequestFlags = RequestFlags.NONE) -> InferenceRequest:
    return InferenceRequest(model_name="m", inputs={}, correlation_id=correlation_id, flags=flags)


@pytest.fixture
def ranking() -> RequestRanking[str]:
    ranking = RequestRanking(decode_tokens=1.0)
    for replica in "abc":
        ranking.observe(replica, IDLE)
    return ranking


def test_a_generation_follows_its_prefix(ranking):
    ranking.sent(1, generation(*range(20)), "b")
    ranking.ended(1, "b")
    assert ranking.rank(generation(*range(20), 7), "abc")[0] == "b"
    assert ranking.rank(generation(*range(20), cache_salt="tenant"), "abc")[0] != "b"


def test_calls_that_come_together_count_at_once(ranking):
    chosen = []
    for number in range(30):
        call = generation(*range(number, number + 8))
        chosen.append(ranking.rank(call, "abc")[0])
        ranking.sent(number, call, chosen[-1])
    assert Counter(chosen) == {"a": 10, "b": 10, "c": 10}


def test_a_request_that_went_elsewhere_counts_there_only(ranking):
    ranking.sent(1, generation(*range(8)), "a")
    ranking.sent(1, generation(*range(8)), "b")
    ranking.ended(1, "a")
    assert ranking.rank(None, "abc") == ["c", "a", "b"], "the fewest blocks are first of two idle ones"
    ranking.ended(1, "b")
    assert ranking.rank(None, "bca")[0] == "c"


def test_statistics_replace_what_was_sent_before_them(ranking):
    ranking.sent(1, generation(*range(80)), "a")
    assert ranking.rank(generation(*range(80)), "ab")[0] == "a", "which computes the prefix already"
    ranking.observe("b", replace(IDLE, waiting_tokens=1000))
    assert ranking.rank(generation(*range(100, 120)), "ab")[0] == "a"
    ranking.observe("b", IDLE)
    ranking.observe("a", replace(IDLE, waiting_tokens=2000))
    assert ranking.rank(generation(*range(80)), "ab")[0] == "b"


def test_a_sequence_stays_with_its_replica_when_others_come(ranking):
    replicas = "abc"
    homes = {number: ranking.rank(of_sequence(number), replicas) for number in range(1, 100)}
    assert {len(home) for home in homes.values()} == {1}, "no other replica has the state"
    assert set(Counter(home[0] for home in homes.values())) == {"a", "b", "c"}
    assert homes == {number: ranking.rank(of_sequence(number), "abcdefgh") for number in homes}


def test_ingresses_agree_on_sequences_without_talking(ranking):
    other = RequestRanking()
    for name in ("x", 17, "17"):
        assert ranking.rank(of_sequence(name), "abc") == other.rank(of_sequence(name), "cba")


def test_the_sequences_of_a_lost_replica_go_to_one_that_does_not_know_them(ranking):
    homes = {number: ranking.rank(of_sequence(number), "abc")[0] for number in range(1, 100)}
    ranking.keep_only("ab")
    for number, home in homes.items():
        [now] = ranking.rank(of_sequence(number), "ab")
        assert now == home if home != "c" else now in "ab"


COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number = request.correlation_id()
            self.counts[number] = self.counts.get(number, 0) + 1
            tensor = pb_utils.Tensor("Y", np.array([self.counts[number]], np.int32))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
COUNTER_CONFIG = """backend: "python"
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { direct { } }
"""


async def test_the_state_of_a_sequence_is_found_again_until_its_replica_is_lost(tmp_path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(COUNTER)
    (folder.parent / "config.pbtxt").write_text(COUNTER_CONFIG)
    replicas = {name: ModelReplica([tmp_path], "m") for name in "abc"}
    ranking = RequestRanking()

    async def count(*, starts: bool = False) -> tuple[str, int]:
        flags = RequestFlags.SEQUENCE_START if starts else RequestFlags.NONE
        request = of_sequence(7, flags)
        [home] = ranking.rank(request, replicas)
        call = Call(identity=replicas[home].identity, request=request)
        [(response, _final)] = [item async for item in replicas[home].infer(call)]
        return home, int(response.outputs[0].array[0])

    try:
        home, first = await count(starts=True)
        assert [first, (await count())[1], (await count())[1]] == [1, 2, 3]
        replicas.pop(home).close()
        ranking.keep_only(replicas)
        with pytest.raises(InferenceError, match="must specify the START flag on the first request"):
            await count()
        assert (await count(starts=True))[1] == 1
    finally:
        for replica in replicas.values():
            replica.close()


def test_a_lost_replica_is_forgotten(ranking):
    ranking.sent(1, generation(*range(20)), "b")
    ranking.keep_only("ac")
    ranking.ended(1, "b")
    assert ranking.rank(generation(*range(20)), "bac") == ["b", "a", "c"], "as idle and empty as the others"


def test_what_is_sent_to_a_lost_replica_is_not_remembered(ranking):
    ranking.sent(1, generation(*range(20)), "a")
    ranking.keep_only("ac")
    ranking.sent(1, generation(*range(20)), "b")
    ranking.sent(2, generation(*range(20)), "b")
    assert [ranking.load(replica).waiting for replica in "ab"] == [0, 0]
    ranking.keep_only("abc")
    assert ranking.rank(generation(*range(20)), "bac") == ["a", "b", "c"], "which has the prefix"


def test_a_replica_without_statistics_is_forgotten_too():
    ranking = RequestRanking()
    ranking.sent(1, None, "a")
    ranking.keep_only("b")
    assert ranking.load("a").waiting == 0
    assert ranking.rank(None, "ab") == ["a", "b"]


def test_requests_without_prompt_go_where_the_fewest_are():
    ranking = RequestRanking()
    for number, replica in enumerate("aab"):
        ranking.sent(number, InferenceRequest(model_name="m", inputs={}), replica)
    assert ranking.rank(InferenceRequest(model_name="m", inputs={}), "abc") == ["c", "b", "a"]


def test_replicas_without_room_are_not_asked_and_no_more_than_three_are():
    ranking = RequestRanking()
    for replica, num_free in zip("abcdef", (0, 5, None, 1, 1, 0), strict=True):
        ranking.observe(replica, ReplicaLoad(num_free=num_free))
    request = InferenceRequest(model_name="m", inputs={})
    assert ranking.rank(request, "abcdef") == ["b", "c", "d"]
    assert ranking.rank(request, "af") == ["a"], "what is known of them may have changed"


def test_a_rejection_closes_a_replica_until_a_request_ends_or_its_next_statistics():
    ranking, load = RequestRanking(), ReplicaLoad(num_free=9)
    request = InferenceRequest(model_name="m", inputs={})
    ranking.observe("a", load)
    for number in range(3):
        ranking.sent(number, request, "a")
    assert ranking.load("a").num_free == 6
    ranking.ended(2, "a")
    ranking.rejected(request, "a", reason="predicted_wait")
    assert ranking.load("a").num_free == 0
    ranking.ended(1, "a")
    assert ranking.load("a").num_free == 1
    ranking.observe("a", load)
    assert ranking.load("a").num_free == 9, "they are the same as before, and new"
    ranking.ended(0, "a")
    assert ranking.load("a").num_free == 10


def test_a_rejection_of_one_long_or_unimportant_request_closes_no_replica():
    ranking = RequestRanking()
    ranking.observe("a", ReplicaLoad(num_free=9))
    late = generation(priority=1)
    ranking.rejected(late, "a", reason="predicted_wait")
    ranking.rejected(replace(late, params=SamplingParams()), "a", reason="max_queue_tokens")
    assert ranking.load("a").num_free == 9


def test_places_of_all_replicas_are_known_if_those_of_each_one_are():
    loads = [ReplicaLoad(num_free=2, seconds_per_slot=0.1), ReplicaLoad(num_free=3, seconds_per_slot=0.1)]
    assert total_load(loads).num_free == 5
    assert total_load(loads).seconds_per_slot == pytest.approx(0.05)
    assert total_load([*loads, ReplicaLoad()]).num_free is None
    assert total_load([]).num_free is None, "one may come"


def test_an_estimate_has_at_least_the_requests_in_flight():
    estimates = LoadEstimates()
    for request in range(3):
        estimates.sent(request, "a", num_tokens=10)
    assert estimates.load("a") == ReplicaLoad(waiting=3, waiting_tokens=30)
    estimates.observe("a", ReplicaLoad(running=1, kv_usage=0.5))
    assert estimates.load("a") == ReplicaLoad(running=3, kv_usage=0.5), "two came after the statistics"
    estimates.ended(0, "a")
    estimates.ended(0, "a")
    assert estimates.load("a") == ReplicaLoad(running=2, kv_usage=0.5)
    estimates.forget("a")
    assert estimates.load("a") == ReplicaLoad()
