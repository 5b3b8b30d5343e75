"""Paused loops: loops of callers that read logits, for which an engine keeps slots between their requests."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from genserve.engine.engine_request import LogitsRequest

# A slot of the forward is reserved for a paused loop for this time and a few of its pauses, since a running
# sequence keeps its slot too.
_RESERVED_S = 0.02
_NUM_PAUSES = 4
_MAX_PAUSE_S = 1.0  # a loop with a longer pause counts as one that never resumed
_MAX_PAUSED = 256


@dataclass(frozen=True, slots=True)
class _PausedLoop:
    arrival: int  # its number in the order of arrival
    since_s: float
    reserved_until_s: float
    pause_s: float  # how long its last pause was; infinite: it never resumed


class PausedLoops:
    """Loops of callers that have received logits and may resume with one more token.

    A loop is found by the tokens of its last logits request. Belongs to the engine's thread.
    """

    def __init__(self) -> None:
        self._loops: OrderedDict[tuple[int, ...], _PausedLoop] = OrderedDict()

    def pause(self, request: LogitsRequest, *, now_s: float, step_s: float) -> None:
        """Record that a request gets its logits.

        A loop that never resumed may be a single request. To reserve its slot for half a step costs less
        than to have it wait for a step.
        """
        pause_s = request.pause_s
        reserved_s = min(_RESERVED_S, step_s / 2)
        if pause_s < _MAX_PAUSE_S:
            reserved_s = _RESERVED_S + _NUM_PAUSES * pause_s
        key = tuple(request.token_ids)
        self._loops[key] = _PausedLoop(request.arrival, now_s, now_s + reserved_s, pause_s)
        if len(self._loops) > _MAX_PAUSED:
            self._loops.popitem(last=False)

    def resume(self, request: LogitsRequest) -> int | None:
        """Return the arrival number of the request's loop, and record its pause; None: it is a new loop."""
        loop = self._loops.pop(tuple(request.token_ids[:-1]), None) or self._loops.pop(
            tuple(request.token_ids), None
        )
        if loop is None:
            return None
        request.pause_s = request.submitted_s - loop.since_s
        return loop.arrival

    def num_reserved(self, now_s: float) -> int:
        """Return how many slots are reserved."""
        return sum(now_s < loop.reserved_until_s for loop in self._loops.values())

    def reserved_s(self, now_s: float) -> float:
        """Return how long it takes until one of the reserved slots is free; 0: none is reserved."""
        left_s = (loop.reserved_until_s - now_s for loop in self._loops.values())
        return min((seconds for seconds in left_s if seconds > 0), default=0.0)

    def expected(self, now_s: float, *, within_s: float) -> tuple[int, float]:
        """Return how many loops always resume within `within_s`, and how long to wait for them."""
        since_s = [
            loop.since_s
            for loop in self._loops.values()
            if loop.pause_s < within_s and now_s - loop.since_s < within_s
        ]
        return len(since_s), max(since_s, default=now_s) + within_s - now_s
