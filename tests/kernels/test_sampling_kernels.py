"""Logits: scans and draws, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.kernels.sampling_kernels import SAMPLED_ROW, SAMPLING_RULE, sample_logits, scan_logits
from tests.kernels.c_types import instruction_sets


@given(
    st.integers(0, 5), st.integers(1, 1500), st.data(), st.sampled_from([1, 20, 10000]), st.integers(0, 2**32)
)
def test_rows_are_sorted_as_numpy_does(
    rows: int, size: int, data: st.DataObject, values: int, seed: int
) -> None:
    """Few distinct values, so that many are equal (the lower id comes first), and some -inf."""
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
    assert scan.log_sum_exp.size == 0


@pytest.mark.parametrize("name", instruction_sets())
def test_log_sum_exp_and_all_results_on_every_instruction_set(
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
    np.testing.assert_allclose(there.log_sum_exp, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("place", [0, 17, 255, 256, 999])
def test_a_nan_anywhere_is_reported(place: int) -> None:
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


def rules_of(num: int, rng: np.random.Generator) -> np.ndarray:
    rules = np.zeros(num, SAMPLING_RULE)
    rules["uniform"] = rng.random(num)
    rules["temperature"] = rng.choice([0.0, 1e-5, 0.3, 1.0, 2.0], num)
    rules["top_k"] = rng.choice([0, 0, 1, 5, 50, 5000], num)
    rules["top_p"] = rng.choice([1e-6, 0.3, 0.9, 0.999, 1.0, 1.0], num)
    rules["log_min_p"] = np.log(rng.choice([1e-30, 0.05, 0.5, 1.0], num))
    return rules


def kept_and_borders(row: np.ndarray, rule: np.void) -> tuple[np.ndarray, np.ndarray, float]:
    """The candidates of a row, their cumulative distribution, and the distance of top-p from another cut."""
    scaled = (row - row.max()) / rule["temperature"]
    ordered = np.sort(scaled)[::-1][: rule["top_k"] or None].astype(np.float64)
    shares = np.exp(ordered).cumsum() / np.exp(ordered).sum()
    last = int(shares.searchsorted(rule["top_p"])) if rule["top_p"] < 1 else len(ordered) - 1
    keep = scaled >= max(ordered[min(last, len(ordered) - 1)], rule["log_min_p"])
    cumulative = np.where(keep, np.exp(scaled.astype(np.float64)), 0).cumsum()
    margin = np.abs(shares - rule["top_p"]).min() if rule["top_p"] < 1 else 1.0
    return keep, cumulative / cumulative[-1], float(margin)


@given(st.integers(1, 3000), st.sampled_from([0.3, 2.0, 12.0]), st.booleans(), st.integers(0, 2**32))
def test_draws_agree_with_float64(size: int, spread: float, whole: bool, seed: int) -> None:
    """Integers, so that many are equal, also to the k-th, and are all kept."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((10, size)) * spread).astype(np.float32)
    if whole:
        logits = np.round(logits)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, size // 2] = 0.0
    rules = rules_of(len(logits), rng)
    sampled = sample_logits(logits, rules)
    assert sampled.dtype == SAMPLED_ROW
    np.testing.assert_array_equal(sampled["best"], logits.max(axis=1))
    for row, rule, found in zip(logits, rules, sampled, strict=True):
        if rule["temperature"] == 0:
            assert found["token_id"] == row.argmax()
            continue
        with np.errstate(over="ignore"):
            keep, cumulative, margin = kept_and_borders(row, rule)
            level = (row - row.max()) / rule["temperature"] >= found["level"]
        if margin < 1e-6:
            continue
        ruled_out = row == -np.inf
        np.testing.assert_array_equal(level | ruled_out, keep | ruled_out)
        assert keep[found["token_id"]]
        assert row[found["token_id"]] > -np.inf
        if np.abs(cumulative - rule["uniform"]).min() > 1e-6:
            assert found["token_id"] == cumulative.searchsorted(rule["uniform"], side="right")


@pytest.mark.parametrize("name", instruction_sets())
def test_draws_do_not_depend_on_instruction_set_and_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    logits = 4 * rng.standard_normal((60, 7001), dtype=np.float32)
    rules = rules_of(len(logits), rng)
    here = sample_logits(logits, rules)
    monkeypatch.setenv("GENSERVE_KERNELS", name)
    alone = [sample_logits(logits[i : i + 1], rules[i : i + 1]) for i in range(len(logits))]
    np.testing.assert_array_equal(here, np.concatenate(alone))


@pytest.mark.parametrize("place", [0, 255, 256, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_reported_and_not_sampled(place: int, value: float) -> None:
    logits = np.zeros((3, 1000), np.float32)
    logits[1, place] = value
    logits[2] = -np.inf
    rules = rules_of(3, np.random.default_rng(0))
    sampled = sample_logits(logits, rules)
    assert np.isfinite(sampled["best"]).tolist() == [True, False, False]


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.0), ("top_p", -1.0), ("log_min_p", 1.0)])
def test_the_best_token_always_remains(name: str, value: float) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 5000), dtype=np.float32)
    rules = rules_of(2, np.random.default_rng(0))
    rules["temperature"], rules["top_k"], rules["top_p"], rules["log_min_p"] = 1.0, 0, 1.0, -np.inf
    rules[name] = value
    np.testing.assert_array_equal(sample_logits(logits, rules)["token_id"], logits.argmax(axis=1))


@pytest.mark.parametrize("rules", [np.zeros(2, SAMPLING_RULE), np.zeros(6, SAMPLING_RULE)[::2], np.zeros(3)])
def test_rules_of_another_layout_are_refused(rules: np.ndarray) -> None:
    with pytest.raises(ValueError, match="rules are"):
        sample_logits(np.zeros((3, 5), np.float32), rules)
