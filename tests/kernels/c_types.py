"""C types: the structures of the plain C functions, their threads, and the supported libraries."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from numpy.typing import NDArray

from genserve import kernels

__all__ = ["Error", "Tensor", "Threads", "instruction_sets", "library"]

ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "float16": 10}
UNKNOWN_TYPE = 99


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 6),
    )

    @staticmethod
    def of(array: NDArray[Any] | None) -> Tensor:
        """A tensor over an array; None: an input that is left out."""
        if array is None:
            return Tensor(None, 0, 0)
        assert array.flags.c_contiguous
        shape = (ctypes.c_int64 * 6)(*array.shape)
        element_type = ELEMENT_TYPES.get(array.dtype.name, UNKNOWN_TYPE)
        return Tensor(array.ctypes.data, element_type, array.ndim, shape)


class Error(ctypes.Structure):
    _fields_ = (("message", ctypes.c_char * 320),)


WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
PARALLEL_FOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, WORK, ctypes.c_void_p)


@PARALLEL_FOR
def parallel_for(_host: int | None, count: int, work: Any, job: int | None) -> None:
    """Call each part of the work in a separate thread, as ONNX Runtime may."""
    others = [threading.Thread(target=work, args=(job, index)) for index in range(1, count)]
    for other in others:
        other.start()
    work(job, 0)
    for other in others:
        other.join()


class Threads(ctypes.Structure):
    _fields_ = (("parallel_for", PARALLEL_FOR), ("host", ctypes.c_void_p), ("count", ctypes.c_int))

    @staticmethod
    def of(count: int) -> Threads:
        """A number of threads, including the caller's."""
        return Threads(parallel_for if count > 1 else PARALLEL_FOR(), None, count)


@functools.cache
def library(instruction_set: str = "") -> ctypes.CDLL:
    """The library of an instruction set, by default that in use."""
    return ctypes.CDLL(str(kernels._path_of(instruction_set) if instruction_set else kernels.library_path()))


@functools.cache
def instruction_sets() -> list[str]:
    """The supported instruction sets; processors with AVX-512 may not support AVX-VNNI."""
    names = [name for name in kernels.INSTRUCTION_SETS if kernels._path_of(name).exists()]
    return [name for name in names if library("portable").genserve_cpu_supports(name.encode())]
