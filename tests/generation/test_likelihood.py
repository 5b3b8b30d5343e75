from __future__ import annotations

import numpy as np
import pytest
import torch

from genserve.generation.likelihood import LOWEST, likelihood, top_tokens


@pytest.fixture
def row():
    return np.random.default_rng(1).normal(scale=30, size=5000).astype(np.float32)


@pytest.mark.parametrize("num_top", [0, 1, 7])
def test_the_figures_are_those_of_torchs_log_softmax(row, num_top):
    expected = torch.log_softmax(torch.from_numpy(row).double(), dim=0)
    for logits in (row, torch.from_numpy(row)):
        found = likelihood(logits, 123, num_top=num_top)
        assert found.logprob == pytest.approx(expected[123].item(), abs=1e-4)
        best = expected.topk(num_top)
        assert [token_id for token_id, _ in found.top] == best.indices.tolist()
        assert [level for _, level in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert found.top == top_tokens(logits, num_top)


def test_a_token_has_the_same_figure_alone_and_among_the_best(row):
    [(best, level)] = top_tokens(row, 1)
    assert likelihood(row, best, num_top=0).logprob == level


def test_of_a_token_that_cannot_be_there_is_a_number_too():
    row = np.array([0.0, -np.inf], dtype=np.float32)
    assert likelihood(row, 1, num_top=2).logprob == LOWEST
    assert likelihood(row, 1, num_top=2).top == ((0, 0.0), (1, LOWEST))
