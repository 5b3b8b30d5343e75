"""Adapters of linear layers: compared with numpy, and equal bits in any call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from genserve import kernels
from genserve.kernels import low_rank
from genserve.kernels.low_rank import LayerNames, LinearShape, LowRankPart, pack_layer
from tests.kernels.c_types import instruction_sets
from tests.kernels.linear_calls import (
    ALL_FORMATS,
    FORMATS,
    NORMS,
    Layer,
    compute,
    make_layer,
    normed,
    reference,
)
from tests.support.representatives import with_extended

Array = NDArray[Any]
Adapter = list[LowRankPart]

_LAYER = ""  # the name of the layer of `genserve_linear`


def shape_of(layer: Layer) -> LinearShape:
    outputs = tuple(outputs for _, outputs in layer.segments) or (layer.out_features,)
    return LinearShape(
        in_features=layer.in_features,
        outputs=outputs,
        gated=layer.gated,
        in_int8=layer.weight_format != "float32",
    )


def random_adapter(rng: np.random.Generator, layer: Layer, ranks: Sequence[int]) -> Adapter:
    """An adapter whose parts share the outputs; a rank of 0 leaves its part as it is."""
    borders = np.linspace(0, layer.out_features, len(ranks) + 1).astype(int)
    return [
        LowRankPart(
            first=int(start),
            down=rng.standard_normal((rank, layer.in_features), dtype=np.float32) * np.float32(1e-3),
            up=rng.standard_normal((end - start, rank), dtype=np.float32),
        )
        for rank, start, end in zip(ranks, borders, borders[1:], strict=False)
        if rank and end > start
    ]


def adapted(
    layer: Layer,
    x: Array,
    adapters: Sequence[Adapter],
    rows: Sequence[int],
    *,
    isa: str = "",
    threads: int = 1,
) -> Array:
    """What the operator computes for rows with the adapters of these indices; -1: none."""
    loaded = kernels._loaded(isa or kernels.instruction_set())
    with mock.patch.object(low_rank, "library", return_value=loaded):
        names = LayerNames([_LAYER])
        packed = [
            names.packed({_LAYER: pack_layer(shape_of(layer), parts)} if parts else {}) for parts in adapters
        ]
        with names.using(packed, np.array(rows, np.int32), np.arange(len(rows))):
            return compute(layer, x, isa=isa, threads=threads)


def product(layer: Layer, x: Array, parts: Adapter) -> tuple[Array, Array]:
    """B (A x) in float64 for rows of x, before the activation, and the most that rounding may change."""
    values = normed(layer, x.astype(np.float64))
    total = np.zeros((len(x), layer.out_features))
    off = np.zeros_like(total)
    step = 1e-6 if layer.weight_format == "float32" else 1 / 254
    x_off = 2 * step * np.abs(values).max(axis=1, keepdims=True, initial=0)  # pairs share 8 bits
    for part in parts:
        outputs = slice(part.first, part.first + len(part.up))
        down, up = part.down.T.astype(np.float64), part.up.T.astype(np.float64)
        down_off = step * np.abs(down).max(axis=0, keepdims=True)
        up_off = np.broadcast_to(step * np.abs(up).max(axis=1, keepdims=True), up.shape)
        low = values @ down
        low_off = np.abs(values).sum(axis=1, keepdims=True) * down_off
        low_off = low_off + x_off * (np.abs(down) + down_off).sum(axis=0)
        low_off += 2 * step * (np.abs(low) + low_off).max(axis=1, keepdims=True)
        total[:, outputs] += low @ up
        off[:, outputs] += low_off @ (np.abs(up) + up_off) + (np.abs(low) @ up_off) + 1e-7
    return total, off


layers = st.fixed_dictionaries(
    {
        "in_features": st.integers(1, 150),
        "out_features": st.integers(1, 110),
        "weight_format": st.sampled_from(FORMATS),
        "norm": st.sampled_from(NORMS),
        "gated": st.booleans(),
        "bias": st.booleans(),
    }
)


@given(
    layers,
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(-1, 3), max_size=30),
    st.integers(0, 2**32),
)
def test_rows_of_any_adapters_agree_with_float64(
    attributes: dict[str, Any], ranks: list[list[int]], rows: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, **attributes)
    adapters = [random_adapter(rng, layer, each) for each in ranks]
    rows = [min(row, len(adapters) - 1) for row in rows]
    x = rng.standard_normal((len(rows), layer.in_features), dtype=np.float32)
    got = adapted(layer, x, adapters, rows)
    for isa in instruction_sets():
        np.testing.assert_array_equal(adapted(layer, x, adapters, rows, isa=isa), got)
    bias = layer.inputs.get("bias", np.zeros(layer.out_features, np.float32))
    for row, adapter in enumerate(rows):
        delta, error = (
            product(layer, x[row : row + 1], adapters[adapter]) if adapter >= 0 else (np.zeros((1, 1)),) * 2
        )
        # The product acts as a bias does.
        layer.inputs["bias"] = bias + np.zeros(layer.out_features, np.float32) + delta[0]
        want, off = reference(layer, x[row : row + 1].astype(np.float64))
        if layer.gated:
            plain = {**layer.__dict__, "gated": False}
            z, _ = reference(Layer(**plain), x[row : row + 1].astype(np.float64))
            gate, up = np.abs(np.split(z, 2, axis=1))
            error_gate, error_up = np.split(np.broadcast_to(error, z.shape), 2, axis=1)
            error = error_gate * up + gate * error_up + error_gate * error_up
        assert (np.abs(got[row : row + 1] - want) <= off + error).all()


@pytest.mark.parametrize(
    ("weight_format", "most"), [("int8", 0.03), ("int8_block", 0.03), ("int4_block", 0.03), ("float32", 1e-4)]
)
def test_the_products_of_random_numbers_are_close(weight_format: str, most: float) -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(rng, in_features=576, out_features=480, weight_format=weight_format)
    adapter = random_adapter(rng, layer, [16, 8, 3])
    x = rng.standard_normal((7, 576), dtype=np.float32)
    delta, _ = product(layer, x, adapter)
    found = adapted(layer, x, [adapter], [0] * len(x)) - compute(layer, x)
    assert np.linalg.norm(found - delta) < most * np.linalg.norm(delta)


@pytest.mark.parametrize("norm", with_extended(NORMS, always={"", "rms"}))
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("gated", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_row_has_the_bits_of_its_adapter_alone(weight_format: str, norm: str, gated: bool) -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(
        rng, in_features=135, out_features=120, weight_format=weight_format, norm=norm, gated=gated
    )
    adapters = [random_adapter(rng, layer, ranks) for ranks in ([16], [4, 0, 7], [0], [8, 3])]
    rows = rng.integers(-1, len(adapters), 100).tolist()  # a chunk of linear.hpp has 96
    x = rng.standard_normal((len(rows), layer.in_features), dtype=np.float32)
    alone = np.concatenate(
        [
            adapted(layer, x[i : i + 1], adapters[row : row + 1], [0])
            if row >= 0
            else compute(layer, x[i : i + 1])
            for i, row in enumerate(rows)
        ]
    )
    for threads in (1, 2, 5):
        np.testing.assert_array_equal(adapted(layer, x, adapters, rows, threads=threads), alone)
    for size in (7, 64):
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            np.testing.assert_array_equal(adapted(layer, x[part], adapters, rows[part]), alone[part])
    changed = [row in (0, 1, 3) for row in rows]
    assert (adapted(layer, x, adapters, rows) != compute(layer, x)).any(axis=1).tolist() == changed


def test_the_rows_whose_logits_are_wanted_have_their_adapters() -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(rng, in_features=64, out_features=64)
    adapter = random_adapter(rng, layer, [8])
    x = rng.standard_normal((6, 64), dtype=np.float32)
    names, rows = LayerNames([_LAYER]), np.array([-1, 0, -1, 0, 0, -1], np.int32)
    packed = names.packed({_LAYER: pack_layer(shape_of(layer), adapter)})
    whole = adapted(layer, x, [adapter], rows.tolist())
    with names.using([packed], rows, np.array([2, 4])):
        np.testing.assert_array_equal(compute(layer, x[[2, 4]]), whole[[2, 4]])


@pytest.mark.parametrize("kinds", [["Q8_0"], ["Q4_K", "Q6_K"], ["Q4_0", "Q8_0", "Q5_0"]])
def test_segments_of_several_formats_have_one_adapter(kinds: list[str]) -> None:
    rng = np.random.default_rng(1)
    layer = make_layer(rng, in_features=512, out_features=150, kinds=kinds)
    assert layer.weight_format in ALL_FORMATS
    adapters = [random_adapter(rng, layer, [6, 0, 9])]
    x = rng.standard_normal((3, 512), dtype=np.float32)
    delta, error = product(layer, x, adapters[0])
    got = adapted(layer, x, adapters, [0, -1, 0])
    plain = compute(layer, x)
    np.testing.assert_array_equal(got[1], plain[1])
    off = error + 1e-5 * np.abs(plain) + 1e-5
    assert (np.abs(got - plain - delta) <= off)[[0, 2]].all()


@pytest.mark.parametrize("exponent", [-30, -12, 0, 12, 30])
def test_the_size_of_the_numbers_does_not_matter(exponent: int) -> None:
    """A power of two moved from A to B changes no bit."""
    rng = np.random.default_rng(1)
    layer = make_layer(rng, in_features=64, out_features=64)
    [part] = random_adapter(rng, layer, [8])
    factor = np.float32(2.0**exponent)
    moved = LowRankPart(first=0, down=part.down * factor, up=part.up / factor)
    x = rng.standard_normal((2, 64), dtype=np.float32)
    np.testing.assert_array_equal(adapted(layer, x, [[moved]], [0, 0]), adapted(layer, x, [[part]], [0, 0]))
