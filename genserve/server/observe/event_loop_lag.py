"""Event loop lag: how late the event loop runs due callbacks; a stall delays every answer by as much.

A stall is a call that takes long on the event loop's thread, or one on another thread that keeps the
interpreter's lock meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from genserve.generation_metrics import HistogramCollector

# A stall that begins between two probes is measured as shorter by up to this. At this rate the probe takes a
# thousandth of a core.
_INTERVAL_S = 0.02
_NAME = "genserve_event_loop_lag"
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class EventLoopLag(Collector):
    """Probes an event loop, fifty times a second, and keeps by how much each probe was late.

    Attributes:
        longest_s: the longest lag since the probe was started.
    """

    def __init__(self) -> None:
        """Keep an empty histogram."""
        text = "How late the event loop runs due callbacks, probed fifty times a second."
        self._family = HistogramCollector(f"{_NAME}_seconds", text, (), _BOUNDS_S)
        self._histogram = self._family.labels()
        self._due_s = 0.0
        self._next: asyncio.TimerHandle | None = None
        self.longest_s = 0.0

    def start(self) -> None:
        """Probe the running event loop until `stop`."""
        self._due_s = time.monotonic() + _INTERVAL_S
        self._next = asyncio.get_running_loop().call_later(_INTERVAL_S, self._probe)

    def stop(self) -> None:
        """End the probe."""
        if self._next is not None:
            self._next.cancel()

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram and the longest lag; the protocol of prometheus_client."""
        yield from self._family.collect()
        text = "The longest lag of the event loop since the server has started."
        yield GaugeMetricFamily(f"{_NAME}_max_seconds", text, value=self.longest_s)

    def _probe(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_s)
        self._histogram.observe(late_s)
        self.longest_s = max(self.longest_s, late_s)
        self.start()
