"""Refusal: what this server does not have, refused in the same words over both protocols."""

from __future__ import annotations

from genserve.errors import InferenceError, Status
from genserve.kserve.models import Models

__all__ = ["cuda_region", "refuse_cuda_region", "refuse_repository", "refuse_unknown_model"]


def refuse_repository(name: str) -> None:
    """Raise InferenceError, UNSUPPORTED, where a request names one of several repositories."""
    if name:
        text = "'repository_name' specification is not supported"
        raise InferenceError(text, status=Status.UNSUPPORTED)


def refuse_unknown_model(models: Models, name: str) -> None:
    """Raise InferenceError, INVALID_ARG, where settings are asked for of a model that does not answer."""
    if not models.versions(name):
        raise InferenceError(f"Request for unknown model : {name}")


def refuse_cuda_region(name: str) -> None:
    """Raise InferenceError, NOT_FOUND, where one region of a GPU's memory is asked for: there are none."""
    if name:
        text = f"Unable to find cuda shared memory region: '{name}'"
        raise InferenceError(text, status=Status.NOT_FOUND)


def cuda_region(name: str) -> InferenceError:
    """Return the error of who registers a region of a GPU's memory."""
    return InferenceError(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
        status=Status.UNSUPPORTED,
        remedy="send tensors in binary form, or through system shared memory",
    )
