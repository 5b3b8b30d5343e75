"""Returning loops: those over the logits that were answered, and may come back with one token more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from genserve.generation.logits_request import LogitsRequest

__all__ = ["ReturningLoops"]

# A loop that is away keeps its place in the forward, as a running sequence does, for so long and a few times
# its last pause.
_HOLD_S = 0.02
_NUM_PAUSES = 4
_LONGEST_PAUSE_S = 1.0      # one that was away for longer is like one that has not come back yet
_NUM_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Loop:
    arrival: int        # its number in the queue
    since_s: float
    held_until_s: float
    pause_s: float      # how long its caller was away the last time; infinite: it has not come back yet


class ReturningLoops:
    """The loops that are away, by the tokens that they were answered for. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._loops: OrderedDict[tuple[int, ...], _Loop] = OrderedDict()

    def leave(self, request: LogitsRequest, *, arrival: int, now_s: float, step_s: float) -> None:
        """Note that a request was answered.

        Who has not come back yet may never do so: to hold its place for half the time of a step costs less
        than to have it wait for one.
        """
        pause_s = request.pause_s
        held_s = _HOLD_S + _NUM_PAUSES * pause_s if pause_s < _LONGEST_PAUSE_S else min(_HOLD_S, step_s / 2)
        self._loops[tuple(request.token_ids)] = _Loop(arrival, now_s, now_s + held_s, pause_s)
        if len(self._loops) > _NUM_REMEMBERED:
            self._loops.popitem(last=False)

    def come_back(self, request: LogitsRequest) -> int | None:
        """Return the number that its loop has in the queue, and note its pause; None: it is a new one."""
        loop = self._loops.pop(tuple(request.token_ids[:-1]), None) or self._loops.pop(
            tuple(request.token_ids), None
        )
        if loop is None:
            return None
        request.pause_s = request.submitted_s - loop.since_s
        return loop.arrival

    def num_held(self, now_s: float) -> int:
        """Return for how many a place is kept."""
        return sum(1 for _ in self._held(now_s))

    def held_s(self, now_s: float) -> float:
        """Return for how long no place that is kept now becomes free; 0: none is kept."""
        return min((loop.held_until_s - now_s for loop in self._held(now_s)), default=0.0)

    def expected(self, now_s: float, *, within_s: float) -> tuple[int, float]:
        """Return how many should be back within `within_s` of their leaving, and for how long to wait."""
        since_s = [
            loop.since_s
            for loop in self._loops.values()
            if loop.pause_s < within_s and now_s - loop.since_s < within_s
        ]
        return len(since_s), max(since_s, default=now_s) + within_s - now_s

    def _held(self, now_s: float) -> Iterator[_Loop]:
        return (loop for loop in self._loops.values() if now_s < loop.held_until_s)
