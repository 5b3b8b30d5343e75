"""Byte strings: the array of a string tensor, which numpy's string functions take too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteStrings"]


class ByteStrings(np.ndarray[Any, np.dtype[Any]]):
    """An array of objects, each `bytes`, that `np.char` takes as it takes an array of `S`.

    Triton gave models arrays of `S` at first and arrays of objects since. `np.char.decode(as_numpy())` of an
    older model.py refuses objects; here it gets `S`, and everything else sees the objects.
    """

    def __array_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Iterable[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Hand over strings where numpy's functions for strings ask for them."""
        if func.__module__ in ("numpy.char", "numpy.strings"):
            return func(*map(_as_strings, args), **{key: _as_strings(arg) for key, arg in kwargs.items()})
        return super().__array_function__(func, types, args, kwargs)


def _as_strings(value: Any) -> Any:
    if isinstance(value, ByteStrings):
        plain: NDArray[Any] = value.view(np.ndarray)
        return plain.astype("S")
    return value
