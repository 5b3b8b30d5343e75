"""Model control: a model loads and unloads others, and asks whether they are ready."""

from __future__ import annotations

from collections.abc import Mapping

from genserve.backends.python.host import Host, current_host
from genserve.backends.python.pb_utils.error import TritonModelException
from genserve.backends.python.pb_utils.text_argument import text_argument
from genserve.errors import GenserveError
from genserve.inference import Door

__all__ = ["is_model_ready", "load_model", "unload_model"]


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
    host, door = _here()
    by_path = files and {name.removeprefix("file:"): content for name, content in files.items()}
    try:
        door.load(model_name, config=config, files=by_path)
    except GenserveError as error:
        raise _refused("Failed to load model", error.message, host) from error


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002
    """Begin to unload a model.

    Raises:
        TritonModelException: the server does not allow it.
    """
    host, door = _here()
    try:
        door.unload(text_argument(model_name, "a model name"), dependents=unload_dependents)
    except GenserveError as error:
        raise _refused("Failed to unload model", error.message, host) from error


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """Whether a model answers.

    Raises:
        TritonModelException: the version is no number.
    """
    model_name = text_argument(model_name, "a model name")
    model_version = text_argument(model_version, "a version")
    host, door = _here()
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
    return door.is_ready(model_name, version)


def _here() -> tuple[Host, Door]:
    host = current_host()
    if host is None or host.door is None:
        raise TritonModelException("other models are reached only from a model that a server has loaded")
    return host, host.door


def _refused(what: str, why: str, host: Host) -> TritonModelException:
    return TritonModelException(
        f"{what}: Failed to process the request for model '{host.instance}', message: {why}"
    )
