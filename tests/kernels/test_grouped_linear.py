"""GroupedLinear: the products of the operator Linear for each group of columns, with the same bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import linear_calls
from tests.kernels.c_types import Error, Tensor, Threads, instruction_sets, library
from tests.kernels.linear_calls import FORMATS, Layer, make_layer

Array = NDArray[Any]


class Attributes(ctypes.Structure):
    _fields_ = (("group", linear_calls.Attributes), ("num_groups", ctypes.c_int64))


def make_groups(weight_format: str) -> list[Layer]:
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"in_features": 70, "out_features": 45, "weight_format": weight_format}
    return [make_layer(rng, bias=False, **options) for _ in range(3)]


def compute(groups: list[Layer], x: Array, *, isa: str = "", threads: int = 1, **given: Any) -> Array:
    """Call genserve_grouped_linear; `given` replaces inputs.

    Raises:
        ValueError: the operator refused; has its message.
    """
    first = groups[0]
    named: dict[str, Any] = {"x": x} | {
        name: np.concatenate([group.inputs[name] for group in groups])
        for name in ("weight", "scales")
        if name in first.inputs
    }
    inputs = (Tensor * 3)(*(Tensor.of((named | given).get(name)) for name in ("x", "weight", "scales")))
    y = np.full((len(x), len(groups) * first.out_features), np.nan, np.float32)
    attributes = Attributes(linear_calls.attributes_of(first), len(groups))
    output, error = Tensor.of(y), Error()
    good = library(isa).genserve_grouped_linear(
        ctypes.byref(attributes),
        inputs,
        ctypes.byref(output),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not good:
        raise ValueError(error.message.decode())
    return y


def rows(groups: list[Layer], count: int) -> Array:
    width = len(groups) * groups[0].in_features
    return np.random.default_rng(1).standard_normal((count, width), dtype=np.float32)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("isa", instruction_sets())
def test_each_group_has_the_bits_of_a_linear(weight_format: str, isa: str) -> None:
    groups = make_groups(weight_format)
    x = rows(groups, 110)
    parts = np.split(x, len(groups), axis=1)
    expected = [
        linear_calls.compute(group, np.ascontiguousarray(part), isa=isa)
        for group, part in zip(groups, parts, strict=True)
    ]
    for threads in (1, 3):
        found = compute(groups, x, isa=isa, threads=threads)
        assert found.tobytes() == np.concatenate(expected, axis=1).tobytes()
    assert compute(groups, x[7:8], isa=isa).tobytes() == found[7:8].tobytes()


def test_a_call_without_rows_is_valid() -> None:
    groups = make_groups("int8_block")
    assert compute(groups, rows(groups, 0)).shape == (0, 135)


def test_wrong_inputs_are_refused() -> None:
    groups = make_groups("int8_block")
    x = rows(groups, 2)
    with pytest.raises(ValueError, match="x has shape"):
        compute(groups, x[:, :-1].copy())
    with pytest.raises(ValueError, match="weight has shape"):
        compute(groups, x, weight=groups[0].inputs["weight"])
