"""Deployment metrics: those of the ingress and of all replicas, as one server's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from genserve.generation_metrics import Metrics

# Gauges that are no sums: all others, counters and histograms are added up.
_MEAN = "genserve_kv_cache_usage_perc"
_SAME = "genserve_kv_cache_block_size"


class DeploymentMetrics(Metrics):
    """The metrics of an ingress; its registry also has the families that replicas have reported last."""

    def __init__(self) -> None:
        self._registry = _Registry()
        super().__init__(self._registry)

    def set_reported(self, families: Iterable[Sequence[Metric]]) -> None:
        """Replace the families of the replicas, one sequence for each replica."""
        self._registry.reported = tuple(families)


class _Registry(CollectorRegistry):
    """Collects its own families, merged with reported ones."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: tuple[Sequence[Metric], ...] = ()

    def collect(self) -> Iterator[Metric]:
        return merged((list(super().collect()), *self.reported))


def merged(sources: Iterable[Sequence[Metric]]) -> Iterator[Metric]:
    """Yield each family once, with the values of all sources."""
    families: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], list[Sample]]] = {}
    for source in sources:
        for family in source:
            families.setdefault(family.name, family)
            of_family = samples.setdefault(family.name, {})
            for sample in family.samples:
                of_family.setdefault((sample.name, frozenset(sample.labels.items())), []).append(sample)
    for name, family in families.items():
        whole = copy(family)
        whole.samples = [_merged(name, equal) for equal in samples[name].values()]
        yield whole


def _merged(name: str, samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1 or name == _SAME:
        return samples[0]
    total = sum(sample.value for sample in samples)
    return samples[0]._replace(value=total / len(samples) if name == _MEAN else total)
