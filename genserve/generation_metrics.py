"""Generation metrics: the Prometheus counters, gauges and histograms of text generation.

The vocabulary is vLLM's under genserve's prefix, in base units (seconds). The label set is fixed, so a
request cannot create a new series.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from genserve.completion import FinishReason

__all__ = ["GenerationMetrics", "Metrics", "bare_family"]


C = TypeVar("C", bound=Collector)

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """All series of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._collectors: dict[object, Collector] = {}
        model = ("model",)
        self.requests = Counter(
            "genserve_requests",
            "Requests that ended, by how they ended.",
            ("model", "ending"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "genserve_prompt_tokens", "Prompt tokens computed.", model, registry=self.registry
        )
        self.generation_tokens = Counter(
            "genserve_generation_tokens", "Tokens generated.", model, registry=self.registry
        )
        self.draft_tokens = Counter(
            "genserve_spec_decode_num_draft_tokens",
            "Tokens that a draft proposed, and the model looked at.",
            model,
            registry=self.registry,
        )
        self.accepted_tokens = Counter(
            "genserve_spec_decode_num_accepted_tokens",
            "Drafted tokens that the model would have picked too.",
            model,
            registry=self.registry,
        )
        self.preemptions = Counter(
            "genserve_num_preemptions",
            "Times that a request had to give back its blocks of the KV cache, and wait again.",
            model,
            registry=self.registry,
        )
        self.prefix_cache_queries = Counter(
            "genserve_prefix_cache_queries",
            "Prompt tokens that were looked for in the KV cache.",
            model,
            registry=self.registry,
        )
        self.prefix_cache_hits = Counter(
            "genserve_prefix_cache_hits",
            "Prompt tokens that were found there and not computed.",
            model,
            registry=self.registry,
        )
        self.cache_usage = Gauge(
            "genserve_kv_cache_usage_perc",
            "Share of the KV cache's memory that running requests hold; 1 is all of it.",
            model,
            registry=self.registry,
        )
        self.running = Gauge(
            "genserve_num_requests_running", "Requests that run.", model, registry=self.registry
        )
        self.waiting = Gauge(
            "genserve_num_requests_waiting", "Requests that wait for a place.", model, registry=self.registry
        )
        self.waiting_tokens = Gauge(
            "genserve_num_prompt_tokens_waiting",
            "Tokens of the prompts that wait for their first step.",
            model,
            registry=self.registry,
        )
        self.rejections = Counter(
            "genserve_admission_rejections",
            "Requests that were refused with status 429, by the limit that was reached.",
            ("model", "reason"),
            registry=self.registry,
        )
        self.queue_time = Histogram(
            "genserve_request_queue_time_seconds",
            "From arrival to the first step.",
            model,
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.step_seconds = Histogram(
            "genserve_step_seconds",
            "Duration of one step: schedule, run, process.",
            ("model", "kind"),
            buckets=_PER_TOKEN_S,
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "genserve_time_to_first_token_seconds",
            "From arrival to the first token.",
            model,
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.time_per_output_token = Histogram(
            "genserve_request_time_per_output_token_seconds",
            "Mean time between the tokens of one request.",
            model,
            buckets=_PER_TOKEN_S,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "genserve_e2e_request_latency_seconds",
            "From arrival to the last token.",
            model,
            buckets=_LATENCY_S,
            registry=self.registry,
        )

    def collector(self, kind: Callable[[CollectorRegistry], C]) -> C:
        """Return the registry's one collector of a kind, made when it is first asked for.

        Args:
            kind: a class, constructed with the registry.
        """
        with self._lock:
            found = self._collectors.get(kind)
            if found is None:
                found = self._collectors[kind] = kind(self.registry)
                self.registry.register(found)
        return cast(C, found)

    def for_model(self, name: str) -> GenerationMetrics:
        """Return the series of one model, looked up once."""
        return GenerationMetrics(self, name)


class GenerationMetrics:
    """What the engine of one model reports; the engine's thread calls it."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._endings = {
            ending: metrics.requests.labels(model, ending)
            for ending in (*(reason.value for reason in FinishReason), "failed", "cancelled")
        }
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._preemptions = metrics.preemptions.labels(model)
        self._draft_tokens = metrics.draft_tokens.labels(model)
        self._accepted_tokens = metrics.accepted_tokens.labels(model)
        self._prefix_cache_queries = metrics.prefix_cache_queries.labels(model)
        self._prefix_cache_hits = metrics.prefix_cache_hits.labels(model)
        self._cache_usage = metrics.cache_usage.labels(model)
        self._running = metrics.running.labels(model)
        self._waiting = metrics.waiting.labels(model)
        self._waiting_tokens = metrics.waiting_tokens.labels(model)
        self._rejections = metrics.rejections
        self._queue_time = metrics.queue_time.labels(model)
        self._model = model
        self._prefill_seconds = metrics.step_seconds.labels(model, "prefill")
        self._decode_seconds = metrics.step_seconds.labels(model, "decode")
        self._first_token = metrics.time_to_first_token.labels(model)
        self._per_token = metrics.time_per_output_token.labels(model)
        self._request_seconds = metrics.request_seconds.labels(model)

    def step(self, *, seconds: float, prompt_tokens: int, preempted: int) -> None:
        """Report one step; `prompt_tokens` 0 means a decode."""
        self._preemptions.inc(preempted)
        (self._prefill_seconds if prompt_tokens else self._decode_seconds).observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def speculated(self, *, drafted: int, accepted: int) -> None:
        """Report how many tokens were drafted in one step, and how many of them were right."""
        if drafted:
            self._draft_tokens.inc(drafted)
            self._accepted_tokens.inc(accepted)

    def occupancy(self, *, running: int, waiting: int, waiting_tokens: int, cache_usage: float) -> None:
        """Report how many run and wait, and the share of the cache that those hold that run."""
        self._cache_usage.set(cache_usage)
        self._running.set(running)
        self._waiting.set(waiting)
        self._waiting_tokens.set(waiting_tokens)

    def rejected(self, reason: str) -> None:
        """Report a request that was refused; from any thread."""
        self._rejections.labels(self._model, reason).inc()

    def queued(self, seconds: float) -> None:
        """Report how long a request has waited for its first step."""
        self._queue_time.observe(seconds)

    def generated(self, count: int) -> None:
        """Report new tokens of one request."""
        self._generation_tokens.inc(count)

    def first_token(self, *, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Report the time from arrival to the first token, and how much of the prompt was cached."""
        self._first_token.observe(seconds)
        self._prefix_cache_queries.inc(prompt_tokens)
        self._prefix_cache_hits.inc(cached_tokens)

    def request_finished(
        self, reason: FinishReason, *, seconds: float, decode_seconds: float, new_tokens: int
    ) -> None:
        """Report a whole answer."""
        self._endings[reason.value].inc()
        self._request_seconds.observe(seconds)
        if new_tokens > 1:
            self._per_token.observe(decode_seconds / (new_tokens - 1))

    def request_failed(self) -> None:
        """Report a request that a failure ended."""
        self._endings["failed"].inc()

    def request_cancelled(self) -> None:
        """Report a request whose client left."""
        self._endings["cancelled"].inc()


def bare_family(name: str, text: str, kind: str) -> Metric:
    """Return a family without samples, to be shown under its very name, without `_total` if it is a counter.

    Args:
        name: of the family, and of its samples.
        text: the help.
        kind: Prometheus's word: counter, gauge, histogram.
    """
    return Metric(_BareName(name), text, kind)


class _BareName(str):
    """A name to which prometheus_client cannot append `_total`, as it does to those of counters."""

    __slots__ = ()

    def __add__(self, suffix: str) -> str:
        return self if suffix == "_total" else str(self) + suffix
