"""The torch sampler on a GPU against the one of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genserve.sampling.batch_sampler import sample, sample_rows
from tests.fakes.grammars import Steps
from tests.fakes.sequences import sequence_of
from tests.sampling.test_torch_sampler import VOCAB_SIZE, asked, levels, on_a_border, random_rules


def test_the_same_seeds_sample_the_tokens_of_the_host(device):
    rng = np.random.default_rng(8)
    for spread in (0.5, 3.0, 12.0):
        logits = (rng.standard_normal((64, VOCAB_SIZE)) * spread).astype(np.float32)
        rules = random_rules(64, rng=rng, logprobs=asked(*range(64)))
        host = sample_rows(logits, rules)
        picked = sample_rows(torch.from_numpy(logits).to(device), rules)
        same = host.token_ids == picked.token_ids
        assert all(on_a_border(logits[row], rules, row) for row in np.flatnonzero(~same))
        assert same.sum() >= 62
        np.testing.assert_allclose(levels(host)[same], levels(picked)[same], atol=1e-4)


def test_rows_that_are_not_finite_are_reported(device):
    logits = np.zeros((4, 100), dtype=np.float32)
    logits[1, 5], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    rules = random_rules(4, rng=np.random.default_rng(2), logprobs=asked(*range(4)))
    picked = sample_rows(torch.from_numpy(logits).to(device), rules)
    assert picked.finite.tolist() == [True, False, False, False]


STAGED = [
    {"mirostat_mode": 1},
    {"mirostat_mode": 2, "mirostat_tau": 3.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "dry_multiplier": 0.8},
    {"dynatemp_range": 0.5, "top_h": 0.8},
    {"samplers": ("top_k", "typical_p", "min_p", "temperature"), "top_k": 50, "typical_p": 0.9, "min_p": 0.1},
]


def test_staged_rows_get_the_tokens_of_the_host(device):
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((60, VOCAB_SIZE)) * 3).astype(np.float32)

    def sequences():
        common = {"vocab_size": VOCAB_SIZE, "temperature": 1.0, "xtc_spared_ids": [2]}
        return [sequence_of([1, 5, 1, 5, 1], seed=i, **common, **STAGED[i % 5]) for i in range(60)]

    host = sample(logits.copy(), sequences())
    picked = sample(torch.from_numpy(logits).to(device), sequences())
    assert sum(a.token_id == b.token_id for a, b in zip(host, picked, strict=True)) >= 59
    for a, b in zip(host, picked, strict=True):
        assert a.token_id != b.token_id or a.surprise_bits == pytest.approx(b.surprise_bits, abs=1e-4)


def test_a_grammar_bitmask_is_applied_on_the_device(device):
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((3, VOCAB_SIZE), dtype=np.float32)
    allowed = [[7], [3, VOCAB_SIZE - 1], rng.choice(VOCAB_SIZE, 5000, replace=False).tolist()]

    def sequences():
        return [sequence_of([1], vocab_size=VOCAB_SIZE, grammar=Steps(step)) for step in allowed]

    host = sample(logits.copy(), sequences())
    picked = sample(torch.from_numpy(logits).to(device), sequences())
    assert [a.token_id for a in picked] == [a.token_id for a in host]
    assert all(a.token_id in step for a, step in zip(picked, allowed, strict=True))
