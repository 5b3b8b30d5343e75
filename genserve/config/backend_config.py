"""Backend config: what `--backend-config` may say, and what each setting means here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from genserve.config.backends import BUILT_IN, known_backends
from genserve.errors import GenserveError

__all__ = ["DEFAULT_MAX_BATCH_SIZE", "BackendConfig"]

logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = 4      # Triton's

_DIRECTORY = "backend-directory"
_BATCH = "default-max-batch-size"

_PIPES = "tensors go to a model's process through a pipe, and within the server by pointer"
_POOLS = "each session has threads of its own: `intra_op_thread_count` in a model's parameters sets how many"
# The settings by backend; "" has those for all backends. None: it is honoured. A text: it changes memory and
# threads alone, no answer; and this happens in its place.
_KNOWN: Mapping[str, Mapping[str, str | None]] = {
    "": {
        _DIRECTORY: None,
        _BATCH: None,
        "triton-backend-memory-tracker": "statistics do not tell the memory that models take",
    },
    "onnxruntime": {
        _BATCH: None,
        "enable-global-threadpool": _POOLS,
        "intra_op_thread_count": _POOLS,
        "inter_op_thread_count": _POOLS,
    },
    "tensorflow": {
        _BATCH: "configs of TensorFlow models are not completed from their files",
        "allow-soft-placement": "TensorFlow places operators by its own default",
        "gpu-memory-fraction": "TensorFlow takes memory as it needs it",
    },
    "python": {  # and of every backend that is a model.py
        "shm-default-byte-size": _PIPES,
        "shm-growth-byte-size": _PIPES,
        "shm-region-prefix-name": _PIPES,
        "shm_message_queue_size": _PIPES,
        "stub-timeout-seconds": "the process of a model is waited for as long as it lives",
        "thread-pool-size": "a BLS call waits on the thread that makes it",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """The settings of backends that a server is told on its command line.

    Attributes:
        backend_directory: of backends in Python.
        default_max_batch_size: of an ONNX model whose config leaves it out and whose graph can batch; 0: such
            a model does not batch.
    """

    backend_directory: Path | None = None
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE

    @classmethod
    def parse(cls, words: Iterable[str], *, backend_directory: Path | None = None) -> BackendConfig:
        """Read the values of `--backend-config`.

        What has no meaning here, and changes no answer, is logged as a warning.

        Args:
            words: each "BACKEND,SETTING=VALUE", or "SETTING=VALUE", which means all backends.
            backend_directory: what `--backend-directory` says.

        Raises:
            GenserveError: there is no such backend or setting, or its value makes no sense.
        """
        settings = [_split(word) for word in words]
        for backend, name, value in settings:
            if (backend, name) == ("", _DIRECTORY):
                if backend_directory not in (None, Path(value)):
                    raise GenserveError(
                        f"two folders of backends are named: {backend_directory} and {value}",
                        remedy="give --backend-directory alone: there is one such folder",
                    )
                backend_directory = Path(value)
        batch_sizes = {"": DEFAULT_MAX_BATCH_SIZE}
        for backend, name, value in settings:
            instead = _instead(backend, name, directory=backend_directory)
            if instead is not None:
                of = f"{backend},{name}" if backend else name
                logger.warning("--backend-config=%s=%s is not honoured: %s", of, value, instead)
            elif name == _BATCH:
                batch_sizes[backend] = _batch_size(value)
        return cls(
            backend_directory=backend_directory,
            default_max_batch_size=batch_sizes.get("onnxruntime", batch_sizes[""]),
        )


def _split(word: str) -> tuple[str, str, str]:
    """Return backend, setting and value; an empty backend stands for all."""
    key, _, value = word.partition("=")
    backend, comma, name = key.rpartition(",")
    if not name or not value or (comma and not backend):
        raise GenserveError(
            f"--backend-config={word} is not BACKEND,SETTING=VALUE or SETTING=VALUE",
            remedy="write for example --backend-config=onnxruntime,default-max-batch-size=8",
        )
    return backend, name, value


def _instead(backend: str, name: str, *, directory: Path | None) -> str | None:
    """Return what happens in place of a setting; None: it is honoured."""
    backends = known_backends([directory] if directory else [])
    if backend and backend not in backends:
        raise GenserveError(
            f"--backend-config names the backend '{backend}', which is not there",
            remedy=f"backends here: {', '.join(backends)}",
        )
    is_python_based = backend not in BUILT_IN and directory is not None and (directory / backend).is_dir()
    known = _KNOWN["python"] if backend and is_python_based else _KNOWN.get(backend, {})
    if name not in known:
        whose = f"of the backend '{backend}'" if backend else "for all backends"
        raise GenserveError(
            f"--backend-config sets '{name}', which is no setting {whose}",
            remedy=f"settings {whose}: {', '.join(known) or 'none'}",
        )
    return known[name]


def _batch_size(value: str) -> int:
    if not value.isdecimal() or int(value) >= 2**31:
        raise GenserveError(
            f"--backend-config sets {_BATCH} to '{value}', which is not a number of rows",
            remedy="write a whole number; 0 leaves models that do not say so without batching",
        )
    return int(value)
