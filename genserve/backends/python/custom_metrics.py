"""Custom metrics: counters, gauges and histograms that models define, also from a stub process."""

from __future__ import annotations

import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from genserve.generation_metrics import bare_family

__all__ = [
    "CustomMetric",
    "CustomMetricFamily",
    "CustomMetrics",
    "Measure",
    "MetricKind",
    "RemoteCustomMetrics",
    "StubMetrics",
]


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OTHER_TYPE = "Family name already exists with different type"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(Enum):
    """What a metric counts; the value is Prometheus's word."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CustomMetrics(Collector):
    """All metrics of one server; they live as long as a model holds them. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Begin without metrics; none may take a name that the registry shows already."""
        self._registry = registry
        self._lock = threading.Lock()
        self._families: weakref.WeakValueDictionary[str, CustomMetricFamily] = weakref.WeakValueDictionary()

    def family(self, name: str, *, description: str, kind: MetricKind) -> CustomMetricFamily:
        """Return the family of a name, which another model may have made.

        Raises:
            ValueError: in Triton's words: no name for a metric, or that of a family of another kind, or of
                one that is not a model's.
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
        """Whether the registry shows series of this name that are not of this family."""
        if self._registry is None or name in self._families:
            return False
        shown = any(
            name in (metric.name, *(sample.name for sample in metric.samples))
            for metric in self._registry.collect()
        )
        return shown and name not in self._families  # which another thread may have made meanwhile

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its series."""
        with self._lock:
            metrics = list(self._families.values())
        return (family.metric() for family in metrics if family.has_series)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: metrics come and go."""
        return iter(())


class CustomMetricFamily:
    """Metrics of one name, by their labels."""

    def __init__(self, name: str, *, description: str, kind: MetricKind) -> None:
        self.name = name
        self.kind = kind
        self._description = description
        self._lock = threading.Lock()
        self._series: dict[tuple[tuple[str, str], ...], CustomMetric] = {}

    @property
    def has_series(self) -> bool:
        """Whether there is anything to show."""
        return bool(self._series)

    def series(self, labels: Mapping[str, str], *, buckets: Sequence[float] = ()) -> CustomMetric:
        """Return the metric of some labels.

        Raises:
            ValueError: in Triton's words: a label that is none, boundaries that do not ascend.
        """
        if not all(isinstance(text, str) for pair in labels.items() for text in pair):
            raise ValueError("attempt to access JSON non-string as string")
        if not all(_LABEL.fullmatch(label) for label in labels):
            raise ValueError("Invalid label name")
        if any(upper <= lower for lower, upper in pairwise(buckets)):
            raise ValueError("Bucket Boundaries must be strictly sorted")
        with self._lock:
            return self._series.setdefault(
                tuple(sorted(labels.items())), CustomMetric(self.name, kind=self.kind, buckets=buckets)
            )

    def metric(self) -> Metric:
        """Return what Prometheus is shown."""
        metric = bare_family(self.name, self._description, self.kind.value)
        with self._lock:
            series = list(self._series.items())
        for labels, one in series:
            one.add_samples(metric, dict(labels))
        return metric


class CustomMetric:
    """One metric. Its methods say in Triton's words what its kind does not support."""

    def __init__(self, name: str, *, kind: MetricKind, buckets: Sequence[float] = ()) -> None:
        self._name = name
        self._kind = kind
        self._lock = threading.Lock()
        self._value = 0.0
        self._buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)

    def increment(self, value: float) -> None:
        """Add to a counter or gauge.

        Raises:
            ValueError: a histogram, or less than nothing to a counter.
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
        with self._lock:
            self._value += value
            self._counts[bisect_left(self._buckets, value)] += 1

    def value(self) -> float:
        """Return what a counter or gauge stands at."""
        self._check("Value", MetricKind.COUNTER, MetricKind.GAUGE)
        return self._value

    def add_samples(self, metric: Metric, labels: dict[str, str]) -> None:
        """Add what Prometheus is shown of it."""
        name = self._name
        if self._kind is not MetricKind.HISTOGRAM:
            metric.add_sample(name, labels, self._value)
            return
        with self._lock:
            total, counts = self._value, list(accumulate(self._counts))
        metric.add_sample(f"{name}_count", labels, counts[-1])
        metric.add_sample(f"{name}_sum", labels, total)
        for boundary, count in zip((*self._buckets, float("inf")), counts, strict=True):
            upper = floatToGoString(boundary)  # type: ignore[no-untyped-call]
            metric.add_sample(f"{name}_bucket", {**labels, "le": upper}, count)

    def _check(self, verb: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise ValueError(f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {verb}")


# Does something with a metric: name, description and kind of its family, its labels (None: only the family
# is wanted), its buckets, the method of `CustomMetric` ("": none) and what it takes. Raises ValueError.
Measure: TypeAlias = Callable[..., Any]


class StubMetrics:
    """In the server: what one process does to the metrics, which are held as long as it lives."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self._families = metrics
        self._held: set[CustomMetricFamily] = set()

    def measure(
        self,
        family: tuple[str, str, MetricKind],
        labels: Mapping[str, str] | None = None,
        buckets: Sequence[float] = (),
        verb: str = "",
        *values: float,
    ) -> Any:
        """Be the `Measure` of the process."""
        name, description, kind = family
        found = self._families.family(name, description=description, kind=kind)
        self._held.add(found)
        series = None if labels is None else found.series(labels, buckets=buckets)
        return getattr(series, verb)(*values) if verb else None

    def forget(self) -> None:
        """Let go of the metrics: the process is gone."""
        self._held.clear()


class RemoteCustomMetrics(CustomMetrics):
    """In the process: metrics and series whose methods are called in the server."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        self._measure = measure

    def family(self, name: str, *, description: str, kind: MetricKind) -> CustomMetricFamily:
        """Make a family in the server, or find it; raises ValueError."""
        self._measure((name, description, kind))
        return _RemoteMetricFamily(self._measure, name, description=description, kind=kind)


class _RemoteMetricFamily(CustomMetricFamily):
    def __init__(self, measure: Measure, name: str, *, description: str, kind: MetricKind) -> None:
        super().__init__(name, description=description, kind=kind)
        self._measure = measure

    def series(self, labels: Mapping[str, str], *, buckets: Sequence[float] = ()) -> CustomMetric:
        where = ((self.name, self._description, self.kind), labels, buckets)
        self._measure(*where)
        return _RemoteMetric(lambda verb, *values: self._measure(*where, verb, *values))


class _RemoteMetric(CustomMetric):
    def __init__(self, do: Callable[..., Any]) -> None:
        self._do = do

    def increment(self, value: float) -> None:
        self._do("increment", value)

    def set(self, value: float) -> None:
        self._do("set", value)

    def observe(self, value: float) -> None:
        self._do("observe", value)

    def value(self) -> float:
        answer: float = self._do("value")
        return answer
