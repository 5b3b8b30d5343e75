"""String array: the elements of a string tensor, as old and new models expect them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

__all__ = ["StringArray"]


class StringArray(np.ndarray[Any, np.dtype[np.object_]]):
    """An array of `bytes` objects that the functions of `np.char` take as well.

    Old releases of Triton made arrays of dtype `S`, and models of that time call `np.char.decode` on their
    inputs, which refuses arrays of objects. Newer ones make objects, for `S` drops NUL bytes at the end.
    """

    def __array_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Iterable[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if func.__module__ not in ("numpy.char", "numpy.strings"):
            return super().__array_function__(func, types, args, kwargs)
        return func(*(_as_strings(arg) for arg in args), **kwargs)


def _as_strings(value: object) -> object:
    return np.asarray(value).astype("S") if isinstance(value, StringArray) else value
