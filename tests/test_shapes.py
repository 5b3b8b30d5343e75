"""Shapes: texts, wildcards, reshapes."""

from __future__ import annotations

import pytest

from genserve.tensor import compatible, fits, reshape, shape_text


def test_a_shape_has_tritons_text():
    assert shape_text((-1, 3)) == "[-1,3]"
    assert shape_text([]) == "[]"


@pytest.mark.parametrize(
    ("shape", "dims", "is_fitting"),
    [((2, 3), (2, 3), True), ((2, 3), (-1, 3), True), ((2, 3), (2,), False), ((2, 3), (2, 4), False)],
)
def test_a_wildcard_fits_any_size(shape, dims, is_fitting):
    assert fits(shape, dims) is is_fitting


def test_shapes_are_compatible_where_either_has_a_wildcard():
    assert compatible((-1, 3), (2, -1))
    assert not compatible((2, 3), (2, 4))
    assert not compatible((2,), (2, 1))


def test_a_reshape_keeps_the_order_of_the_wildcards():
    assert reshape((5, 2, 7), dims=(-1, 2, -1), to=(-1, 1, 2, -1)) == (5, 1, 2, 7)
    assert reshape((2,), dims=(2,), to=(-1, 2)) == (-1, 2)
