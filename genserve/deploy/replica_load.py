"""What a replica has to do: the figures that the router and the autoscaler read."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica at one moment.

    Attributes:
        running: sequences that hold blocks of the KV cache.
        waiting: sequences that wait for blocks or for a place in the forward.
        waiting_tokens: prompt tokens of the waiting sequences.
        kv_usage: share of the KV cache that running sequences hold, 0 to 1. Cached blocks that nobody holds
            are free.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0

    def with_request(self, num_tokens: int) -> ReplicaLoad:
        """Return the load with one more waiting sequence, which has `num_tokens` prompt tokens to compute."""
        return replace(self, waiting=self.waiting + 1, waiting_tokens=self.waiting_tokens + num_tokens)
