"""The torch sampler on a GPU against the one of numpy."""

from __future__ import annotations

import numpy as np
import torch

from genserve.backends import torch_sampler
from genserve.generation import sampler
from tests.backends.test_torch_sampler import VOCAB_SIZE, asked, levels, on_a_border, random_rules


def test_tokens_are_those_of_the_host_for_the_same_seeds(device):
    rng = np.random.default_rng(8)
    for spread in (0.5, 3.0, 12.0):
        logits = (rng.standard_normal((64, VOCAB_SIZE)) * spread).astype(np.float32)
        which = {"drawing": range(64), "rules": random_rules(64, rng=rng), "asking": asked(*range(64))}
        host = sampler.pick_rows(logits, **which)
        picked = torch_sampler.pick_rows(torch.from_numpy(logits).to(device), **which)
        same = host.token_ids == picked.token_ids
        assert all(on_a_border(logits[row], which["rules"], row) for row in np.flatnonzero(~same))
        assert same.sum() >= 62
        np.testing.assert_allclose(levels(host)[same], levels(picked)[same], atol=1e-4)


def test_rows_that_are_not_finite_are_told(device):
    logits = np.zeros((4, 100), dtype=np.float32)
    logits[1, 5], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    rules = random_rules(4, rng=np.random.default_rng(2))
    rows = torch.from_numpy(logits).to(device)
    picked = torch_sampler.pick_rows(rows, drawing=range(4), rules=rules, asking=asked(*range(4)))
    assert picked.finite.tolist() == [True, False, False, False]
