"""What replicas have to do: the figures that the router and the autoscaler read."""

from __future__ import annotations

from collections.abc import Collection, Hashable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

ReplicaId = TypeVar("ReplicaId", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica at one moment.

    Attributes:
        running: sequences that hold blocks of the KV cache.
        waiting: sequences that wait for blocks or for a place in the forward.
        waiting_tokens: prompt tokens of the waiting sequences.
        kv_usage: share of the KV cache that running sequences hold, 0 to 1. Cached blocks that nobody holds
            are free.
        block_size: tokens of a block of the KV cache; 0: unknown, or there is no cache.
        num_blocks: blocks of the KV cache.
        num_free: how many more requests the replica would accept; None: unknown, or there is no limit.
        seconds_per_slot: the time in which a full replica can accept one more request; 0: unknown.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    block_size: int = 0
    num_blocks: int = 0
    num_free: int | None = None
    seconds_per_slot: float = 0.0

    @property
    def has_room(self) -> bool:
        """Whether the replica would accept a request, as far as is known."""
        return self.num_free != 0


def total_load(loads: Collection[ReplicaLoad]) -> ReplicaLoad:
    """Return the load of several replicas together; `num_free` is known if each replica's is."""
    free = [load.num_free for load in loads if load.num_free is not None]
    rates = [1 / load.seconds_per_slot for load in loads if load.seconds_per_slot]
    return ReplicaLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        waiting_tokens=sum(load.waiting_tokens for load in loads),
        kv_usage=sum(load.kv_usage for load in loads) / max(1, len(loads)),
        num_free=sum(free) if free and len(free) == len(loads) else None,
        seconds_per_slot=1 / sum(rates) if rates else 0.0,
    )


class LoadEstimates(Generic[ReplicaId]):
    """The loads of replicas: their last statistics, and the requests that were sent to them since.

    Statistics come seldom, requests often; if requests did not count, all that come between two statistics
    would go to one replica. A request is known by any number or name that no other request has.
    """

    def __init__(self) -> None:
        self._observed: dict[ReplicaId, ReplicaLoad] = {}
        self._sent: dict[ReplicaId, set[Hashable]] = {}  # requests that have not ended
        self._unseen: dict[ReplicaId, dict[Hashable, int]] = {}  # tokens to compute, by request
        self._num_ended: dict[ReplicaId, int] = {}  # requests that ended after the last statistics

    def observe(self, replica: ReplicaId, load: ReplicaLoad) -> None:
        """Record the statistics of a replica."""
        self._observed[replica] = load
        self._unseen.pop(replica, None)
        self._num_ended.pop(replica, None)

    def sent(self, request: Hashable, replica: ReplicaId, *, num_tokens: int) -> None:
        """Record that a request with `num_tokens` prompt tokens to compute is sent to a replica."""
        self._sent.setdefault(replica, set()).add(request)
        self._unseen.setdefault(replica, {})[request] = num_tokens

    def ended(self, request: Hashable, replica: ReplicaId) -> None:
        """Record that a replica does no more for a request; does nothing if it was not sent there."""
        sent = self._sent.get(replica, set())
        if request not in sent:
            return
        sent.discard(request)
        if self._unseen.get(replica, {}).pop(request, None) is None:
            self._num_ended[replica] = self._num_ended.get(replica, 0) + 1

    def rejected(self, replica: ReplicaId) -> None:
        """Record that a replica has no room, until a request at it ends or its next statistics come."""
        load = self._observed.get(replica, _IDLE)
        num_unseen = len(self._unseen.get(replica, {}))
        self._observed[replica] = replace(load, num_free=num_unseen)
        self._num_ended.pop(replica, None)

    def load(self, replica: ReplicaId) -> ReplicaLoad:
        """Return the estimated load of a replica; it has at least the sequences that were sent to it."""
        load = self._observed.get(replica, _IDLE)
        unseen = self._unseen.get(replica, {})
        waiting, tokens = load.waiting + len(unseen), load.waiting_tokens + sum(unseen.values())
        running = max(load.running, len(self._sent.get(replica, ())) - waiting)
        num_free = load.num_free
        if num_free is not None:
            num_free = max(0, num_free + self._num_ended.get(replica, 0) - len(unseen))
        return replace(load, running=running, waiting=waiting, waiting_tokens=tokens, num_free=num_free)

    def forget(self, replica: ReplicaId) -> None:
        """Forget a replica, which has ended; does nothing if it is not known."""
        known: MutableMapping[ReplicaId, Any]
        for known in (self._observed, self._sent, self._unseen, self._num_ended):
            known.pop(replica, None)


_IDLE = ReplicaLoad()
