"""Load errors: why a model could not be loaded, in Triton's words."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from genserve.errors import ConfigError, GenserveError, InferenceError, RepositoryError, Status
from genserve.repository.index import ModelEntry

logger = logging.getLogger(__name__)

_STATUS_WORDS: Mapping[Status, str] = {
    Status.UNKNOWN: "Unknown",
    Status.INTERNAL: "Internal",
    Status.NOT_FOUND: "Not found",
    Status.INVALID_ARG: "Invalid argument",
    Status.UNAVAILABLE: "Unavailable",
    Status.UNSUPPORTED: "Unsupported",
    Status.ALREADY_EXISTS: "Already exists",
    Status.CANCELLED: "Cancelled",
}


class VersionFailed(Exception):
    """A version cannot be loaded, and therefore no other version of the model; `others` are their numbers."""

    def __init__(self, error: Exception, *, version: int, others: Sequence[int] = ()) -> None:
        super().__init__(version)
        self.error = error
        self.version = version
        self.others = others


def stopping() -> InferenceError:
    """Return the error of a load while the server stops."""
    return InferenceError(
        "the server is stopping", status=Status.UNAVAILABLE, remedy="try again on another server"
    )


@contextmanager
def unexpected_as_failed(name: str) -> Iterator[None]:
    """Turn an exception that nobody expected, such as MemoryError, into the failure of this load alone."""
    try:
        yield
    except GenserveError:
        raise
    except Exception as error:
        logger.exception("model %s failed to load", name)
        text = f"load failed for model '{name}': {load_reason(error)}"
        raise InferenceError(text, status=Status.INTERNAL) from error


def version_error(name: str, failed: VersionFailed) -> InferenceError:
    """Return the error of a load for the requester; log an unexpected one."""
    error = failed.error
    if not isinstance(error, GenserveError):
        logger.error("model %s failed to load", name, exc_info=error)
    text = f"version {failed.version} is at UNAVAILABLE state: {load_reason(error)};\n"
    remedy = str(error) if isinstance(error, ConfigError) else getattr(error, "remedy", "")
    return InferenceError(f"load failed for model '{name}': {text}", remedy=remedy)


def load_reason(error: Exception) -> str:
    """Return the reason of a failed load: Triton's word for the status, and the message."""
    if isinstance(error, InferenceError | RepositoryError):
        text = error.text if isinstance(error, ConfigError) else error.message
        return f"{_STATUS_WORDS[error.status]}: {text}"
    if isinstance(error, GenserveError):
        return f"Internal: {error.message}"
    return f"Internal: {type(error).__name__}: {error}"


def step_error(ensemble: str, step: ModelEntry, error: InferenceError) -> InferenceError:
    """Return the error of an ensemble's load: the model of a step has failed with this one."""
    text = f"load failed for model '{ensemble}': {_step_reason(ensemble, step, error)}"
    return InferenceError(text, remedy=error.remedy)


def _step_reason(ensemble: str, step: ModelEntry, error: InferenceError) -> str:
    start = f"load failed for model '{step.name}': "
    if not error.message.startswith(start):     # it was not polled
        return f"ensemble {ensemble} contains models that are not available or ambiguous: {step.name}\n"
    clause = "is not valid. Model '{}'" if step.is_ensemble else "has no loaded version. Model '{}' loading"
    return (
        f"ensemble '{ensemble}' depends on '{step.name}' which {clause.format(step.name)} failed with error: "
        f"{error.message.removeprefix(start)}"
    )
