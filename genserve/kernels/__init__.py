"""Kernels: custom operators for ONNX Runtime on CPUs, compiled into one library per instruction set.

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(kernels.library_path()))

docs/kernels.md describes the operators and their layouts; `packing` packs the weights.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

from genserve.errors import GenserveError
from genserve.files import file_sha256
from genserve.kernels.build import LIBRARIES, SOURCES, library_name

__all__ = ["build_sha256", "instruction_set", "library", "library_path", "sources_sha256"]

# The instruction sets, from the most to the least preferred.
INSTRUCTION_SETS = ("amx", "avx512vnni", "avxvnni", "avx2", "neon", "portable")

# It rounds adapters when they are loaded, so that the bits of their products depend on it too.
_LOW_RANK = Path(__file__).with_name("low_rank.py")

REBUILD = "install a wheel of genserve for this platform, or build them with python genserve/kernels/build.py"


def library_path() -> Path:
    """Return the library of the best instruction set of this processor.

    The environment variable GENSERVE_KERNELS selects another one.

    Raises:
        GenserveError: no kernels are built for this platform, they cannot be loaded, or GENSERVE_KERNELS
            is not an instruction set that runs here.
    """
    return _path_of(instruction_set())


def library() -> ctypes.CDLL:
    """Return the library of `library_path`, loaded, with the types of the functions that Python calls.

    Raises:
        GenserveError: the same as in `library_path`.
    """
    return _loaded(instruction_set())


@functools.cache
def build_sha256() -> str:
    """Return a digest of the kernels; one for all instruction sets of a build, which compute the same bits.

    Raises:
        GenserveError: no kernels are built for this platform.
    """
    library_path()
    return hashlib.sha256(f"{file_sha256(_path_of('portable'))}{file_sha256(_LOW_RANK)}".encode()).hexdigest()


@functools.cache
def sources_sha256() -> str:
    """Return a digest of the sources of kernels and adapters: their version on every platform."""
    files = (_LOW_RANK, *(path for path in SOURCES.iterdir() if path.is_file()))
    sources = sorted((path.name, file_sha256(path)) for path in files)
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def instruction_set() -> str:
    """Return the name of the instruction set in use, such as `avx512vnni` or `portable`.

    Raises:
        GenserveError: the same as in `library_path`.
    """
    return _choose(os.environ.get("GENSERVE_KERNELS", ""))


@functools.cache
def _choose(wanted: str) -> str:
    """Choose an instruction set: the wanted one, or else the best."""
    built = [name for name in INSTRUCTION_SETS if _path_of(name).exists()]
    if "portable" not in built:
        msg = f"genserve's kernels are not built for {sys.platform} on {platform.machine()}"
        raise GenserveError(msg, remedy=REBUILD)
    usable = [name for name in built if _loaded("portable").genserve_cpu_supports(name.encode())]
    if not wanted:
        return usable[0]
    if wanted in usable:
        return wanted
    if wanted not in INSTRUCTION_SETS:
        msg = f"GENSERVE_KERNELS is {wanted!r}, which is not an instruction set"
    elif wanted not in built:
        msg = f"GENSERVE_KERNELS is {wanted}, for which no kernels are built on this machine"
    else:
        msg = f"GENSERVE_KERNELS is {wanted}, which this processor or its operating system does not support"
    raise GenserveError(msg, remedy=f"set it to one of {', '.join(usable)}, or unset it")


def _path_of(name: str) -> Path:
    """Return the path of an instruction set's library, whether or not it was built."""
    return LIBRARIES / library_name(name)


@functools.cache
def _loaded(name: str) -> ctypes.CDLL:
    """Load the library of an instruction set; "portable" runs on any processor of this architecture."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    try:
        loaded = ctypes.CDLL(str(_path_of(name)))
        loaded.genserve_scan_logits.argtypes = (pointer, size, size, size, pointer, pointer, pointer, pointer)
        loaded.genserve_sample_logits.argtypes = (pointer, size, size, pointer, pointer)
        for copy in (loaded.genserve_gather_rows, loaded.genserve_scatter_rows):
            copy.restype = None
            copy.argtypes = (pointer, size, pointer, size, pointer)
        loaded.genserve_name_digest.restype = ctypes.c_uint64
        loaded.genserve_name_digest.argtypes = (ctypes.c_char_p,)
        loaded.genserve_use_adapters.restype = None
        loaded.genserve_use_adapters.argtypes = (pointer,)
    except (OSError, AttributeError) as error:  # built for another machine or version, or incomplete
        raise GenserveError(f"genserve's kernels cannot be loaded: {error}", remedy=REBUILD) from error
    return loaded
