"""Parked: what one that has left leaves in its slot, and for how long the slot is held for its return."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Parked", "hold_s"]

# A loop that is away keeps its slot, as a running sequence does, for so long and a few times its last pause.
HOLD_S = 0.02
NUM_PAUSES = 4
LONGEST_PAUSE_S = 1.0   # one that was away for longer is like one that has not come back yet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parked:
    """What one that has left leaves in its slot: tokens that others may begin with."""

    token_ids: list[int]
    num_prefilled: int      # so many of them, from the first, were computed as a prompt
    cache_salt: str | None
    since_s: float
    held_until_s: float     # until then its slot is its own
    pause_s: float          # how long its caller was away the last time; infinite: it has not come back yet

    @property
    def num_computed(self) -> int:
        """How many of the tokens are in the KV cache: all."""
        return len(self.token_ids)


def hold_s(pause_s: float, *, step_s: float) -> float:
    """Return how long an answered request's slot is held for a caller that was away for `pause_s`.

    Who has not come back yet may never do so; to hold its slot for half the time that it took to
    compute what is in it costs less than to lose that.
    """
    return HOLD_S + NUM_PAUSES * pause_s if pause_s < LONGEST_PAUSE_S else min(HOLD_S, step_s / 2)
