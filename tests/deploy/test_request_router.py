"""The hook by itself; tests/deploy/test_ray_cluster.py runs it in a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.replica_messages import GenerationCall
from genserve.deploy.routing.request_router import PrefixAwareRouter
from genserve.sampling.sampling_params import SamplingParams

DEPLOYMENT = DeploymentID(name="tiny", app_name="genserve")
IDLE = ReplicaLoad(block_size=4, num_blocks=100)


class FakeReplica:
    """A replica that answers how many requests it has."""

    max_ongoing_requests = 2

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats = {**asdict(IDLE), "of_a_later_version": 1}
        self.queue_len = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


@pytest.fixture
async def replicas():
    return [FakeReplica(name) for name in "abc"]


@pytest.fixture
async def router(replicas):
    router = PrefixAwareRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.initialize_state(decode_tokens=1.0)
    router.update_replicas(replicas)
    await router.choose_replicas(replicas)      # reads the first statistics
    return router


def pending(number: int, *token_ids: int) -> PendingRequest:
    call = GenerationCall(
        model="m", prompt="", prompt_token_ids=token_ids, params=SamplingParams(), seeds=(0,)
    )
    metadata = RequestMetadata(request_id=str(number), internal_request_id=str(number))
    return PendingRequest(args=[call], kwargs={}, metadata=metadata)


async def test_a_full_replica_is_passed_over(router, replicas):
    a = replicas[0]
    first = pending(1, *range(40))
    router.on_request_routed(first, a.replica_id, None)
    assert await router._choose_replica_for_request(pending(2, *range(40))) is a
    a.queue_len = a.max_ongoing_requests
    chosen = await router._choose_replica_for_request(pending(3, *range(40)))
    assert chosen in replicas[1:]
    router.on_request_routed(pending(3, *range(40)), chosen.replica_id, None)
    a.queue_len = 0
    router.on_request_completed(a.replica_id, "1")
    router.on_request_completed(a.replica_id, "2")
    ranks = await router.choose_replicas(replicas, pending(4, *range(40)))
    assert ranks[0] == [a]
    assert ranks[1] == [chosen], "which has the prefix too, and a request"


async def test_a_dead_replica_is_forgotten(router, replicas):
    a, *others = replicas
    router.on_request_routed(pending(1, *range(40)), a.replica_id, None)
    router.on_replica_actor_died(a.replica_id)
    assert await router._choose_replica_for_request(pending(2, *range(40))) in others
    router.update_replicas(replicas)
    router.on_request_completed(a.replica_id, "1")
    assert (await router.choose_replicas(replicas, pending(3, *range(60, 64))))[-1] != [a], "it is empty"


async def test_a_request_that_is_cancelled_before_it_is_sent_counts_no_more(router, replicas):
    for replica in replicas:
        replica.queue_len = replica.max_ongoing_requests
    waiting = asyncio.create_task(router._choose_replica_for_request(pending(1, *range(40))))
    while not router._ranking._sent_to:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while router._ranking._sent_to:
        await asyncio.sleep(0)


async def test_a_request_that_waits_for_a_place_is_remembered_nowhere(router, replicas):
    for replica in replicas:
        router.replica_queue_len_cache.update(replica.replica_id, replica.max_ongoing_requests)
    waiting = pending(1, *range(40))
    for _ in range(3):
        await router.choose_replicas(replicas, waiting)
    assert not router._ranking.is_sent("1")
    router.replica_queue_len_cache.update(replicas[0].replica_id, 0)
    router.on_request_routed(waiting, replicas[1].replica_id, None)
    router.on_request_completed(replicas[1].replica_id, "1")
    assert (await router.choose_replicas(replicas, pending(2, *range(40))))[0] == [replicas[1]]


async def test_a_request_counts_where_it_is_sent_though_another_replica_was_better(router, replicas):
    a, b, _ = replicas
    call = pending(1, *range(40))
    router.on_request_routed(pending(0, *range(40)), a.replica_id, None)
    for _ in range(3):
        assert (await router.choose_replicas(replicas, call))[0] == [a]
    call.future.set_result(b)
    await asyncio.sleep(0)
    router.on_request_completed(b.replica_id, "1")      # it was cancelled there, or rejected
    assert not router._ranking.is_sent("1")
