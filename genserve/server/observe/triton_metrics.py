"""Triton metrics: the `nv_*` families, read from the models' statistics on each scrape."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from genserve.config.model_config import FIRST_RESPONSE
from genserve.errors import GenserveError
from genserve.generation_metrics import bare_family
from genserve.inference_statistics import ModelStatistics
from genserve.repository.model_versions import ModelVersion
from genserve.repository.served_models import ServedModels

# As Triton prints them; names that end in `_us` are in microseconds.
_COUNTERS: Mapping[str, tuple[str, Callable[[ModelStatistics], float]]] = {
    "nv_inference_request_success": (
        "Number of successful inference requests, all batch sizes",
        lambda statistics: statistics.success.count,
    ),
    "nv_inference_count": (
        "Number of inferences performed (does not include cached requests)",
        lambda statistics: statistics.inference_count,
    ),
    "nv_inference_exec_count": (
        "Number of model executions performed (does not include cached requests)",
        lambda statistics: statistics.execution_count,
    ),
}
# Left out with `counter_latencies=false`.
_LATENCY_COUNTERS: Mapping[str, tuple[str, Callable[[ModelStatistics], float]]] = {
    "nv_inference_request_duration_us": (
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda statistics: statistics.success.ns // 1000,
    ),
    "nv_inference_queue_duration_us": (
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda statistics: statistics.queue.ns // 1000,
    ),
    "nv_inference_compute_input_duration_us": (
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda statistics: statistics.compute_input.ns // 1000,
    ),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda statistics: statistics.compute_infer.ns // 1000,
    ),
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda statistics: statistics.compute_output.ns // 1000,
    ),
}
# Only for models with a response cache; as in Triton, left out with `counter_latencies=false`.
_CACHE_COUNTERS: Mapping[str, tuple[str, Callable[[ModelStatistics], float]]] = {
    "nv_cache_num_hits_per_model": (
        "Number of cache hits per model",
        lambda statistics: statistics.cache_hit.count,
    ),
    "nv_cache_hit_duration_per_model": (
        "Total cache hit duration per model, in microseconds",
        lambda statistics: statistics.cache_hit.ns // 1000,
    ),
    "nv_cache_num_misses_per_model": (
        "Number of cache misses per model",
        lambda statistics: statistics.cache_miss.count,
    ),
    "nv_cache_miss_duration_per_model": (
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda statistics: statistics.cache_miss.ns // 1000,
    ),
}
_GAUGES: Mapping[str, tuple[str, Callable[[ModelVersion], float]]] = {
    "nv_inference_pending_request_count": (
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda model: model.num_waiting,
    ),
    "nv_model_load_duration_secs": ("Model load time in seconds", lambda model: model.load_s),
}
_FAILURES = ("nv_inference_request_failure", "Number of failed inference requests, all batch sizes")
_PROC = Path("/proc")
# The settings of `--metrics-config`, with their defaults.
_METRICS_CONFIG = {"counter_latencies": True, "histogram_latencies": False}
_SWITCH = {"true": True, "false": False}


class InferenceCollector(Collector):
    """Counts and durations of every loaded version of every model, from their statistics."""

    def __init__(
        self,
        models: ServedModels,
        *,
        latency_counters: bool = True,
        counts: Callable[[ModelVersion], bool] = lambda _: True,
    ) -> None:
        """Read the models that it `counts`."""
        self._models = models
        self._latency_counters = latency_counters
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the families; the protocol of prometheus_client."""
        served = list(filter(self._counts, self._models.served))
        cached = [model for model in served if model.config.response_cache]
        yield _failures(served)
        groups = [(_COUNTERS, served)]
        if self._latency_counters:
            groups += [(_LATENCY_COUNTERS, served), (_CACHE_COUNTERS, cached)]
        for families, models in groups:
            for name, (text, count) in families.items():
                yield _family(name, text, "counter", ((_labels(m), count(m.statistics)) for m in models))
        for name, (text, value) in _GAUGES.items():
            yield _family(name, text, "gauge", ((_labels(model), value(model)) for model in served))
        yield from _first_responses(served)


