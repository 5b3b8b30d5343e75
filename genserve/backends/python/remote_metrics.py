"""Remote metrics: the server's metric families, as the process of a model sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from genserve.backends.python.metric_families import Family, Kind, MetricFamilies, Series

__all__ = ["Measure", "Measures", "RemoteFamilies"]

# Does something with a metric: name, description and kind of its family, its labels (None: only the family
# is wanted), its buckets, the method of `Series` ("": none) and what it takes. Raises ValueError.
Measure: TypeAlias = Callable[..., Any]


class Measures:
    """In the server: what one process does to the families, which are held as long as it lives."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._held: set[Family] = set()

    def measure(
        self,
        family: tuple[str, str, Kind],
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
        """Let go of the families: the process is gone."""
        self._held.clear()


class RemoteFamilies(MetricFamilies):
    """In the process: families and series whose methods are called in the server."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        self._measure = measure

    def family(self, name: str, *, description: str, kind: Kind) -> Family:
        """Make a family in the server, or find it; raises ValueError."""
        self._measure((name, description, kind))
        return _RemoteFamily(self._measure, name, description=description, kind=kind)


class _RemoteFamily(Family):
    def __init__(self, measure: Measure, name: str, *, description: str, kind: Kind) -> None:
        super().__init__(name, description=description, kind=kind)
        self._measure = measure

    def series(self, labels: Mapping[str, str], *, buckets: Sequence[float] = ()) -> Series:
        where = ((self.name, self._description, self.kind), labels, buckets)
        self._measure(*where)
        return _RemoteSeries(lambda verb, *values: self._measure(*where, verb, *values))


class _RemoteSeries(Series):
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
