"""Autoscaling: how many replicas a model needs, from what its replicas have to do.

Serve asks the policy in its controller, which gets a copy of this module: it imports nothing of genserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# The statistics that replicas record for the policy.
USAGE, WAITING_TOKENS = "usage", "waiting_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """How much a replica should have to do.

    Attributes:
        usage: share of its places and of its KV cache that is held, above 0 and at most 1.
        waiting_tokens: prompt tokens that wait for one replica more; above 0.
    """

    usage: float = 0.8
    waiting_tokens: float = 4096.0

    def __post_init__(self) -> None:
        if not 0 < self.usage <= 1:
            raise ValueError(f"target_usage is {self.usage}, and must be above 0 and at most 1")
        if not self.waiting_tokens > 0:
            raise ValueError(f"target_waiting_tokens is {self.waiting_tokens}, and must be above 0")


def num_replicas_for(
    usages: Iterable[float], waiting_tokens: Iterable[float], *, targets: ScalingTargets
) -> float:
    """Return how many replicas the load of all replicas needs, not rounded and without bounds.

    Sequences that run need places, at `targets.usage` of each replica; prompts that wait need replicas on
    top.

    Args:
        usages: the used share of each replica's places or KV cache, whichever is larger, 0 to 1.
        waiting_tokens: the prompt tokens that wait at each replica.
        targets: how much one replica should have to do.
    """
    return sum(usages) / targets.usage + sum(waiting_tokens) / targets.waiting_tokens


class _Deployment(Protocol):
    """What the policy reads of `ray.serve.config.AutoscalingContext`."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


class TokenLoadPolicy:
    """The policy of a generation model, called by Serve's controller; Serve applies bounds and delays."""

    def __init__(
        self,
        *,
        target_usage: float = 0.8,
        target_waiting_tokens: float = 4096.0,
    ) -> None:
        """Raise ValueError for a target that is out of range."""
        self._targets = ScalingTargets(usage=target_usage, waiting_tokens=target_waiting_tokens)

    def __call__(self, deployment: _Deployment) -> tuple[float, dict[str, Any]]:
        """Return the replicas that the deployment needs, and the state of the policy, which has none."""
        recorded = deployment.aggregated_metrics or {}
        usages = recorded.get(USAGE, {})
        if not usages:  # no replica has reported yet
            return deployment.target_num_replicas, {}
        waiting = recorded.get(WAITING_TOKENS, {})
        return num_replicas_for(usages.values(), waiting.values(), targets=self._targets), {}
