"""Scraped metrics: reads what `/metrics` of a server says about its text model."""

from __future__ import annotations

import re


class ScrapedMetrics:
    """The server's metrics at one time."""

    def __init__(self, text: str, *, model: str) -> None:
        self._text = text
        self._model = re.escape(model)

    def value(self, name: str, *, labels: str = "") -> float:
        """Return the sum of the text model's samples, or of all samples with other labels."""
        labels = labels or f'model="{self._model}"'
        found = re.findall(rf"^{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", self._text, re.M)
        return sum(map(float, found))

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Return the bounds and counts of a histogram without labels; empty: there is none."""
        found = re.findall(rf'^{name}_bucket\{{[^}}]*le="([^"]+)"[^}}]*\}} (\S+)$', self._text, re.M)
        return [(float(bound), float(count)) for bound, count in found]

    @property
    def num_open(self) -> float:
        """The number of running and waiting requests."""
        return self.value("genserve_num_requests_running") + self.value("genserve_num_requests_waiting")

    @property
    def num_blocks(self) -> int:
        """The number of KV cache blocks that requests use."""
        total = self.value("genserve_kv_cache_num_blocks")
        return round(self.value("genserve_kv_cache_usage_perc") * total)
