"""Custom metrics: counters, gauges and histograms that models define, also from a stub process.

prometheus_client is imported where metrics are collected, in the server: it would take a tenth of the
start of each stub process.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from genserve.histogram import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OTHER_TYPE = "Family name already exists with different type"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(Enum):
    """The kind of a metric; the value is Prometheus's name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CustomMetrics:
    """All custom metrics of a server; a family lives as long as a model holds it. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Make a collector without metrics; names that the registry already has are rejected."""
        self._registry = registry
        self._lock = threading.Lock()
        self._families: weakref.WeakValueDictionary[str, CustomMetricFamily] = weakref.WeakValueDictionary()

    def family(self, name: str, *, description: str, kind: MetricKind) -> CustomMetricFamily:
        """Return the family of a name, which is shared by all models.

        Raises:
            ValueError: in Triton's words: the name is invalid, or that of a family of another kind, or of a
                metric of the server.
        """
        if not _NAME.fullmatch(name):
            raise ValueError("Invalid metric name")
        if self._is_taken(name):
            raise ValueError(_OTHER_TYPE)
        with self._lock:
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = CustomMetricFamily(name, description=description, kind=kind)
        if family.kind is not kind:
            raise ValueError(_OTHER_TYPE)
        return family

    def _is_taken(self, name: str) -> bool:
        """Whether the server has a metric with this name."""
        if name.startswith("vllm:"):  # which /metrics adds to those of the registry
            return True
        if self._registry is None or name in self._families:
            return False
        shown = any(
            name in (metric.name, *(sample.name for sample in metric.samples))
            for metric in self._registry.collect()
        )
        return shown and name not in self._families  # another thread may have made it meanwhile

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its metrics."""
        with self._lock:
            metrics = list(self._families.values())
        return (family.collect() for family in metrics if family.has_metrics)

    def describe(self) -> Iterator[Metric]:
        """Return nothing: families come and go."""
        return iter(())


class CustomMetricFamily:
    """Metrics of one name, by their labels."""

    def __init__(self, name: str, *, description: str, kind: MetricKind) -> None:
        self.name = name
        self.kind = kind
        self.description = description
        self._lock = threading.Lock()
        self._metrics: dict[tuple[tuple[str, str], ...], CustomMetric] = {}

    @property
    def has_metrics(self) -> bool:
        """Whether it has metrics."""
        return bool(self._metrics)

    def metric(self, labels: Mapping[str, str], *, buckets: Sequence[float] = ()) -> CustomMetric:
        """Return the metric of some labels.

        Raises:
            ValueError: in Triton's words: a label is invalid, or the boundaries are not ascending.
        """
        if not all(isinstance(text, str) for pair in labels.items() for text in pair):
            raise ValueError("attempt to access JSON non-string as string")
        if not all(_LABEL.fullmatch(label) for label in labels):
            raise ValueError("Invalid label name")
        if any(upper <= lower for lower, upper in pairwise(buckets)):
            raise ValueError("Bucket Boundaries must be strictly sorted")
        with self._lock:
            return self._metrics.setdefault(
                tuple(sorted(labels.items())), CustomMetric(self.name, kind=self.kind, buckets=buckets)
            )

    def collect(self) -> Metric:
        """Return the family in the form of prometheus_client."""
        from genserve.generation_metrics import bare_family

        metric = bare_family(self.name, self.description, self.kind.value)
        with self._lock:
            metrics = list(self._metrics.items())
        for labels, custom_metric in metrics:
            custom_metric.add_samples(metric, dict(labels))
        return metric


class CustomMetric:
    """One metric. Methods that its kind does not support raise ValueError in Triton's words."""

    def __init__(self, name: str, *, kind: MetricKind, buckets: Sequence[float] = ()) -> None:
        self._name = name
        self._kind = kind
        self._lock = threading.Lock()
        self._value = 0.0
        self._histogram = Histogram(buckets)

    def increment(self, value: float) -> None:
        """Add to a counter or gauge.

        Raises:
            ValueError: it is a histogram, or a counter and the value is negative.
        """
        self._check("Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and value < 0:
            raise ValueError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative "
                "values."
            )
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check("Set", MetricKind.GAUGE)
        with self._lock:
            self._value = value

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._check("Observe", MetricKind.HISTOGRAM)
        self._histogram.observe(value)

    def value(self) -> float:
        """Return the value of a counter or gauge."""
        self._check("Value", MetricKind.COUNTER, MetricKind.GAUGE)
        return self._value

    def add_samples(self, metric: Metric, labels: dict[str, str]) -> None:
        """Add its samples to a metric of prometheus_client."""
        from prometheus_client.utils import floatToGoString

        name = self._name
        if self._kind is not MetricKind.HISTOGRAM:
            metric.add_sample(name, labels, self._value)
            return
        buckets, total = self._histogram.read()
        metric.add_sample(f"{name}_count", labels, buckets[-1][1])
        metric.add_sample(f"{name}_sum", labels, total)
        for boundary, count in buckets:
            upper = floatToGoString(boundary)  # type: ignore[no-untyped-call]
            metric.add_sample(f"{name}_bucket", {**labels, "le": upper}, count)

    def _check(self, verb: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise ValueError(f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {verb}")


# Calls a method of a metric in the server. Arguments: name, description and kind of the family, the labels
# (None: make the family only), the buckets, the method of `CustomMetric` ("": none) and its arguments. Raises
# ValueError.
Measure: TypeAlias = Callable[..., Any]


class StubMetrics:
    """In the server: the custom metrics of one stub process, which are held as long as it lives."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._families = metrics
        self._held: set[CustomMetricFamily] = set()

    def measure(
        self,
        family: tuple[str, str, MetricKind],
        labels: Mapping[str, str] | None = None,
        buckets: Sequence[float] = (),
        method: str = "",
        *values: float,
    ) -> Any:
        """Call a method of a metric; a `Measure`."""
        name, description, kind = family
        found = self._families.family(name, description=description, kind=kind)
        self._held.add(found)
        metric = None if labels is None else found.metric(labels, buckets=buckets)
        return getattr(metric, method)(*values) if method else None

    def release(self) -> None:
        """Release the families: the process is dead."""
        self._held.clear()


class RemoteCustomMetrics(CustomMetrics):
    """In the stub process: families and metrics whose methods are called in the server."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        self._measure = measure

    def family(self, name: str, *, description: str, kind: MetricKind) -> CustomMetricFamily:
        """See `CustomMetrics.family`."""
        self._measure((name, description, kind))
        return _RemoteMetricFamily(self._measure, name, description=description, kind=kind)


class _RemoteMetricFamily(CustomMetricFamily):
    def __init__(self, measure: Measure, name: str, *, description: str, kind: MetricKind) -> None:
        super().__init__(name, description=description, kind=kind)
        self._measure = measure

    def metric(self, labels: Mapping[str, str], *, buckets: Sequence[float] = ()) -> CustomMetric:
        where = ((self.name, self.description, self.kind), labels, buckets)
        self._measure(*where)
        return _RemoteMetric(lambda method, *values: self._measure(*where, method, *values))


class _RemoteMetric(CustomMetric):
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def increment(self, value: float) -> None:
        self._call("increment", value)

    def set(self, value: float) -> None:
        self._call("set", value)

    def observe(self, value: float) -> None:
        self._call("observe", value)

    def value(self) -> float:
        value: float = self._call("value")
        return value
