"""Kernels: our operators for ONNX Runtime's CPU, one library for each instruction set; here one is chosen.

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(kernels.library_path()))

docs/kernels.md describes the operators and their layouts; `packing` writes the weights.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path

from genserve.errors import GenserveError
from genserve.kernels.build import LIBRARIES, library_name

__all__ = ["instruction_set", "library_path"]

# From the most wanted to the least.
INSTRUCTION_SETS = ("avx512vnni", "avxvnni", "avx2", "neon", "portable")

REBUILD = "install a wheel of genserve for this platform, or build them: python genserve/kernels/build.py"


def library_path() -> Path:
    """Return the library of the best instruction set that this processor has.

    The environment variable GENSERVE_KERNELS names another one.

    Raises:
        GenserveError: no kernels were built for this platform, or what was built cannot be loaded, or
            GENSERVE_KERNELS names none that runs here.
    """
    return _path_of(instruction_set())


def instruction_set() -> str:
    """Return the name of the instruction set in use, such as `avx512vnni` or `portable`.

    Raises:
        GenserveError: as `library_path`.
    """
    return _choose(os.environ.get("GENSERVE_KERNELS", ""))


@functools.cache
def _choose(wanted: str) -> str:
    """Choose an instruction set: the wanted one, or the best where none is named."""
    built = [name for name in INSTRUCTION_SETS if _path_of(name).exists()]
    if "portable" not in built:
        msg = f"genserve's kernels are not built for {sys.platform} on {platform.machine()}"
        raise GenserveError(msg, remedy=REBUILD)
    usable = [name for name in built if _portable().genserve_cpu_supports(name.encode())]
    if not wanted:
        return usable[0]
    if wanted in usable:
        return wanted
    if wanted not in INSTRUCTION_SETS:
        what = f"GENSERVE_KERNELS is {wanted!r}, which is no instruction set"
    elif wanted not in built:
        what = f"GENSERVE_KERNELS is {wanted}, for which no kernels are built on this machine"
    else:
        what = f"GENSERVE_KERNELS is {wanted}, which this processor does not have"
    raise GenserveError(what, remedy=f"take one of {', '.join(usable)}, or leave it out")


def _path_of(name: str) -> Path:
    """Return where the library of an instruction set is, if it was built."""
    return LIBRARIES / library_name(name)


@functools.cache
def _portable() -> ctypes.CDLL:
    """Load the library that runs on any processor of this architecture."""
    try:
        return ctypes.CDLL(str(_path_of("portable")))
    except OSError as error:  # built on another machine, or half of it is missing
        raise GenserveError(f"genserve's kernels cannot be loaded: {error}", remedy=REBUILD) from error
