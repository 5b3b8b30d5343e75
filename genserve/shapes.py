"""Shapes: their text, whether one fits the dims of a config, and the `reshape` of a config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as Triton writes it: `[-1,3]`."""
    return f"[{','.join(map(str, shape))}]"


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a shape has the sizes of `dims`, where -1 matches any size."""
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110 - of every request: twice as fast
        if dim not in (-1, size):
            return False
    return True


def compatible(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a shape can have the sizes of both, where -1 matches any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def reshape(shape: Sequence[int], *, dims: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """Return `to` with the sizes that `shape` has where `dims` has -1, in order.

    A -1 of `to` remains where `dims` has fewer.
    """
    sizes = iter([size for size, dim in zip(shape, dims, strict=False) if dim == -1])
    return tuple(next(sizes, -1) if dim == -1 else dim for dim in to)
