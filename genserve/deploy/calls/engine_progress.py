"""Engine progress: notices a replica whose engine hangs although the replica does not say so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# An engine hangs if a call has no item for this time, or ten times the longest pause of its engine before,
# and the engine has not begun a step either: beams and waiting calls have no items while other calls run.
PROGRESS_S = 60.0
_LONGER_THAN_BEFORE = 10


@dataclass(slots=True, eq=False)
class RunningCall:
    """A generation that a replica has not ended; `heard_s` is when it has begun, or its last item came."""

    replica: str
    heard_s: float


@dataclass(slots=True)
class _Steps:
    num_turns: int
    since_s: float          # when that number was seen first
    longest_s: float = 0.0  # pause between two numbers while calls ran
    hangs: bool = False     # until the next number


class EngineProgress:
    """When the engines of replicas have begun their last steps, and when their calls had their last items."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Read the time by `now_s`, in seconds."""
        self._now_s = now_s
        self._calls: dict[str, dict[RunningCall, None]] = {}    # by replica
        self._steps: dict[str, _Steps] = {}

    def begin(self, replica: str) -> RunningCall:
        """Record that a replica begins a generation."""
        call = RunningCall(replica, self._now_s())
        self._calls.setdefault(replica, {})[call] = None
        return call

    def heard(self, call: RunningCall) -> None:
        """Record that an item of a call came."""
        call.heard_s = self._now_s()

    def end(self, call: RunningCall) -> None:
        """Record that a call has ended."""
        del self._calls[call.replica][call]

    def forget(self, replica: str) -> None:
        """Forget the steps of a replica, which has ended."""
        self._steps.pop(replica, None)
        if not self._calls.get(replica):
            self._calls.pop(replica, None)

    def observe(self, replica: str, num_turns: int) -> bool:
        """Record how many steps the engines of a replica have begun; return whether it hangs."""
        now_s, steps = self._now_s(), self._steps.get(replica)
        heard_s = min((call.heard_s for call in self._calls.get(replica, ())), default=math.inf)
        if steps is None:
            self._steps[replica] = _Steps(num_turns, now_s)
            return False
        silent_s = now_s - max(steps.since_s, heard_s)  # negative: no call runs
        if num_turns != steps.num_turns:
            longest_s = max(steps.longest_s, silent_s)
            self._steps[replica] = _Steps(num_turns, now_s, longest_s)
            return False
        steps.hangs |= silent_s >= max(PROGRESS_S, _LONGER_THAN_BEFORE * steps.longest_s)
        return steps.hangs
