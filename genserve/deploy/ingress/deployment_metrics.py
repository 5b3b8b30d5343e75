"""Deployment metrics: the metrics of an ingress, of each replica, or of the deployment as one server.

By default an ingress shows its own metrics only, so that the metrics of several ingresses can be added up.
The replicas' metrics are the same at each ingress, and a scrape has to ask for them: `each` shows them with
the label `replica` and without the ingress's own, for a Prometheus that asks one ingress; `sum` adds all up,
for the dashboard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from genserve.generation_metrics import Metrics, Replicas

# These gauges are no sums. Other gauges, counters and histograms are added up.
_MEANS = frozenset(
    ("genserve_kv_cache_usage_perc", "genserve_state_slots_usage_perc", "nv_model_load_duration_secs")
)
_SAME = "genserve_kv_cache_block_size"


class DeploymentMetrics(Metrics):
    """The metrics of an ingress, which also has what the replicas have reported last."""

    def __init__(self) -> None:
        super().__init__()
        self._living: Mapping[str, Sequence[Metric]] = {}
        self._all: Sequence[Sequence[Metric]] = ()

    def set_reported(
        self, living: Mapping[str, Sequence[Metric]], everything: Iterable[Sequence[Metric]]
    ) -> None:
        """Replace the families of the replicas.

        Args:
            living: the families of each living replica, by its id.
            everything: the same, and what replicas that have ended had counted.
        """
        self._living = living
        self._all = tuple(everything)

    def shown(self, replicas: Replicas = "none") -> Collector:
        """Return the metrics of the ingress, of each living replica, or the sum of all."""
        if replicas == "each":
            labelled = [_labelled(families, replica) for replica, families in self._living.items()]
            return _Collected(merged(labelled))
        if replicas == "sum":
            return _Collected(merged((list(self.registry.collect()), *self._all)))
        return self.registry


class _Collected(Collector):
    """Families that have been collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _labelled(families: Sequence[Metric], replica: str) -> list[Metric]:
    labelled = []
    for family in families:
        whole = copy(family)
        whole.samples = [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
        labelled.append(whole)
    return labelled


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
    return samples[0]._replace(value=total / len(samples) if name in _MEANS else total)
