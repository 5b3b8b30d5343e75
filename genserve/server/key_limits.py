"""Key limits: how many requests and tokens one API key may use, and what it has used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from genserve.errors import RateLimited

_MINUTE_S = 60.0
# When one of a key's running requests ends is not known; clients increase their waits themselves.
_CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None        # of prompts and answers together
    concurrent_requests: int | None = None


class CountedRequest(Protocol):
    """A request as its key counts it: `LoggedRequest`. Its tokens increase while it runs."""

    @property
    def prompt_tokens(self) -> int:
        """The tokens of its prompts."""

    @property
    def completion_tokens(self) -> int:
        """The tokens of its answers so far."""


class KeyUsage:
    """What the requests of one key have used. For the event loop.

    Requests and tokens per minute are allowances: up to a minute's worth can be used at once, and what was
    used comes back evenly. A request is admitted while tokens are left; those that it uses beyond them are a
    debt, which delays the next request. So a request is never cut, and a key stays within its rate.
    """

    def __init__(self, limits: KeyLimits, *, clock: Callable[[], float]) -> None:
        """Begin with nothing used; `clock` is monotonic, in seconds."""
        self._clock = clock
        self._running: dict[CountedRequest, int] = {}   # and how many of its tokens are counted
        self._limits = limits
        self._requests = _Allowance(limits.requests_per_minute, now_s=clock())
        self._tokens = _Allowance(limits.tokens_per_minute, now_s=clock())

    def change(self, limits: KeyLimits) -> None:
        """Apply these limits from now on; what was used before still counts."""
        if limits == self._limits:
            return
        now_s = self._clock()
        self._limits = limits
        self._requests.change(limits.requests_per_minute, now_s=now_s)
        self._tokens.change(limits.tokens_per_minute, now_s=now_s)

    def admit(self, request: CountedRequest) -> None:
        """Count a request that begins; call `end` once it has ended.

        Raises:
            RateLimited: it exceeds a limit, and was not counted.
        """
        now_s, limits = self._clock(), self._limits
        if limits.concurrent_requests is not None and len(self._running) >= limits.concurrent_requests:
            raise _exceeded(f"{limits.concurrent_requests} concurrent requests", _CONCURRENCY_RETRY_S)
        if wait_s := self._requests.wait_s(now_s=now_s):
            raise _exceeded(f"{limits.requests_per_minute} requests per minute", wait_s)
        self._count_tokens(now_s)
        if wait_s := self._tokens.wait_s(now_s=now_s):
            raise _exceeded(f"{limits.tokens_per_minute} tokens per minute", wait_s)
        self._requests.use(1, now_s=now_s)
        self._running[request] = 0

    def end(self, request: CountedRequest) -> None:
        """Count the tokens of a request that has ended; a second call does nothing."""
        if request in self._running:
            self._count_tokens(self._clock())
            del self._running[request]

    def _count_tokens(self, now_s: float) -> None:
        """Count the tokens of the running requests since the last call."""
        used = 0
        for request, counted in self._running.items():
            tokens = request.prompt_tokens + request.completion_tokens
            used += tokens - counted
            self._running[request] = tokens
        self._tokens.use(used, now_s=now_s)


class _Allowance:
    """An amount per minute, which comes back evenly; None: unlimited."""

    def __init__(self, per_minute: int | None, *, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute or 0)         # below 0: a debt
        self._updated_s = now_s

    def change(self, per_minute: int | None, *, now_s: float) -> None:
        """Replace the amount; what is missing from the old one is missing from the new one."""
        self.use(0, now_s=now_s)
        used = (self._per_minute or 0) - self._left
        self._per_minute = per_minute
        self._left = (per_minute or 0) - used

    def use(self, amount: int, *, now_s: float) -> None:
        """Use an amount, evenly since the last call, even if less is left."""
        if self._per_minute is not None:
            gained = (now_s - self._updated_s) * self._per_minute / _MINUTE_S
            self._left = min(float(self._per_minute), self._left + gained - amount)
        self._updated_s = now_s

    def wait_s(self, *, now_s: float) -> float:
        """Return the seconds until 1 is left; 0: it is."""
        if self._per_minute is None:
            return 0.0
        self.use(0, now_s=now_s)
        return max(0.0, 1 - self._left) * _MINUTE_S / self._per_minute


def _exceeded(limit: str, retry_after_s: float) -> RateLimited:
    return RateLimited(
        f"this API key may use {limit}", retry_after_s=retry_after_s, remedy="send the request again later"
    )
