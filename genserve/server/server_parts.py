"""Server parts: what a server and the ingress of a deployment have in common."""

from __future__ import annotations

from collections.abc import Callable

from genserve.generation_metrics import Metrics
from genserve.repository.model_versions import ModelVersion
from genserve.repository.served_models import ServedModels
from genserve.server.access.tls import TlsFiles
from genserve.server.access.watched_files import WatchedFiles
from genserve.server.app import create_app
from genserve.server.kserve.shared_memory import SharedMemory
from genserve.server.kserve.state import KServeState
from genserve.server.observe.event_loop_lag import EventLoopLag
from genserve.server.observe.on_demand_metrics import OnDemandCollector
from genserve.server.observe.triton_metrics import CpuCollector, InferenceCollector, read_metrics_config
from genserve.server.services import Services
from genserve.settings import ServerSettings


class ServerParts:
    """The parts of one server.

    Attributes:
        services: what its routes share.
        kserve: the state of the KServe protocol.
        app: its routes.
        tls: the certificate; None: plain HTTP.
    """

    def __init__(
        self,
        settings: ServerSettings,
        repository: ServedModels,
        metrics: Metrics,
        *,
        shared_memory: SharedMemory | None = None,
        counts: Callable[[ModelVersion], bool] = lambda _: True,
    ) -> None:
        """Make the parts, and register the metrics of the server.

        Args:
            settings: the server's settings.
            repository: its models; the caller loads and closes them.
            metrics: the metrics of the repository.
            shared_memory: the regions that clients may register; None: as the settings say.
            counts: whether the metrics have the inferences of a version.

        Raises:
            GenserveError: a setting is not valid, or the keys or the certificate cannot be used.
        """
        self.tls = TlsFiles.of(settings)
        self.services = Services(settings=settings, repository=repository, metrics=metrics)
        self.kserve = KServeState(settings, shared_memory=shared_memory)
        self.app = create_app(self.services, self.kserve)
        self._watched_files = WatchedFiles()
        self._watched_files.add(self.services.keys.files, self.services.keys.reload)
        if self.tls is not None:
            self._watched_files.add(self.tls.files, self.tls.reload)
        self._lag = EventLoopLag()
        latency_counters = read_metrics_config(settings.metrics_config)["counter_latencies"]
        collector = InferenceCollector(repository, latency_counters=latency_counters, counts=counts)
        metrics.registry.register(collector)
        metrics.registry.register(self._lag)
        if repository.on_demand is not None:
            metrics.registry.register(OnDemandCollector(repository.on_demand))
        if settings.allow_cpu_metrics:
            metrics.registry.register(CpuCollector(interval_s=settings.metrics_interval_ms / 1000))

    def start(self) -> None:
        """Measure the running event loop, log the names of the keys, and watch files for changes."""
        self._lag.start()
        self.services.keys.report()
        self._watched_files.start()

    def stop(self) -> None:
        """End what `start` has begun."""
        self._lag.stop()
        self._watched_files.close()
