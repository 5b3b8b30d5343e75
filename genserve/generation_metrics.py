"""Generation metrics: the Prometheus counters, gauges and histograms of text generation.

The vocabulary is vLLM's under genserve's prefix, in base units (seconds). The label set is fixed, so a
request cannot create a new series.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from genserve.completion import FinishReason

C = TypeVar("C", bound=Collector)

_PREFIX = "genserve_"
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._collectors: dict[object, Collector] = {}
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.requests = counter("requests", "Requests that ended, by how they ended.", "ending")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens that the model verified.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self.preemptions = counter(
            "num_preemptions", "Preemptions: a request lost its blocks of the KV cache, and waited again."
        )
        self.prefix_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache, and not computed."
        )
        self.rejections = counter(
            "admission_rejections", "Requests rejected with status 429, by the reached limit.", "reason"
        )
        self.cache_usage = gauge(
            "kv_cache_usage_perc", "Share of the KV cache that running requests hold; 1 is all of it."
        )
        self.running = gauge("num_requests_running", "Requests that run.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self.waiting_tokens = gauge(
            "num_prompt_tokens_waiting", "Prompt tokens of the requests that wait for their first step."
        )
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token."
        )
        self.request_seconds = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of one request.",
            buckets=_PER_TOKEN_S,
        )
        self.step_seconds = histogram(
            "step_seconds", "Duration of one step: schedule, run, process.", "kind", buckets=_PER_TOKEN_S
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ("model", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, ("model",), registry=self.registry)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = _LATENCY_S
    ) -> Histogram:
        return Histogram(_PREFIX + name, text, ("model", *labels), buckets=buckets, registry=self.registry)

    def collector(self, kind: Callable[[CollectorRegistry], C]) -> C:
        """Return the registry's collector of this class; the first call constructs it with the registry."""
        with self._lock:
            found = self._collectors.get(kind)
            if found is None:
                found = self._collectors[kind] = kind(self.registry)
                self.registry.register(found)
        return cast(C, found)

    def for_model(self, name: str) -> GenerationMetrics:
        """Return the metrics of one model, with their labels resolved."""
        return GenerationMetrics(self, name)


class GenerationMetrics:
    """The metrics of one model's engine, reported by the engine's thread."""

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
        """Report the drafted and the accepted tokens of one step."""
        if drafted:
            self._draft_tokens.inc(drafted)
            self._accepted_tokens.inc(accepted)

    def occupancy(self, *, running: int, waiting: int, waiting_tokens: int, cache_usage: float) -> None:
        """Report the running and waiting requests, and the share of the KV cache in use."""
        self._cache_usage.set(cache_usage)
        self._running.set(running)
        self._waiting.set(waiting)
        self._waiting_tokens.set(waiting_tokens)

    def rejected(self, reason: str) -> None:
        """Report a rejected request; from any thread."""
        self._rejections.labels(self._model, reason).inc()

    def queued(self, seconds: float) -> None:
        """Report how long a request waited for its first step."""
        self._queue_time.observe(seconds)

    def generated(self, count: int) -> None:
        """Report new tokens of one request."""
        self._generation_tokens.inc(count)

    def first_token(self, *, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Report the time from arrival to the first token, and the cached part of the prompt."""
        self._first_token.observe(seconds)
        self._prefix_cache_queries.inc(prompt_tokens)
        self._prefix_cache_hits.inc(cached_tokens)

    def request_finished(
        self, reason: FinishReason, *, seconds: float, decode_seconds: float, new_tokens: int
    ) -> None:
        """Report a request that ended with a whole answer."""
        self._endings[reason.value].inc()
        self._request_seconds.observe(seconds)
        if new_tokens > 1:
            self._per_token.observe(decode_seconds / (new_tokens - 1))

    def request_failed(self) -> None:
        """Report a request that ended with an error."""
        self._endings["failed"].inc()

    def request_cancelled(self) -> None:
        """Report a request whose client disconnected."""
        self._endings["cancelled"].inc()


def bare_family(name: str, text: str, kind: str) -> Metric:
    """Return a metric family without samples whose name is shown as it is: a counter gets no `_total`.

    `kind` is Prometheus's type: counter, gauge or histogram.
    """
    return Metric(_BareName(name), text, kind)


class _BareName(str):
    """A name to which prometheus_client cannot append the `_total` of counters."""

    __slots__ = ()

    def __add__(self, suffix: str) -> str:
        return self if suffix == "_total" else str(self) + suffix
