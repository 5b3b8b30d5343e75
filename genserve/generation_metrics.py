"""Generation metrics: the Prometheus counters, gauges and histograms of text generation.

The names are vLLM's with genserve's prefix, in base units (seconds). The labels are fixed, so a request
cannot create a new series.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Literal, TypeAlias, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from genserve.completion import ABORT, ERROR, FinishReason
from genserve.histogram import Histogram

C = TypeVar("C", bound=Collector)
# A scrape of a deployment shows nothing of its replicas, each replica, or their sum.
Replicas: TypeAlias = Literal["none", "each", "sum"]

_PREFIX = "genserve_"
# A histogram that vLLM has too includes all of vLLM's bucket bounds, so that alerts on one bucket keep
# working.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST_S = (
    0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class HistogramCollector(Collector):
    """The histograms of one metric, by label values.

    Unlike prometheus_client's, they count many equal values at once.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._label_names = tuple(labels)
        self._bounds = tuple(bounds)
        self._bound_labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._histograms: dict[tuple[str, ...], Histogram] = {}

    def labels(self, *values: str) -> Histogram:
        """Return the histogram with these labels; the first call makes it."""
        return self._histograms.setdefault(values, Histogram(self._bounds))

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family, as prometheus_client's `Collector` specifies."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, histogram in list(self._histograms.items()):
            buckets, total = histogram.read()
            counts = [count for _, count in buckets]
            family.add_metric(values, list(zip(self._bound_labels, counts, strict=True)), total)
        yield family


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._collectors: dict[object, Collector] = {}
        self._add_counters()
        self._add_gauges()
        self._add_latencies()
        self._add_sizes()

    def _add_counters(self) -> None:
        counter = self._counter
        self.requests = counter(
            "requests",
            "Answers that ended, by finished_reason: stop, length, repetition, abort (the client "
            "disconnected) or error.",
            "finished_reason",
        )
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens computed, also again after a preemption."
        )
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
        self.disk_cache_queries = counter(
            "external_prefix_cache_queries", "Prompt tokens looked up in the prefix cache on disk."
        )
        self.disk_cache_hits = counter(
            "external_prefix_cache_hits", "Prompt tokens read from the prefix cache on disk."
        )
        self.disk_cache_read_bytes = counter(
            "prefix_cache_disk_read_bytes", "Bytes read from the prefix cache on disk."
        )
        self.disk_cache_written_bytes = counter(
            "prefix_cache_disk_written_bytes", "Bytes written to the prefix cache on disk."
        )
        self.snapshot_hits = counter(
            "state_snapshot_hits", "Requests that continued from a snapshot of a recurrent state."
        )
        self.recomputed_tokens = counter(
            "state_recomputed_tokens",
            "Tokens computed again although their keys and values were cached, for lack of a snapshot.",
        )
        self.adapter_requests = counter(
            "adapter_requests", "Answers that ended, by the adapter that their requests chose.", "adapter"
        )
        self.adapter_tokens = counter(
            "adapter_generation_tokens", "Tokens of these answers, by the adapter.", "adapter"
        )
        self.adapter_packs = counter(
            "adapter_packs", "How often an adapter was read from its files into memory."
        )
        self.rejections = counter(
            "admission_rejections",
            "Requests rejected with status 429, by reason: max_queue, max_queue_tokens, predicted_wait or "
            "queue_timeout; in an ingress replicas_full.",
            "reason",
        )
        self.interrupted_calls = counter(
            "interrupted_calls",
            "In an ingress: calls that lost their replica, by outcome: resumed at another one after the "
            "tokens that were sent, retried from the beginning, or failed.",
            "outcome",
        )

    def _add_gauges(self) -> None:
        gauge = self._gauge
        self.cache_usage = gauge(
            "kv_cache_usage_perc", "Share of the KV cache that running requests hold; 1 is all of it."
        )
        self.state_usage = gauge(
            "state_slots_usage_perc",
            "Share of the slots of recurrent states that running requests hold; 1 is all of them.",
        )
        self.running = gauge(
            "num_requests_running",
            "Answers, beams and logits requests that hold blocks of the KV cache.",
        )
        self.waiting = gauge(
            "num_requests_waiting", "Answers, beams and logits requests that wait to be scheduled."
        )
        self.waiting_tokens = gauge(
            "num_prompt_tokens_waiting", "Prompt tokens of the requests that wait for their first step."
        )
        self.adapters = gauge("adapters", "Adapters that requests can choose.")
        self.max_loaded_adapters = gauge("max_loaded_adapters", "Adapters that may be in memory together.")
        self.adapter_running = gauge(
            "num_adapter_requests_running", "Answers after their first step, by their adapter.", "adapter"
        )
        self.adapter_waiting = gauge(
            "num_adapter_requests_waiting", "Answers before their first step, by their adapter.", "adapter"
        )
        self.block_size = gauge("kv_cache_block_size", "Tokens in a block of the KV cache.")
        self.num_blocks = gauge("kv_cache_num_blocks", "Blocks of the KV cache.")

    def _add_latencies(self) -> None:
        histogram = self._histogram
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From a request's first step to its first token."
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From a request's first token to its last."
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", buckets=_FIRST_TOKEN_S
        )
        self.request_seconds = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Time between two steps that gave a request tokens.",
            buckets=_PER_TOKEN_S,
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of one request.",
            buckets=_PER_TOKEN_S,
        )
        self.interruption_seconds = histogram(
            "interruption_seconds",
            "In an ingress: from the loss of a call's replica to what another one sent next.",
        )
        self.step_seconds = histogram(
            "step_seconds",
            "Duration of one step, by kind: prefill if it computed prompt tokens, else decode.",
            "kind",
            buckets=_STEP_S,
        )

    def _add_sizes(self) -> None:
        histogram = self._histogram
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of one request.", buckets=_REQUEST_TOKENS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for one request.", buckets=_REQUEST_TOKENS
        )
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest of the choices that were requested together.",
            buckets=_REQUEST_TOKENS,
        )
        self.step_tokens = histogram(
            "iteration_tokens",
            "Prompt tokens computed and tokens generated by one step.",
            buckets=_STEP_TOKENS,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ("model", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, ("model", *labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = _REQUEST_S
    ) -> HistogramCollector:
        collector = HistogramCollector(_PREFIX + name, text, ("model", *labels), buckets)
        self.registry.register(collector)
        return collector

    def shown(self, _replicas: Replicas = "none") -> Collector:
        """Return the collector for a scrape; `deploy/ingress/deployment_metrics.py` uses the argument."""
        return self.registry

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
        self._finished = {
            reason: metrics.requests.labels(model, reason)
            for reason in (*(reason.value for reason in FinishReason), ERROR, ABORT)
        }
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._preemptions = metrics.preemptions.labels(model)
        self._draft_tokens = metrics.draft_tokens.labels(model)
        self._accepted_tokens = metrics.accepted_tokens.labels(model)
        self._prefix_cache_queries = metrics.prefix_cache_queries.labels(model)
        self._prefix_cache_hits = metrics.prefix_cache_hits.labels(model)
        self._disk_cache_queries = metrics.disk_cache_queries.labels(model)
        self._disk_cache_hits = metrics.disk_cache_hits.labels(model)
        self._disk_cache_read_bytes = metrics.disk_cache_read_bytes.labels(model)
        self._disk_cache_written_bytes = metrics.disk_cache_written_bytes.labels(model)
        self._cache_usage = metrics.cache_usage.labels(model)
        self._running = metrics.running.labels(model)
        self._waiting = metrics.waiting.labels(model)
        self._waiting_tokens = metrics.waiting_tokens.labels(model)
        self._block_size = metrics.block_size.labels(model)
        self._num_blocks = metrics.num_blocks.labels(model)
        # Only a model with recurrent states has these series.
        self._states = cache(
            lambda: (
                metrics.state_usage.labels(model),
                metrics.snapshot_hits.labels(model),
                metrics.recomputed_tokens.labels(model),
            )
        )
        # Only a model with adapters has these series.
        self._adapters = cache(partial(metrics.adapters.labels, model))
        self._max_loaded_adapters = cache(partial(metrics.max_loaded_adapters.labels, model))
        self._adapter_running = partial(metrics.adapter_running.labels, model)      # by adapter
        self._adapter_waiting = partial(metrics.adapter_waiting.labels, model)
        self._adapter_packs = cache(partial(metrics.adapter_packs.labels, model))
        self._adapter_requests = partial(metrics.adapter_requests.labels, model)    # by adapter
        self._adapter_tokens = partial(metrics.adapter_tokens.labels, model)
        self._rejections = cache(partial(metrics.rejections.labels, model))     # by reason
        self._queue_time = metrics.queue_time.labels(model)
        self._prefill_seconds = metrics.step_seconds.labels(model, "prefill")
        self._decode_seconds = metrics.step_seconds.labels(model, "decode")
        self._step_tokens = metrics.step_tokens.labels(model)
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._first_token = metrics.time_to_first_token.labels(model)
        self._per_token = metrics.time_per_output_token.labels(model)
        self._request_seconds = metrics.request_seconds.labels(model)
        self._prefill_time = metrics.prefill_time.labels(model)
        self._decode_time = metrics.decode_time.labels(model)
        self._request_prompt_tokens = metrics.request_prompt_tokens.labels(model)
        self._request_generation_tokens = metrics.request_generation_tokens.labels(model)
        self._max_generation_tokens = metrics.max_generation_tokens.labels(model)

    def cache(self, *, block_size: int, num_blocks: int) -> None:
        """Report the size of the KV cache."""
        self._block_size.set(block_size)
        self._num_blocks.set(num_blocks)

    def step(self, *, seconds: float, prompt_tokens: int, preempted: int) -> None:
        """Report one step; `prompt_tokens` 0 means a decode."""
        if preempted:
            self._preemptions.inc(preempted)
        if prompt_tokens:
            self._prefill_seconds.observe(seconds)
            self._prompt_tokens.inc(prompt_tokens)
        else:
            self._decode_seconds.observe(seconds)

    def generated(self, *, tokens: int, prompt_tokens: int, latencies_s: Mapping[float, int]) -> None:
        """Report the tokens of one step.

        Args:
            tokens: the number of generated tokens.
            prompt_tokens: the number of computed prompt tokens.
            latencies_s: the number of sequences by the seconds since their previous tokens.
        """
        if tokens:
            self._generation_tokens.inc(tokens)
        self._step_tokens.observe(prompt_tokens + tokens)
        for seconds, count in latencies_s.items():
            self._inter_token_latency.observe(seconds, count=count)

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

    def states(self, *, usage: float, snapshot_hits: int, recomputed_tokens: int) -> None:
        """Report the share of the state slots in use and what one step counted, of a model with states."""
        state_usage, hits, recomputed = self._states()
        state_usage.set(usage)
        hits.inc(snapshot_hits)
        recomputed.inc(recomputed_tokens)

    def adapters(self, *, known: int, max_loaded: int) -> None:
        """Report how many adapters requests can choose, and how many may be in memory; from any thread."""
        self._adapters().set(known)
        self._max_loaded_adapters().set(max_loaded)

    def adapter_requests(self, adapter: str, *, waiting: int, running: int = 0) -> None:
        """Report how many more answers of an adapter wait for their first step, and have had it."""
        self._adapter_waiting(adapter).inc(waiting)
        self._adapter_running(adapter).inc(running)

    def adapter_packed(self) -> None:
        """Report that an adapter was read into memory; from any thread."""
        self._adapter_packs().inc()

    def adapter_finished(self, adapter: str, *, new_tokens: int) -> None:
        """Report an answer of an adapter that ended."""
        self._adapter_requests(adapter).inc()
        self._adapter_tokens(adapter).inc(new_tokens)

    def rejected(self, reason: str, *, count: int = 1) -> None:
        """Report rejected requests; from any thread. A count of 0 makes the reason known to Prometheus."""
        self._rejections(reason).inc(count)

    def queued(self, seconds: float) -> None:
        """Report how long a request waited for its first step."""
        self._queue_time.observe(seconds)

    def first_token(self, *, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Report the time from arrival to the first token, and the cached part of the prompt."""
        self._first_token.observe(seconds)
        self._prefix_cache_queries.inc(prompt_tokens)
        self._prefix_cache_hits.inc(cached_tokens)

    def disk_cache_queried(self, *, tokens: int) -> None:
        """Report how many tokens of a prompt were looked up on the disk; from any thread."""
        self._disk_cache_queries.inc(tokens)

    def disk_cache_hit(self, *, tokens: int, read_bytes: int) -> None:
        """Report tokens of a prompt that were read from the disk; from any thread."""
        self._disk_cache_hits.inc(tokens)
        self._disk_cache_read_bytes.inc(read_bytes)

    def disk_cache_written(self, num_bytes: int) -> None:
        """Report bytes of blocks that were written to the disk; from any thread."""
        self._disk_cache_written_bytes.inc(num_bytes)

    def request_finished(
        self,
        reason: FinishReason,
        *,
        seconds: float,
        prefill_seconds: float,
        decode_seconds: float,
        prompt_tokens: int,
        new_tokens: int,
    ) -> None:
        """Report a request that ended with a whole answer."""
        self._finished[reason.value].inc()
        self._request_seconds.observe(seconds)
        self._prefill_time.observe(prefill_seconds)
        self._decode_time.observe(decode_seconds)
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_generation_tokens.observe(new_tokens)
        if new_tokens > 1:
            self._per_token.observe(decode_seconds / (new_tokens - 1))

    def choices_finished(self, *, most_tokens: int) -> None:
        """Report the end of all choices of a request; `most_tokens` is the length of the longest choice."""
        self._max_generation_tokens.observe(most_tokens)

    def request_failed(self) -> None:
        """Report a request that ended with an error."""
        self._finished[ERROR].inc()

    def request_cancelled(self) -> None:
        """Report a request whose client disconnected."""
        self._finished[ABORT].inc()


def bare_family(name: str, text: str, kind: str) -> Metric:
    """Return a metric family without samples that keeps its name: a counter gets no `_total`.

    `kind` is Prometheus's type: counter, gauge or histogram.
    """
    return Metric(_BareName(name), text, kind)


class _BareName(str):
    """A name to which prometheus_client cannot append the `_total` of counters."""

    __slots__ = ()

    def __add__(self, suffix: str) -> str:
        return self if suffix == "_total" else str(self) + suffix
