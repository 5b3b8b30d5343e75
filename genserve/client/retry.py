"""Retry: whether a request that failed is sent once more, and after how long."""

from __future__ import annotations

import httpx2

from genserve.errors import GenserveError, ModelNotReady, Overloaded, Unreachable

__all__ = ["retry_wait_s"]

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0      # a server that asks for more is not waited for
_NEVER_ARRIVED = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)


def retry_wait_s(failure: GenserveError, *, attempt: int, max_retries: int, chance: float) -> float | None:
    """Return the seconds to wait before the next try, or None to give up.

    Tried again are refusals for the moment (statuses 429 and 503) and connections that failed, not
    answers that took too long: the server may still be at work on those. The wait doubles from try to
    try, and is never shorter than the server asks for.

    Args:
        failure: what became of this try; raised by `failures`.
        attempt: tries before this one.
        max_retries: tries allowed after the first.
        chance: a random number in [0, 1), which spreads the clients of a server that has come back.
    """
    if attempt >= max_retries or not _may_pass(failure):
        return None
    backoff_s = _FIRST_WAIT_S * (1 << attempt) * (0.5 + chance / 2)
    asked_s = failure.retry_after_s if isinstance(failure, (Overloaded, ModelNotReady)) else 0
    if asked_s > _LONGEST_WAIT_S:
        return None
    return max(backoff_s, asked_s + chance / 2)


def _may_pass(failure: GenserveError) -> bool:
    if isinstance(failure, Unreachable):
        return isinstance(failure.__cause__, _NEVER_ARRIVED)
    return isinstance(failure, (Overloaded, ModelNotReady))
