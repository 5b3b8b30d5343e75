"""Experts: numpy's choice over the operator Linear, with bits that depend on the row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.c_types import instruction_sets
from tests.kernels.experts_calls import Case, ExpertsError, Routing, compute, make_case, reference
from tests.kernels.linear_calls import FORMATS
from tests.support.representatives import with_extended

ROUTINGS = {
    "softmax": Routing(num_experts=8, top_k=3, normalise=0.0),
    "softmax, weights as they are": Routing(num_experts=8, top_k=2),
    "softmax of the chosen": Routing(num_experts=5, top_k=2, score="softmax_of_top"),
    "sigmoid": Routing(num_experts=20, top_k=4, score="sigmoid", normalise=1e-20, scale=2.5),
    "groups by their two best": Routing(
        num_experts=12, top_k=4, score="sigmoid", groups=(4, 2, 2), normalise=1e-20
    ),
    "groups by their best": Routing(num_experts=12, top_k=3, groups=(3, 1, 1), scale=16.0),
    "sigmoid of the chosen": Routing(num_experts=5, top_k=2, score="sigmoid_of_top"),
    "sparsemixer": Routing(num_experts=6, top_k=2, score="sparsemixer", jitter=0.2),
    "one expert": Routing(num_experts=1, top_k=1),
    "all experts": Routing(num_experts=4, top_k=4),
}


def rows(count: int, width: int = 70, *, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)


def assert_equals_the_reference(case: Case, count: int, *, threads: int = 2) -> None:
    width = case.router.shape[1]
    x, residual = rows(count, width), rows(count, width, seed=2)
    found, expected = compute(case, x, residual, threads=threads), reference(case, x, residual)
    assert np.abs(found - expected).max() < 2e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biases", [False, True])
def test_every_router_chooses_as_numpy_does(name: str, biases: bool) -> None:
    assert_equals_the_reference(make_case(ROUTINGS[name], formats=("float32", "float32"), biases=biases), 37)


def test_llama_4_scales_what_experts_read() -> None:
    routing = Routing(num_experts=5, top_k=2, score="sigmoid_of_top", scales_inputs=True)
    assert_equals_the_reference(make_case(routing, formats=("float32", "float32"), shared=33), 37)


def test_gemma_4_norms_and_scales_apart_from_the_experts() -> None:
    case = make_case(ROUTINGS["softmax"], formats=("float32", "float32"), gemma4=True)
    assert_equals_the_reference(case, 37)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("options", [{}, {"shared": 33}, {"shared": 33, "scored": True, "bias": True}])
def test_every_format_has_the_products_of_linear(weight_format: str, options: dict[str, Any]) -> None:
    case = make_case(ROUTINGS["softmax"], formats=(weight_format, weight_format), **options)
    assert_equals_the_reference(case, 23)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q5_0", "Q8_0")])
def test_weights_keep_the_blocks_of_a_file(kinds: tuple[str, str]) -> None:
    case = make_case(ROUTINGS["softmax"], kinds=kinds, hidden=256, intermediate=256)
    assert_equals_the_reference(case, 23)


def test_many_rows_of_an_expert_are_multiplied_in_parts() -> None:
    assert_equals_the_reference(make_case(ROUTINGS["all experts"]), 300)


def test_gpt_oss_limits_gates_and_values() -> None:
    case = make_case(
        ROUTINGS["softmax of the chosen"],
        formats=("float32", "float32"),
        activation="clamped_swiglu",
        bias=True,
    )
    for layer in case.inner:  # or the limits would not matter
        layer.weight = layer.weight * 3
        layer.set_weight(layer.weight)
    assert_equals_the_reference(case, 19)


@pytest.mark.parametrize("name", ROUTINGS)
def test_equal_scores_choose_the_lowest_index(name: str) -> None:
    """Without a difference between experts the choice shows only in their outputs."""
    case = make_case(ROUTINGS[name], formats=("float32", "float32"))
    case.router[:] = 0
    assert_equals_the_reference(case, 3)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("formats", [("float32", "float32"), ("int8_block", "int4_block")])
def test_the_bits_of_a_row_depend_on_it_alone(isa: str, formats: tuple[str, str]) -> None:
    case = make_case(ROUTINGS["sigmoid"], formats=formats, shared=40, scored=True, biases=True)
    x = rows(150)
    together = compute(case, x, x, threads=3, isa=isa)
    assert together.tobytes() == compute(case, x, x).tobytes()
    for part in (slice(0, 1), slice(1, 8), slice(8, 72), slice(72, 150)):
        assert together[part].tobytes() == compute(case, x[part], x[part], isa=isa).tobytes()
    order = np.random.default_rng(5).permutation(len(x))
    assert together[order].tobytes() == compute(case, x[order], x[order], isa=isa).tobytes()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(
    "kinds", with_extended([("Q4_K", "Q6_K"), ("Q5_0", "Q8_0")], always={("Q4_K", "Q6_K")})
)
def test_panels_that_few_rows_read_together_have_the_bits_of_one(isa: str, kinds: tuple[str, str]) -> None:
    """Experts of one or two rows multiply four panels at a time, if each thread gets eight."""
    case = make_case(ROUTINGS["softmax"], kinds=kinds, hidden=512, intermediate=256, biases=True)
    x = rows(40, 512)
    together = compute(case, x, x, isa=isa)
    for few in (1, 2, 5):
        parts = [compute(case, x[i : i + few], x[i : i + few], isa=isa, threads=2) for i in range(0, 40, few)]
        assert together.tobytes() == np.concatenate(parts).tobytes()


def test_a_row_that_is_not_finite_changes_no_other_row() -> None:
    case, x = make_case(ROUTINGS["groups by their two best"]), rows(9)
    before = compute(case, x)
    x[4, 3] = np.nan
    after = compute(case, x)
    others = np.arange(9) != 4
    assert before[others].tobytes() == after[others].tobytes()
    assert np.isnan(after[4]).all()


def test_a_call_without_rows_is_valid() -> None:
    assert compute(make_case(ROUTINGS["softmax"]), rows(0)).shape == (0, 70)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more than all": ({"top_k": 9}, {}, "top_k is 9 of 8 experts"),
    "groups of parts": ({"num_groups": 3, "kept_groups": 1, "group_top": 1}, {}, "1 of 3 groups"),
    "too few in the groups": ({"num_groups": 4, "kept_groups": 1, "group_top": 1}, {}, "make no choice of 3"),
    "sparsemixer of three": ({"score": 3}, {}, "sparsemixer chooses 2"),
    "no router": ({}, {"router_weight": None}, "router: weight is missing"),
    "another router": ({}, {"router_weight": np.zeros((2, 70, 32), np.float32)}, "router: weight has shape"),
    "a choice of others": ({}, {"choice_bias": np.zeros(7, np.float32)}, "choice_bias has shape"),
    "a shared expert": ({}, {"shared_down_weight": np.zeros(3, np.float32)}, "shared_size is 0"),
    "rows of another size": ({}, {"residual": np.zeros((5, 71), np.float32)}, "residual has shape"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_wrong_inputs_are_refused(what: str) -> None:
    options, given, message = REFUSALS[what]
    case = make_case(ROUTINGS["softmax"])
    routing = case.routing.attributes()
    for name, value in options.items():
        setattr(routing, name, value)
    with pytest.raises(ExpertsError, match=message):
        compute(case, rows(5), given=given, routing=routing)
