"""Libraries: imports ONNX Runtime, PyTorch and others when a model needs them, one thread at a time.

Python locks each module separately. If one thread imports a package from its top and another thread a part
of it (`import torch`, `from torch.utils.dlpack import ...`), each waits for a lock of the other, and Python
gives one of them a partially initialized module. Models in separate processes never see that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from genserve.errors import MissingDependency
from genserve.machine import num_cores

_LOCK = threading.RLock()
# Code that is being imported may wait for a thread that imports something itself: then both must continue.
_LOCK_TIMEOUT_S = 10.0

_KEEP_GPU_BUILD = (
    "pip uninstall --yes onnxruntime && pip install --force-reinstall --no-deps onnxruntime-gpu"
)
# The command that replaces the build of ONNX Runtime for CPUs by the one for GPUs.
INSTALL_GPU_BUILD = f"pip install 'genserve[gpu]' && {_KEEP_GPU_BUILD}"


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Block imports by other threads while this one imports a module that is not yet imported."""
    if _is_imported(name):
        yield
        return
    locked = _LOCK.acquire(timeout=_LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        if locked:
            _LOCK.release()


def import_onnxruntime() -> ModuleType:
    """Import ONNX Runtime.

    Raises:
        MissingDependency: it is not installed, or two builds of it are.
    """
    _require_one_build()
    return import_library(
        "onnxruntime",
        needed_for="serving an ONNX model needs ONNX Runtime",
        remedy="pip install onnxruntime",
    )


def import_torch(needed_for: str = "serving a TorchScript model") -> ModuleType:
    """Import PyTorch, whose default number of threads does not see a quota of CPU time.

    Raises:
        MissingDependency: it is not installed.
    """
    is_first = not _is_imported("torch")
    torch = import_library(
        "torch", needed_for=f"{needed_for} needs PyTorch", remedy="pip install 'genserve[torch]'"
    )
    if is_first and num_cores() < torch.get_num_threads():
        torch.set_num_threads(num_cores())
    return torch


def import_tensorflow() -> ModuleType:
    """Import TensorFlow.

    Raises:
        MissingDependency: it is not installed.
    """
    return import_library(
        "tensorflow",
        needed_for="serving a SavedModel needs TensorFlow",
        remedy="pip install 'genserve[tensorflow]'",
    )


def require_export_packages(needed_for: str) -> None:
    """Check, without importing them, that the packages of the extra `export` are installed.

    Raises:
        MissingDependency: one is not.
    """
    packages = ("huggingface_hub", "onnxscript", "safetensors", "torch", "transformers")
    if missing := [name for name in packages if find_spec(name) is None]:
        raise MissingDependency(
            f"{needed_for} needs {', '.join(missing)}",
            remedy="pip install 'genserve[export]'; with uvx: uvx --from 'genserve[export]' genserve ...",
        )


def import_library(name: str, *, needed_for: str, remedy: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        MissingDependency: it is not installed, or is broken; the message is `needed_for`.
    """
    try:
        with importing(name):
            return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependency(needed_for, remedy=remedy) from error
    except ImportError as error:  # it is installed and broken
        raise MissingDependency(f"{needed_for}: {error}", remedy=remedy) from error


def _is_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


@cache
def _require_one_build() -> None:
    """Reject the builds for CPUs and for GPUs in one folder: each has overwritten files of the other.

    `pip install 'genserve[gpu]'` ends there, because an extra can add a package and not remove one.
    """
    from importlib.metadata import distributions

    packages = ("onnxruntime", "onnxruntime-gpu")
    if all(any(distributions(name=package)) for package in packages):
        raise MissingDependency(
            f"both {' and '.join(packages)} are installed, into the same folder: which of them runs is "
            "undefined",
            remedy=f"keep the build for GPUs: {_KEEP_GPU_BUILD}",
        )