class CpuCollector(Collector):
    """Use of the machine's processors and memory, on systems with /proc."""

    def __init__(self, *, interval_s: float = 0.0) -> None:
        """Begin to measure; values are refreshed at most once in `interval_s`, for all scrapers."""
        self._busy, self._total = _cpu_ticks()
        self._interval_s = interval_s
        self._use, self._memory = 0.0, _memory_bytes() if self._total else {}
        self._measured_s = -math.inf
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the use over the last interval; the protocol of prometheus_client."""
        if not self._total:
            return
        with self._lock:
            if time.monotonic() - self._measured_s >= self._interval_s:
                self._measure()
            use, memory = self._use, self._memory
        for name, text, value in (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", use),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory["MemTotal"]),
            (
                "nv_cpu_memory_used_bytes",
                "CPU used memory (RAM), in bytes",
                memory["MemTotal"] - memory["MemAvailable"],
            ),
        ):
            yield _family(name, text, "gauge", [({}, value)])

    def _measure(self) -> None:
        busy, total = _cpu_ticks()
        self._use = (busy - self._busy) / max(1, total - self._total)
        self._busy, self._total = busy, total
        self._memory = _memory_bytes()
        self._measured_s = time.monotonic()


def read_metrics_config(words: Sequence[str]) -> dict[str, bool]:
    """Parse the values of `--metrics-config`, SETTING=VALUE; the last one of a setting counts.

    Raises:
        GenserveError: an unknown setting or value; the remedy lists the known ones.
    """
    given = dict(_METRICS_CONFIG)
    for word in words:
        name, _, value = word.partition("=")
        if name in given and value in _SWITCH:
            given[name] = _SWITCH[value]
        elif name in ("summary_latencies", "summary_quantiles") and word != "summary_latencies=false":
            raise GenserveError(
                f"--metrics-config {word}: summaries are not supported, as their quantiles cannot be "
                "aggregated over servers",
                remedy="use histogram_latencies=true, and Prometheus' histogram_quantile()",
            )
        elif word != "summary_latencies=false":
            raise GenserveError(
                f"--metrics-config {word} is not a valid setting",
                remedy="use " + " or ".join(f"{name}=true|false" for name in given),
            )
    return given


def _first_responses(served: Iterable[ModelVersion]) -> Iterator[Metric]:
    """Yield Triton's histogram of first responses, if models measure it."""
    measured = [(model, histogram) for model in served if (histogram := model.statistics.first_response)]
    if not measured:
        return
    text = "Duration from request to first response in milliseconds"
    family = bare_family(FIRST_RESPONSE, text, "histogram")
    for model, histogram in measured:
        labels = _labels(model)
        buckets, sum_ms = histogram.read()
        for bound, count in buckets:
            at_most = "+Inf" if bound == math.inf else repr(float(bound)).removesuffix(".0")
            family.add_sample(f"{FIRST_RESPONSE}_bucket", labels | {"le": at_most}, count)
        family.add_sample(f"{FIRST_RESPONSE}_count", labels, buckets[-1][1])
        family.add_sample(f"{FIRST_RESPONSE}_sum", labels, sum_ms)
    yield family


def _family(name: str, text: str, kind: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    family = bare_family(name, text, kind)
    for labels, value in values:
        family.add_sample(name, dict(labels), value)
    return family


def _failures(served: Iterable[ModelVersion]) -> Metric:
    name, text = _FAILURES
    values = (
        (_labels(model) | {"reason": reason.value}, count)
        for model in served
        for reason, count in model.statistics.failures.items()
    )
    return _family(name, text, "counter", values)


def _labels(model: ModelVersion) -> dict[str, str]:
    tags = {f"_{key}": value for key, value in model.config.metric_tags.items()}
    return tags | {"model": model.name, "version": str(model.version)}


def _cpu_ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks of all processors; zeros where unknown."""
    if os.name != "posix" or not (_PROC / "stat").exists():
        return 0, 0
    ticks = [int(word) for word in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def _memory_bytes() -> dict[str, int]:
    lines = (_PROC / "meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
