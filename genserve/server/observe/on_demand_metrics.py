"""On-demand metrics: which models are loaded, what they take, and how often they come and go."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from genserve.repository.on_demand import OnDemandModels


class OnDemandCollector(Collector):
    """The models that are loaded on demand."""

    def __init__(self, models: OnDemandModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield the families; the protocol of prometheus_client."""
        models = self._models
        memory = GaugeMetricFamily(
            "genserve_model_memory_bytes", "Memory that a loaded model may take.", labels=["model"]
        )
        for one in models.loaded():
            memory.add_metric([one.name], one.size_bytes)
        yield memory
        if models.budget_bytes is not None:
            text = "Memory that all models together may take."
            yield GaugeMetricFamily("genserve_model_memory_budget_bytes", text, value=models.budget_bytes)
        text = "Requests that wait until their model is loaded."
        yield GaugeMetricFamily("genserve_requests_waiting_for_load", text, value=models.num_waiting)
        text = "Loads that have failed."
        yield CounterMetricFamily("genserve_model_load_failures", text, value=models.num_failed_loads)
        unloads = CounterMetricFamily("genserve_model_unloads", "Unloads by their reason.", labels=["reason"])
        for reason, count in models.num_unloads.items():
            unloads.add_metric([reason], count)
        yield unloads
        buckets, total_s = models.load_s.read()
        bounds = [("+Inf" if bound == float("inf") else str(float(bound)), count) for bound, count in buckets]
        text = "Duration of loads."
        yield HistogramMetricFamily("genserve_model_load_seconds", text, buckets=bounds, sum_value=total_s)
