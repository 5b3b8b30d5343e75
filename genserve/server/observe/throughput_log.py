"""Throughput log: a line for each text model that works, every ten seconds, as vLLM has it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge

from genserve.generation_metrics import Metrics
from genserve.log import quoted

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0


class ThroughputLog:
    """Logs the throughput of busy text models since the last line, from their metrics."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first interval; `clock` returns seconds."""
        # The label of a model appears in the last of these first.
        self._counters = (
            metrics.prefix_cache_hits,
            metrics.prefix_cache_queries,
            metrics.generation_tokens,
            metrics.prompt_tokens,
        )
        self._gauges = (metrics.waiting, metrics.running, metrics.cache_usage)
        self._clock = clock
        self._read_s = clock()
        self._counts: dict[str, list[float]] = {}

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.write()

    def write(self) -> None:
        """Log a line for each model that had tokens since the last call, or has requests."""
        now_s = self._clock()
        seconds, self._read_s = now_s - self._read_s, now_s
        gauges = [_by_model(gauge) for gauge in self._gauges]
        counters = [_by_model(counter) for counter in self._counters]
        for model in gauges[0]:
            waiting, running, cache_usage = (values[model] for values in gauges)
            counts = [values[model] for values in counters]
            before = self._counts.get(model, [0.0] * len(counts))
            self._counts[model] = counts
            hits, queries, generated, prompt = (now - then for now, then in zip(counts, before, strict=True))
            if prompt or generated or running or waiting:
                logger.info(
                    "%s: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
                    "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
                    "Prefix cache hit rate: %.1f%%",
                    quoted(model),
                    prompt / seconds,
                    generated / seconds,
                    running,
                    waiting,
                    100 * cache_usage,
                    100 * hits / queries if queries else 0,
                )


def _by_model(metric: Counter | Gauge) -> dict[str, float]:
    return {
        sample.labels["model"]: sample.value
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
