from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from genserve.sampling.staged_sampler import Truncation, kept

# In the order of transformers, which is ours.
WARPERS = {
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
RULES = [
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_p": 0.9},
    {"top_p": 0.995},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"epsilon_cutoff": 3e-3},
    {"epsilon_cutoff": 0.9},
    {"eta_cutoff": 2e-3},
    {"eta_cutoff": 0.5},
    {"top_k": 40, "typical_p": 0.8},
    {"top_p": 0.9, "min_p": 0.05, "eta_cutoff": 0.01},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
]


def distribution(logits: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    if ids is not None:
        weights[np.setdiff1d(np.arange(logits.size), ids)] = 0
    return weights / weights.sum()


def reference(logits: np.ndarray, rules: dict) -> np.ndarray:
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in rules.items()])
    scores = warpers(None, torch.from_numpy(logits[None].astype(np.float64)))
    return torch.softmax(scores, dim=-1)[0].numpy()


@pytest.mark.parametrize("rules", RULES)
def test_the_distribution_that_is_left_is_that_of_transformers(rules):
    rng = np.random.default_rng(6)
    for spread in (0.3, 1.0, 4.0):
        for size in (30, 1000, 20_000):
            row = (rng.standard_normal(size) * spread).astype(np.float32)
            row[rng.random(size) < 0.1] = -np.inf
            row[-1] = np.finfo(np.float32).min  # how some graphs say the same
            scaled = row - row.max()
            left = distribution(row, kept(scaled, Truncation(**rules)))
            np.testing.assert_allclose(left, reference(row, rules), atol=1e-5)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_top_n_sigma_keeps_what_the_paper_keeps_whatever_the_temperature(sigma):
    row = (np.random.default_rng(7).standard_normal(1000) * 3).astype(np.float32)
    expected = np.flatnonzero(row >= row.max() - sigma * row.std())
    banned = np.append(row, np.float32(-np.inf))  # does not count
    for temperature in (0.5, 1.0, 2.0):
        for each in (row, banned):
            ids = kept((each - each.max()) / np.float32(temperature), Truncation(top_n_sigma=sigma))
            assert ids.tolist() == expected.tolist()


def test_what_is_left_by_top_n_sigma_is_what_top_p_is_a_share_of():
    row = (np.random.default_rng(8).standard_normal(1000) * 2).astype(np.float32)
    narrowed = np.where(row >= row.max() - row.std(), row, -np.inf).astype(np.float32)
    ids = kept(row - row.max(), Truncation(top_n_sigma=1.0, top_p=0.7))
    np.testing.assert_allclose(distribution(row, ids), reference(narrowed, {"top_p": 0.7}), atol=1e-5)


def test_without_a_rule_all_that_can_be_is_kept():
    assert kept(np.array([-2.0, -np.inf, 0.0], dtype=np.float32), Truncation()).tolist() == [0, 2]
