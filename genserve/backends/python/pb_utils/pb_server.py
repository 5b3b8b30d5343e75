"""The server's log, metrics and model control, as a model.py uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import ClassVar, TypeVar

from genserve.backends.python.custom_metrics import Kind, Series
from genserve.backends.python.model_context import Host, current_context
from genserve.backends.python.pb_utils.pb_error import TritonModelException, text_argument
from genserve.errors import GenserveError
from genserve.inference import InferenceServer

__all__ = ["LogLevel", "Logger", "Metric", "MetricFamily", "is_model_ready", "load_model", "unload_model"]


class LogLevel(IntEnum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


class Logger:
    """Logs by the name `genserve.models.<model>`; used as it is, without an instance."""

    INFO: ClassVar = LogLevel.INFO
    WARNING: ClassVar = LogLevel.WARNING
    ERROR: ClassVar = LogLevel.ERROR
    VERBOSE: ClassVar = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        """Log a message at a level."""
        _log(message, level)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        """Log at INFO."""
        _log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        """Log at WARNING."""
        _log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        """Log at ERROR."""
        _log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        """Log at VERBOSE, which is shown only when asked for."""
        _log(message, LogLevel.VERBOSE)


def _log(message: str | bytes, level: LogLevel) -> None:
    text = text_argument(message, "a message")
    host = current_context()
    name = "genserve.models" if host is None else f"genserve.models.{host.model}"
    # The place to show is the line of the model that logs: two calls up.
    logging.getLogger(name).log(_LEVELS[level], "%s", text, stacklevel=3)


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
        host = current_context()
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


def load_model(
    model_name: str | bytes, config: str | bytes = "", files: Mapping[str, bytes] | None = None
) -> None:
    """Load or reload a model, and wait until it is ready.

    Args:
        model_name: of a model in the repository, or of a new one with `files`.
        config: a JSON text in place of its config.pbtxt.
        files: its files by `file:<version>/<name>`, in place of its folder.

    Raises:
        TritonModelException: it cannot be loaded, or the server does not allow it.
    """
    model_name, config = text_argument(model_name, "a model name"), text_argument(config, "a config")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file "
            "contents"
        )
    host, server = _here()
    by_path = files and {name.removeprefix("file:"): content for name, content in files.items()}
    try:
        server.load(model_name, config=config, files=by_path)
    except GenserveError as error:
        raise _refused("Failed to load model", error.message, host) from error


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002
    """Begin to unload a model.

    Raises:
        TritonModelException: the server does not allow it.
    """
    host, server = _here()
    try:
        server.unload(text_argument(model_name, "a model name"), dependents=unload_dependents)
    except GenserveError as error:
        raise _refused("Failed to unload model", error.message, host) from error


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """Whether a model answers.

    Raises:
        TritonModelException: the version is no number.
    """
    model_name = text_argument(model_name, "a model name")
    model_version = text_argument(model_version, "a version")
    host, server = _here()
    details = ""
    try:
        version = int(model_version or -1)
    except ValueError:
        version, details = -2, " (details: stol)"
    if version < -1:
        text = (
            f"failed to get model version from specified version string '{model_version}'{details}, version "
            "should be an integral value > 0"
        )
        raise _refused("Failed to check model readiness", text, host)
    return server.is_ready(model_name, version)


def _here() -> tuple[Host, InferenceServer]:
    host = current_context()
    if host is None or host.server is None:
        raise TritonModelException("other models are reached only from a model that a server has loaded")
    return host, host.server


def _refused(what: str, why: str, host: Host) -> TritonModelException:
    return TritonModelException(
        f"{what}: Failed to process the request for model '{host.instance}', message: {why}"
    )
