"""What replicas have to do: the figures that the router and the autoscaler read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

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
        block_size: tokens of a block of the KV cache; 0: it is not known, or there is none.
        num_blocks: of the KV cache.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    block_size: int = 0
    num_blocks: int = 0

    def with_request(self, num_tokens: int) -> ReplicaLoad:
        """Return the load with one more waiting sequence, which has `num_tokens` prompt tokens to compute."""
        return replace(self, waiting=self.waiting + 1, waiting_tokens=self.waiting_tokens + num_tokens)


class LoadEstimates(Generic[ReplicaId]):
    """The loads of replicas: their last statistics, and the requests that were sent to them since.

    Statistics come seldom, a request often; without the second part all requests between two statistics would
    go to one replica. A request is known by any number or name that no other one has.
    """

    def __init__(self) -> None:
        self._observed: dict[ReplicaId, ReplicaLoad] = {}
        self._sent: dict[ReplicaId, set[Hashable]] = {}  # that have not ended
        self._unseen: dict[ReplicaId, dict[Hashable, int]] = {}  # tokens to compute, by request

    def observe(self, replica: ReplicaId, load: ReplicaLoad) -> None:
        """Take over the statistics of a replica."""
        self._observed[replica] = load
        self._unseen.pop(replica, None)

    def sent(self, request: Hashable, replica: ReplicaId, *, num_tokens: int) -> None:
        """Note that a request with `num_tokens` prompt tokens to compute is sent to a replica."""
        self._sent.setdefault(replica, set()).add(request)
        self._unseen.setdefault(replica, {})[request] = num_tokens

    def ended(self, request: Hashable, replica: ReplicaId) -> None:
        """Note that a replica does no more for a request; does nothing if it was not sent there."""
        self._sent.get(replica, set()).discard(request)
        self._unseen.get(replica, {}).pop(request, None)

    def load(self, replica: ReplicaId) -> ReplicaLoad:
        """Return the estimated load of a replica; it has at least the sequences that were sent to it."""
        load = self._observed.get(replica, _IDLE)
        unseen = self._unseen.get(replica, {})
        waiting, tokens = load.waiting + len(unseen), load.waiting_tokens + sum(unseen.values())
        running = max(load.running, len(self._sent.get(replica, ())) - waiting)
        return replace(load, running=running, waiting=waiting, waiting_tokens=tokens)

    def forget(self, replica: ReplicaId) -> None:
        """Forget a replica, which has ended; does nothing if it is not known."""
        for known in (self._observed, self._sent, self._unseen):
            known.pop(replica, None)


_IDLE = ReplicaLoad()
