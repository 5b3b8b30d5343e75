"""Logits: the best tokens of rows, as numpy sorts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.kernels.logits import scan_logits
from tests.kernels.linear_calls import instruction_sets


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 5), st.integers(1, 1500), st.data(), st.sampled_from([1, 20, 10000]), st.integers(0, 2**32)
)
def test_rows_are_sorted_as_numpy_does(
    rows: int, size: int, data: st.DataObject, values: int, seed: int
) -> None:
    """Few distinct values: many are equal, and the lower id comes first; some are -inf."""
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-values, values + 1, (rows, size)) / 7).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = -0.0
    top_k = data.draw(st.integers(0, size))
    scan = scan_logits(logits, top_k=top_k)
    np.testing.assert_array_equal(scan.best, logits.max(axis=1))
    np.testing.assert_array_equal(scan.token_ids, logits.argmax(axis=1))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    ruled_out = np.take_along_axis(logits, order, axis=1) == -np.inf
    np.testing.assert_array_equal(scan.top_ids, np.where(ruled_out, -1, order))
    assert scan.log_sum_exp is None


@pytest.mark.parametrize("name", instruction_sets())
def test_the_log_of_the_sum_and_all_answers_on_every_instruction_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 20 * np.random.default_rng(0).standard_normal((4, 50_257), dtype=np.float32)
    logits[1, 5:] = -np.inf
    here = scan_logits(logits, top_k=50, log_sum_exp=True)
    monkeypatch.setenv("GENSERVE_KERNELS", name)
    there = scan_logits(logits, top_k=50, log_sum_exp=True)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one, other)
    best = logits.max(axis=1).astype(np.float64)
    want = best + np.log(np.exp(logits.astype(np.float64) - best[:, None]).sum(axis=1))
    assert there.log_sum_exp is not None
    np.testing.assert_allclose(there.log_sum_exp, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("place", [0, 17, 255, 256, 999])
def test_a_nan_anywhere_is_told(place: int) -> None:
    logits = np.zeros((3, 1000), np.float32)
    logits[1, place] = np.nan
    assert np.isnan(scan_logits(logits, top_k=3).best).tolist() == [False, True, False]


def test_infinity_is_the_best() -> None:
    logits = np.zeros((1, 300), np.float32)
    logits[0, 299] = np.inf
    scan = scan_logits(logits)
    assert (scan.token_ids.item(), scan.best.item()) == (299, np.inf)


@pytest.mark.parametrize(
    ("logits", "top_k"),
    [
        (np.zeros((2, 10)), 0),
        (np.zeros(10, np.float32), 0),
        (np.zeros((2, 10), np.float32)[:, ::2], 0),
        (np.zeros((2, 10), np.float32), 11),
        (np.zeros((2, 10), np.float32), -1),
        (np.zeros((2, 0), np.float32), 0),
    ],
)
def test_logits_of_another_layout_are_refused(logits: np.ndarray, top_k: int) -> None:
    with pytest.raises(ValueError, match=r"logits are|top_k is"):
        scan_logits(logits, top_k=top_k)
