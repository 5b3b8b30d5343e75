"""Load errors: why a model cannot be loaded, in Triton's words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from genserve.errors import ConfigError, GenserveError, InferenceError, RepositoryError, Status
from genserve.repository.index import ModelEntry

__all__ = ["VersionFailed", "load_error", "not_polled", "reason", "without_step"]

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
    """Why a version cannot be loaded, and so none of the model's is; `others` are these."""

    def __init__(self, error: Exception, *, version: int, others: Sequence[int] = ()) -> None:
        super().__init__(version)
        self.error = error
        self.version = version
        self.others = others


def load_error(name: str, failed: VersionFailed) -> InferenceError:
    """Return what whoever asked for a model is told of a version that failed; log what is not ours."""
    error = failed.error
    if not isinstance(error, GenserveError):
        logger.error("model %s failed to load", name, exc_info=error)
    text = f"version {failed.version} is at UNAVAILABLE state: {reason(error)};\n"
    remedy = str(error) if isinstance(error, ConfigError) else getattr(error, "remedy", "")
    return InferenceError(f"load failed for model '{name}': {text}", remedy=remedy)


def reason(error: Exception) -> str:
    """Return why a load failed, in Triton's form: its word for the code, and the message."""
    if isinstance(error, InferenceError | RepositoryError):
        text = error.text if isinstance(error, ConfigError) else error.message
        return f"{_STATUS_WORDS[error.status]}: {text}"
    if isinstance(error, GenserveError):
        return f"Internal: {error.message}"
    return f"Internal: {type(error).__name__}: {error}"


def without_step(ensemble: str, step: ModelEntry, error: InferenceError) -> str:
    """Return why an ensemble cannot be loaded, in Triton's words: the model of a step was not."""
    start = f"load failed for model '{step.name}': "
    if not error.message.startswith(start):     # it was not even taken up
        return f"ensemble {ensemble} contains models that are not available or ambiguous: {step.name}\n"
    what = "is not valid. Model '{}'" if step.is_ensemble else "has no loaded version. Model '{}' loading"
    return (
        f"ensemble '{ensemble}' depends on '{step.name}' which {what.format(step.name)} failed with error: "
        f"{error.message.removeprefix(start)}"
    )


def not_polled(name: str, *, remedy: str) -> InferenceError:
    """Return what whoever asked for a model is told that was not even taken up."""
    text = f"failed to load '{name}', failed to poll from model repository"
    return InferenceError(text, status=Status.INTERNAL, remedy=remedy)
