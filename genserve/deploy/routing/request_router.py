"""Request router: Ray Serve's hook that chooses the replica of a request, by `request_ranking.py`.

A deployment names the class in its `request_router_config`. Serve makes one router in each process that holds
a handle of the deployment, which is each replica of the ingress; the statistics of the replicas reach all of
them, but each knows only the requests that it has sent itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.routing.request_ranking import RequestRanking

_LOAD_FIELDS = frozenset(field.name for field in fields(ReplicaLoad))


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks replicas by cached prefixes and load; a request of a sequence goes to the one that holds it.

    The replicas' `record_routing_stats` returns the fields of `ReplicaLoad`. A request that a replica is
    about to be asked to take counts as sent, so that those that come with it, and begin alike, follow it. One
    that waits for a place at a replica does not.
    """

    def initialize_state(self, **weights: float) -> None:
        """Take over the `request_router_kwargs` of the deployment: weights of `PrefixRouter`."""
        self._ranking: RequestRanking[ReplicaID] = RequestRanking(**weights)
        self._read: dict[ReplicaID, Mapping[str, Any]] = {}     # the last statistics

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks of one each: Serve takes the first one that is not full."""
        # Several ingresses that see no difference between replicas should not all prefer the same one.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        replicas = {replica.replica_id: replica for replica in shuffled}
        for replica_id, replica in replicas.items():
            if replica.routing_stats is not self._read.get(replica_id):
                self._read[replica_id] = replica.routing_stats
                self._ranking.observe(replica_id, _load(replica.routing_stats))
        request = _argument(pending_request)
        ranked = self._ranking.rank(request, replicas)
        if pending_request is not None:
            self._expect(pending_request, replicas[ranked[0]])
        return [[replicas[replica_id]] for replica_id in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note which replica took a request: not the best one, if that is full."""
        self._ranking.sent(
            pending_request.metadata.internal_request_id, _argument(pending_request), replica_id
        )

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a replica has answered, failed or rejected a request."""
        self._ranking.ended(internal_request_id, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the replicas that have ended."""
        super().update_replicas(replicas)
        self._forget_others()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._forget_others()

    def _forget_others(self) -> None:
        self._read = {one: stats for one, stats in self._read.items() if one in self.curr_replicas}
        self._ranking.keep_only(self.curr_replicas)

    def _expect(self, pending_request: PendingRequest, best: RunningReplica) -> None:
        """Note that Serve will probably send a request to the best replica; once, and not if that is full."""
        request_id = pending_request.metadata.internal_request_id
        num_requests = self.replica_queue_len_cache.get(best.replica_id)     # None: Serve asks it
        is_full = num_requests is not None and num_requests >= best.max_ongoing_requests
        if is_full or self._ranking.is_sent(request_id):
            return
        request = _argument(pending_request)
        self._ranking.sent(request_id, request, best.replica_id)

        def correct(future: asyncio.Future[RunningReplica]) -> None:
            if future.cancelled():  # before it was sent, so nothing else will say that it ended
                self._ranking.ended(request_id, best.replica_id)
            else:
                self._ranking.sent(request_id, request, future.result().replica_id)

        pending_request.future.add_done_callback(correct)


def _argument(pending_request: PendingRequest | None) -> object:
    """Return what the ingress sends: the only argument of a replica's methods."""
    return pending_request.args[0] if pending_request is not None and pending_request.args else None


def _load(routing_stats: Mapping[str, Any]) -> ReplicaLoad:
    """Return the last statistics of a replica; those of an idle one if it has sent none yet."""
    return ReplicaLoad(**{name: value for name, value in routing_stats.items() if name in _LOAD_FIELDS})
