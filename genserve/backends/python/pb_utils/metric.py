"""Metric: a model's own counters, gauges and histograms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

from genserve.backends.python.host import current_host
from genserve.backends.python.metric_families import Kind, Series
from genserve.backends.python.pb_utils.error import TritonModelException

__all__ = ["Metric", "MetricFamily"]

T = TypeVar("T")


class MetricFamily:
    """Metrics of one name in the server's /metrics; the same name is the same family, in every model."""

    COUNTER: ClassVar = Kind.COUNTER
    GAUGE: ClassVar = Kind.GAUGE
    HISTOGRAM: ClassVar = Kind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: Kind) -> None:
        """Make a family, or find it.

        Raises:
            TritonModelException: no name for a metric, or one of another kind; or no server runs the model.
        """
        host = current_host()
        if host is None or host.families is None:
            raise TritonModelException("Error when creating MetricFamily: metrics not supported")
        self.instance = host.instance
        families = host.families
        self._family = _told(
            "Error when creating MetricFamily",
            self.instance,
            lambda: families.family(name, description=description, kind=kind),
        )

    def Metric(  # noqa: N802  # Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric of some labels.

        Args:
            labels: by name.
            buckets: of a histogram: the ascending upper bounds.

        Raises:
            TritonModelException: wrong labels or buckets.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and self._family.kind is not Kind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and self._family.kind is Kind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        series = _told(
            "Error when creating Metric",
            self.instance,
            lambda: self._family.series(labels or {}, buckets=buckets or ()),
        )
        return Metric(series, self)


class Metric:
    """One metric."""

    def __init__(self, series: Series, family: MetricFamily) -> None:
        self._series = series
        self._family = family  # which is shown as long as one of its metrics is held

    def increment(self, value: float) -> None:
        """Add to a counter or gauge; to a counter, not less than nothing."""
        self._do("Failed to increment metric value", lambda: self._series.increment(value))

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._do("Failed to set metric value", lambda: self._series.set(value))

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._do("Failed to observe metric value", lambda: self._series.observe(value))

    def value(self) -> float:
        """Return what a counter or gauge stands at."""
        return _told("Failed to get metric value", self._family.instance, self._series.value)

    def _do(self, what: str, act: Callable[[], None]) -> None:
        _told(what, self._family.instance, act)


def _told(what: str, instance: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except ValueError as error:
        raise TritonModelException(
            f"{what}: Failed to process the request for model '{instance}', message: {error}"
        ) from error
