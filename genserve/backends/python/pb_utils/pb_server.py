"""The server's log, metrics and model control, as a model.py uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import ClassVar, TypeVar

from genserve.backends.python.custom_metrics import CustomMetric, MetricKind
from genserve.backends.python.model_context import ModelContext, current_context
from genserve.backends.python.pb_utils.pb_error import TritonModelException, text_argument
from genserve.errors import GenserveError
from genserve.inference import InferenceServer

T = TypeVar("T")


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
    """Logs to the logger `genserve.models.<model>`; has static methods only."""

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
        """Log at VERBOSE, which is off by default."""
        _log(message, LogLevel.VERBOSE)


def _log(message: str | bytes, level: LogLevel) -> None:
    text = text_argument(message, "a message")
    context = current_context()
    name = "genserve.models" if context is None else f"genserve.models.{context.model}"
    # Log the position of the caller in the model: two calls up.
    logging.getLogger(name).log(_LEVELS[level], "%s", text, stacklevel=3)


class MetricFamily:
    """Metrics of one name in the server's /metrics; models that use the same name share a family."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Make or find a family.

        Raises:
            TritonModelException: the name is invalid or that of another kind, or no server runs the model.
        """
        context = current_context()
        if context is None or context.metrics is None:
            raise TritonModelException("Error when creating MetricFamily: metrics not supported")
        self.instance = context.instance
        metrics = context.metrics
        self._family = _translated(
            "Error when creating MetricFamily",
            self.instance,
            lambda: metrics.family(name, description=description, kind=kind),
        )

    def Metric(  # noqa: N802  # Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric of some labels.

        Args:
            labels: values by name.
            buckets: a histogram's upper bounds, ascending.

        Raises:
            TritonModelException: the labels or buckets are invalid.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and self._family.kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and self._family.kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        metric = _translated(
            "Error when creating Metric",
            self.instance,
            lambda: self._family.metric(labels or {}, buckets=buckets or ()),
        )
        return Metric(metric, self)


class Metric:
    """One metric."""

    def __init__(self, metric: CustomMetric, family: MetricFamily) -> None:
        self._metric = metric
        self._family = family  # it is exposed while one of its metrics is alive

    def increment(self, value: float) -> None:
        """Add to a counter or gauge; the value for a counter must not be negative."""
        self._do("Failed to increment metric value", lambda: self._metric.increment(value))

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._do("Failed to set metric value", lambda: self._metric.set(value))

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._do("Failed to observe metric value", lambda: self._metric.observe(value))

    def value(self) -> float:
        """Return the value of a counter or gauge."""
        return _translated("Failed to get metric value", self._family.instance, self._metric.value)

    def _do(self, prefix: str, act: Callable[[], None]) -> None:
        _translated(prefix, self._family.instance, act)


def _translated(prefix: str, instance: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except ValueError as error:
        raise _failure(prefix, instance, str(error)) from error


def load_model(
    model_name: str | bytes, config: str | bytes = "", files: Mapping[str, bytes] | None = None
) -> None:
    """Load or reload a model, and wait until it is ready.

    Args:
        model_name: a model in the repository, or a new one with `files`.
        config: JSON that replaces its config.pbtxt.
        files: its files by `file:<version>/<name>`, which replace its folder.

    Raises:
        TritonModelException: it cannot be loaded, or the server does not allow it.
    """
    model_name, config = text_argument(model_name, "a model name"), text_argument(config, "a config")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file "
            "contents"
        )
    context, server = _context_and_server()
    by_path = files and {name.removeprefix("file:"): content for name, content in files.items()}
    try:
        server.load(model_name, config=config, files=by_path)
    except GenserveError as error:
        raise _failure("Failed to load model", context.instance, error.message) from error


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002
    """Start to unload a model.

    Raises:
        TritonModelException: the server does not allow it.
    """
    context, server = _context_and_server()
    try:
        server.unload(text_argument(model_name, "a model name"), dependents=unload_dependents)
    except GenserveError as error:
        raise _failure("Failed to unload model", context.instance, error.message) from error


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """Whether a model is ready.

    Raises:
        TritonModelException: the version is not a number.
    """
    model_name = text_argument(model_name, "a model name")
    model_version = text_argument(model_version, "a version")
    context, server = _context_and_server()
    details = ""
    try:
        version = int(model_version or -1)
    except ValueError:
        version, details = -2, " (details: stol)"
    if version < -1:
        reason = (
            f"failed to get model version from specified version string '{model_version}'{details}, version "
            "should be an integral value > 0"
        )
        raise _failure("Failed to check model readiness", context.instance, reason)
    return server.is_ready(model_name, version)


def _context_and_server() -> tuple[ModelContext, InferenceServer]:
    context = current_context()
    if context is None or context.server is None:
        raise TritonModelException("model control is only available to a model that a server has loaded")
    return context, context.server


def _failure(prefix: str, instance: str, reason: str) -> TritonModelException:
    return TritonModelException(
        f"{prefix}: Failed to process the request for model '{instance}', message: {reason}"
    )
