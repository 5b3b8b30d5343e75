"""Key usage: the requests and tokens that each API key has used, and its limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from genserve.errors import RateLimited
from genserve.request_context import RequestContext

_MINUTE_S = 60.0
# When one of a key's running requests ends is not known; clients increase their waits themselves.
_CONCURRENCY_RETRY_S = 1.0


class KeyTotals(NamedTuple):
    """What one key has used since the server started; tokens of running requests count as they come."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0      # of the prompts, found in the prefix cache
    completion_tokens: int = 0

    def plus(self, request: RequestContext) -> KeyTotals:
        """Return the totals with one more request."""
        return KeyTotals(
            self.requests + 1,
            self.prompt_tokens + request.prompt_tokens,
            self.cached_tokens + request.cached_tokens,
            self.completion_tokens + request.completion_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """The limits of one key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None        # in prompts and answers together
    concurrent_requests: int | None = None


class KeyUsage:
    """The requests and tokens that one key has used. For the event loop, except `totals`.

    Requests and tokens per minute are allowances: up to a minute's worth can be used at once, and they are
    refilled evenly. A request is admitted while tokens are left; the tokens that it uses beyond them are a
    debt, which delays the next request. So a request is never cut, and a key stays within its rate.
    """

    def __init__(self, limits: KeyLimits, *, clock: Callable[[], float]) -> None:
        """Begin with nothing used; `clock` is monotonic, in seconds."""
        self._clock = clock
        self._running: dict[RequestContext, int] = {}   # and how many of its tokens are counted
        self._ended = KeyTotals()
        self._lock = threading.Lock()       # guards the end of a request
        self._limits = limits
        self._requests = _Allowance(limits.requests_per_minute, now_s=clock())
        self._tokens = _Allowance(limits.tokens_per_minute, now_s=clock())

    def change(self, limits: KeyLimits) -> None:
        """Apply these limits from now on; earlier use still counts."""
        if limits == self._limits:
            return
        now_s = self._clock()
        self._limits = limits
        self._requests.change(limits.requests_per_minute, now_s=now_s)
        self._tokens.change(limits.tokens_per_minute, now_s=now_s)

    def admit(self, request: RequestContext) -> None:
        """Count a request that begins; call `end` once it has ended.

        Raises:
            RateLimited: it exceeds a limit, and was not counted.
        """
        now_s, limits = self._clock(), self._limits
        if limits.concurrent_requests is not None and len(self._running) >= limits.concurrent_requests:
            raise _exceeded("concurrent_requests", limits.concurrent_requests, _CONCURRENCY_RETRY_S)
        if wait_s := self._requests.wait_s(now_s=now_s):
            raise _exceeded("requests_per_minute", limits.requests_per_minute, wait_s)
        self._count_tokens(now_s)
        if wait_s := self._tokens.wait_s(now_s=now_s):
            raise _exceeded("tokens_per_minute", limits.tokens_per_minute, wait_s)
        self._requests.use(1, now_s=now_s)
        self._running[request] = 0

    def end(self, request: RequestContext) -> None:
        """Count the tokens of a request that has ended; a second call does nothing."""
        if request in self._running:
            self._count_tokens(self._clock())
            ended = self._ended.plus(request)
            with self._lock:
                del self._running[request]
                self._ended = ended

    def totals(self) -> KeyTotals:
        """Return what the key has used so far. Safe from any thread."""
        with self._lock:    # a request that ends is in one of them
            totals, running = self._ended, [*self._running]
        for request in running:
            totals = totals.plus(request)
        return totals

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
        """Replace the amount; the used part stays used."""
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


def _exceeded(limit: str, number: int | None, retry_after_s: float) -> RateLimited:
    return RateLimited(
        f"this API key may use {number} {limit.replace('_', ' ')}",
        retry_after_s=retry_after_s,
        remedy="send the request again later",
        reason=limit,
    )


_TEXTS: Mapping[str, str] = {
    "requests": "Requests of each API key that generate or infer.",
    "prompt_tokens": "Tokens in the prompts of each API key.",
    "cached_tokens": "Tokens in the prompts of each API key that were found in the prefix cache.",
    "completion_tokens": "Tokens generated for each API key.",
}


class KeyUsageCollector(Collector):
    """The totals of all keys as metrics, with the name of the key as the label `key`."""

    def __init__(self, usages: Mapping[str, KeyUsage]) -> None:
        """Read the usages, by the names of the keys, at each scrape."""
        self._usages = usages

    def collect(self) -> Iterator[Metric]:
        """Yield the counters."""
        totals = {name: usage.totals() for name, usage in list(self._usages.items())}
        for field, text in _TEXTS.items():
            family = CounterMetricFamily(f"genserve_key_{field}", text, labels=("key",))
            for name, used in totals.items():
                family.add_metric((name,), getattr(used, field))
            yield family
