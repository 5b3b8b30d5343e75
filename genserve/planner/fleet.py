"""Fleet: replicas behind a router, simulated as discrete events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from genserve.deploy.replica.replica_load import LoadEstimates, total_load
from genserve.deploy.routing.prefix_router import PrefixRouter
from genserve.deploy.routing.request_ranking import asked_replicas, is_full
from genserve.engine.prefix_cache import block_keys
from genserve.errors import Overloaded
from genserve.planner.loads import PlannedRequest
from genserve.planner.simulated_replica import ReplicaKind, SimulatedReplica, TokenTimes

_STATISTICS_S = 1.0     # how often the router of a deployment hears of its replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """The outcome of a load."""

    duration_s: float           # the time from the first arrival to the last end
    num_requests: int
    num_rejected: int           # rejected by admission control
    num_too_long: int           # prompt and answer exceed the model's context
    num_preempted: int
    prompt_tokens: int          # prompt tokens of the requests that had a first step
    cached_tokens: int          # how many of the prompt tokens were in the cache
    utilisation: float          # the share of the time in which a replica runs a step, averaged over all
    times: TokenTimes


class Fleet:
    """Replicas of one kind behind the router of a deployment, which hears of their loads every second."""

    def __init__(self, kind: ReplicaKind, *, num_replicas: int) -> None:
        """Start with idle replicas and empty caches."""
        self._kind = kind
        self._now_s = 0.0
        self._replicas = [SimulatedReplica(kind, clock=lambda: self._now_s) for _ in range(num_replicas)]
        limits = kind.limits
        self._router: PrefixRouter[int] = PrefixRouter(limits.block_size, num_blocks=limits.num_blocks)
        self._estimates: LoadEstimates[int] = LoadEstimates()
        self._observed_s = -math.inf
        self._max_length = min(limits.max_length, limits.num_blocks * limits.block_size)
        # The end of a replica's step, unless it has changed since then, or the next turn of a session.
        self._events: list[tuple[float, int, int | PlannedRequest]] = []
        self._order = count()
        self._num_requests = self._num_rejected = self._num_too_long = 0
        self._prompt_tokens = self._cached_tokens = 0

    def run(self, requests: Iterable[PlannedRequest]) -> FleetResult:
        """Simulate a load to its end; the `requests` come in the order of their arrival."""
        source = iter(requests)
        upcoming = next(source, None)
        started_s = upcoming.arrived_s if upcoming else 0.0
        while upcoming or self._events:
            if upcoming and (not self._events or self._submitted_s(upcoming) <= self._events[0][0]):
                self._now_s = self._submitted_s(upcoming)
                self._route(upcoming)
                upcoming = next(source, None)
                continue
            self._now_s, _, event = heapq.heappop(self._events)
            if not isinstance(event, int):
                self._route(event)
            elif self._replicas[event].ends_s == self._now_s:
                self._step(event)
        return self._result(max(self._now_s - started_s, 1e-9))

    def _submitted_s(self, request: PlannedRequest) -> float:
        """Return when a request reaches the router."""
        return request.arrived_s + self._kind.serving.request_s

    def _push(self, time_s: float, event: int | PlannedRequest) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _route(self, request: PlannedRequest) -> None:
        """Send a request to the replica that the router chooses."""
        self._num_requests += 1
        if request.num_prompt_tokens + len(request.answer) > self._max_length:
            self._num_too_long += 1
            return
        token_ids = request.token_ids()
        keys = []
        if len(self._replicas) > 1:
            keys = block_keys(token_ids, block_size=self._kind.limits.block_size)
        for index in self._asked(keys):
            if self._is_taken(request, token_ids, keys, index=index):
                return
        self._num_rejected += 1     # which ends its session

    def _is_taken(
        self, request: PlannedRequest, token_ids: list[int], keys: list[bytes], *, index: int
    ) -> bool:
        """Send a request to a replica; return whether that has room for it."""
        num_new = len(token_ids) - self._router.cached_tokens(keys, [index])[index]
        self._estimates.sent(id(request), index, num_tokens=num_new)
        self._router.routed(index, keys)
        replica = self._replicas[index]
        try:
            replica.receive(request, token_ids, keys=keys)
        except Overloaded as error:
            self._estimates.ended(id(request), index)
            if is_full(error.reason):
                self._estimates.rejected(index)
            return False
        if math.isinf(replica.ends_s):
            replica.begin()
        self._push(replica.ends_s, index)
        return True

    def _asked(self, keys: list[bytes]) -> list[int]:
        """Return the replicas that an ingress asks; none if it knows that all are full.

        One replica is a server of its own, which has no ingress.
        """
        if len(self._replicas) == 1:
            return [0]
        if self._now_s - self._observed_s >= _STATISTICS_S:
            self._observed_s = self._now_s
            for number, replica in enumerate(self._replicas):
                self._estimates.observe(number, replica.load)
        loads = {number: self._estimates.load(number) for number in range(len(self._replicas))}
        if not total_load(loads.values()).has_room:
            return []
        return asked_replicas(self._router.rank(keys, loads), loads)

    def _step(self, index: int) -> None:
        """End the step of a replica, and begin its next one."""
        replica = self._replicas[index]
        for sequence in replica.end():
            self._prompt_tokens += sequence.num_prompt_tokens
            self._cached_tokens += sequence.num_cached_tokens
            self._end_turn(sequence.planned, index)
        for sequence in replica.reject_overdue():
            self._estimates.ended(id(sequence.planned), index)
            self._num_rejected += 1
        replica.begin()
        if not math.isinf(replica.ends_s):
            self._push(replica.ends_s, index)

    def _end_turn(self, request: PlannedRequest, index: int) -> None:
        """Schedule the next turn of a session."""
        self._estimates.ended(id(request), index)
        if request.session is not None:
            turn = request.session.next_turn(request, ended_s=self._now_s)
            if turn is not None:
                self._push(self._submitted_s(turn), turn)

    def _result(self, duration_s: float) -> FleetResult:
        times = TokenTimes()
        times.merge(replica.times for replica in self._replicas)
        return FleetResult(
            duration_s=duration_s,
            num_requests=self._num_requests,
            num_rejected=self._num_rejected,
            num_too_long=self._num_too_long,
            num_preempted=sum(replica.num_preempted for replica in self._replicas),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            utilisation=sum(replica.busy_s for replica in self._replicas) / duration_s / len(self._replicas),
            times=times,
        )
