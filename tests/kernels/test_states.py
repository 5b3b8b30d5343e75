"""CausalConv and LinearAttention: numpy's recurrences, with bits that depend on one sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.c_types import instruction_sets
from tests.kernels.state_calls import ZERO, Attention, Conv, Rows, StateError

OPERATORS: dict[str, Conv | Attention] = {
    "conv": Conv(),
    "conv of 3 with gates": Conv(kernel_size=3, gated=True, has_bias=False, offset=7),
    "conv with silu": Conv(silu=True, channels=129, offset=2),
    "conv of 2 and of one channel": Conv(kernel_size=2, channels=1),
    "delta": Attention(),
    "delta with negative values": Attention(
        beta_scale=2.0, num_key_heads=4, key_dim=16, value_dim=32, norm_size=32
    ),
    "gated": Attention(rule="gated", norm="gate_then_norm", value_dim=16, norm_size=32, limits=(0.3, 0.9)),
    "gated without a norm": Attention(rule="gated", norm="", num_key_heads=1, num_heads=17, value_dim=70),
    "gated after its norm": Attention(rule="gated", norm="norm_then_gate", norm_size=80),
}
# A new sequence, one that goes on in its slot, and two from the same slot, one of which is not its owner.
BATCH = Rows(lengths=[5, 1, 30, 2], sources=[ZERO, 1, 3, 3], targets=[0, 1, 3 - 1, 4])

operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def outputs(operator: Any, rows: Rows = BATCH, **options: Any) -> tuple[Any, Any]:
    """The outputs, and the states of all slots."""
    states = operator.states(6)
    y = operator.compute(operator.rows(sum(rows.lengths)), rows, states, **options)
    return y, states


@operators
def test_a_batch_equals_numpy_token_by_token(operator: Any) -> None:
    y, states = outputs(operator)
    expected, after = operator.reference(operator.rows(38), BATCH, operator.states(6))
    assert np.abs(y - expected).max() < 2e-5 * (1 + np.abs(expected).max())
    assert np.abs(states - after).max() < 2e-5 * (1 + np.abs(after).max())


@operators
@pytest.mark.parametrize("length", [1, 7, 64])
def test_chunks_have_the_bits_of_one_forward(operator: Any, length: int) -> None:
    rows, states, own = operator.rows(70), operator.states(2), operator.states(2)
    whole = operator.compute(rows, Rows(lengths=[70], sources=[ZERO], targets=[0]), states)
    parts = []
    for start in range(0, 70, length):
        part = {name: array[start : start + length].copy() for name, array in rows.items()}
        # Every second chunk goes on in the other slot, as after a snapshot.
        source, target = (ZERO if start == 0 else start // length % 2, (start // length + 1) % 2)
        row = Rows(lengths=[len(part["x"])], sources=[source], targets=[target])
        parts.append(operator.compute(part, row, own))
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert own[target].tobytes() == states[0].tobytes()


@operators
def test_a_row_of_a_batch_has_its_bits_alone(operator: Any) -> None:
    y, states = outputs(operator)
    for tokens, source, target in BATCH.parts():
        own = operator.states(6)
        part = {name: array[tokens].copy() for name, array in operator.rows(38).items()}
        row = Rows(lengths=[len(part["x"])], sources=[source], targets=[target])
        alone = operator.compute(part, row, own)
        assert alone.tobytes() == y[tokens].tobytes()
        assert own[target].tobytes() == states[target].tobytes()


@operators
def test_threads_and_instruction_sets_change_no_bit(operator: Any) -> None:
    expected = [array.tobytes() for array in outputs(operator, threads=1)]
    for name in instruction_sets():
        for threads in (1, 3):
            found = outputs(operator, threads=threads, instruction_set=name)
            assert [array.tobytes() for array in found] == expected, (name, threads)


@operators
def test_slots_that_no_row_writes_are_unchanged(operator: Any) -> None:
    _, states = outputs(operator)
    assert states[[3, 5]].tobytes() == operator.states(6)[[3, 5]].tobytes()


@operators
@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"sources": [6, 1, 3, 3]}, "row 0 reads slot 6 and writes slot 0 of 6"),
        ({"sources": [ZERO, 1, -2, 3]}, "row 2 reads slot -2"),
        ({"targets": [0, 1, 2, -1]}, "row 3 reads slot 3 and writes slot -1"),
        ({"targets": [0, 1, 2, 6]}, "writes slot 6"),
        ({"targets": [0, 1, 2, 1]}, "rows 1 and 3 write the same slot"),
        ({"targets": [1, 3, 2, 0]}, "row 1 reads a slot that row 0 writes"),
        ({"targets": [0, 1, 2]}, r"state_target has shape \[3\], not \[4\]"),
        ({"lengths": [5, 0, 31, 2]}, "cumulative_sequence_length does not ascend"),
        ({"lengths": [5, 1, 30, 3]}, "cumulative_sequence_length does not ascend"),
    ],
)
def test_rows_beyond_the_slots_or_the_tokens_are_rejected(operator: Any, wrong: Any, what: str) -> None:
    rows = Rows(**{"lengths": BATCH.lengths, "sources": BATCH.sources, "targets": BATCH.targets, **wrong})
    with pytest.raises(StateError, match=what):
        operator.compute(operator.rows(38), rows, operator.states(6))


@pytest.mark.parametrize(
    ("operator", "what"),
    [
        (Conv(kernel_size=17), "kernel_size 17 make no convolution"),
        (Conv(kernel_size=1), "kernel_size 1 make no convolution"),
        (Conv(offset=-1), "from column -1"),
        (Attention(num_key_heads=3), "make no attention"),
        (Attention(norm_size=3), "norm_size is 3 of 160 outputs"),
    ],
)
def test_sizes_that_fit_nothing_are_rejected(operator: Any, what: str) -> None:
    with pytest.raises(StateError, match=what):
        outputs(operator)


@pytest.mark.parametrize("name", ["conv", "delta"])
def test_inputs_of_other_shapes_are_rejected(name: str) -> None:
    known: Any = OPERATORS[name]
    for changed in (*known.rows(38), *known.weights, "past_state"):
        operator = type(known)()
        inputs, states = operator.rows(38), operator.states(6)
        if changed == "past_state":
            states = states[:, :-1].copy()
        elif changed in inputs:
            inputs[changed] = inputs[changed][:, : -6 if name == "conv" else -3].copy()
        else:
            operator.weights[changed] = operator.weights[changed][:-1].copy()
        with pytest.raises(StateError, match=f"{changed} has"):
            operator.compute(inputs, BATCH, states)
