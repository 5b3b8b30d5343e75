from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from genserve.sampling.batch_sampler import sample
from genserve.sampling.sampler import LOWEST_LOGPROB, token_logprob
from tests.fakes.sequences import sequence_of


@pytest.fixture
def row():
    return np.random.default_rng(1).normal(scale=30, size=5000).astype(np.float32)


@pytest.mark.parametrize("num_top", [0, 1, 7])
def test_log_probabilities_match_torch(row, num_top):
    expected = torch.log_softmax(torch.from_numpy(row).double(), dim=0)
    for logits in (row, torch.from_numpy(row)):
        found = token_logprob(logits, 123, num_top=num_top)
        assert found.logprob == pytest.approx(expected[123].item(), abs=1e-4)
        best = expected.topk(num_top)
        assert [token_id for token_id, _ in found.top] == best.indices.tolist()
        assert [level for _, level in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_token_has_the_same_log_probability_alone_and_among_the_best(row):
    [(best, level)] = token_logprob(row, 0, num_top=1).top
    assert token_logprob(row, best, num_top=0).logprob == level


def test_a_masked_token_has_a_finite_log_probability():
    row = np.array([0.0, -np.inf], dtype=np.float32)
    assert token_logprob(row, 1, num_top=2).logprob == LOWEST_LOGPROB
    assert token_logprob(row, 1, num_top=2).top == ((0, 0.0),)
    assert token_logprob(row, 0, token_ids=(1, 0)).top == ((0, 0.0), (1, LOWEST_LOGPROB))


def test_ties_go_to_the_lowest_ids():
    row = np.zeros(5000, dtype=np.float32)
    row[[40, 4000, 17]] = 1.0
    found = token_logprob(row, 0, num_top=6)
    assert [token_id for token_id, _ in found.top] == [17, 40, 4000, 0, 1, 2]


@pytest.mark.parametrize("place", [np.asarray, torch.from_numpy], ids=["host", "device"])
def test_processed_log_probabilities_match_transformers(place):
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((3, 500)) * 3).astype(np.float32)
    named = (3, 499, 0)
    asked = {"logprobs": True, "logprobs_mode": "processed"}
    sequences = [
        sequence_of([1], vocab_size=500, temperature=0.7, top_k=20, top_p=0.8, top_logprobs=20, **asked),
        sequence_of([1], vocab_size=500, logit_bias={9: -50.0}, logprob_token_ids=named, **asked),
        sequence_of([1], vocab_size=500, temperature=2.0, top_logprobs=1, **asked),
    ]
    rows = torch.from_numpy(logits).double()
    warped = TemperatureLogitsWarper(0.7)(None, rows[:1])
    warped = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, warped))
    biased = rows[1:2] - 50.0 * (torch.arange(500) == 9)
    expected = torch.cat([warped, biased, rows[2:] / 2.0]).log_softmax(dim=1)
    picks = sample(place(logits.copy()), sequences)
    for row, picked in zip(expected, picks, strict=True):
        assert picked.logprob.logprob == pytest.approx(row[picked.token_id].item(), abs=1e-5)
        for token_id, level in picked.logprob.top:
            assert level == pytest.approx(row[token_id].item(), abs=1e-5)
    tops = [[token_id for token_id, _ in picked.logprob.top] for picked in picks]
    left = int((expected[0] > -torch.inf).sum())
    assert tops[0] == expected[0].topk(left).indices.tolist()
    assert tops[1] == sorted(named, key=lambda token_id: -expected[1, token_id])
    assert tops[2] == [expected[2].argmax().item()]


@pytest.mark.parametrize("place", [np.asarray, torch.from_numpy], ids=["host", "device"])
def test_raw_log_probabilities_of_a_row_do_not_depend_on_other_requests(place):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((5, 500)).astype(np.float32)
    params = [
        {"logprobs": True, "top_logprobs": 3, "temperature": 1.5, "suppress_tokens": (7,)},
        {},
        {"logprobs": True, "logprobs_mode": "processed", "suppress_tokens": (8,), "top_logprobs": 5},
        {"logprobs": True, "logprob_token_ids": (7, 8), "repetition_penalty": 2.0},
        {"logprobs": True, "top_logprobs": 1},
    ]
    sequences = [sequence_of([1, 2], vocab_size=500, **one) for one in params]
    together = sample(place(logits.copy()), sequences)
    assert together[1].logprob is None
    for row, sequence, picked in zip(logits, sequences, together, strict=True):
        assert sample(place(row[None].copy()), [sequence]) == [picked]
    for index in (0, 3, 4):
        found = together[index].logprob
        raw = token_logprob(
            logits[index],
            together[index].token_id,
            num_top=sequences[index].params.top_logprobs,
            token_ids=sequences[index].params.logprob_token_ids,
        )
        assert found.logprob == pytest.approx(raw.logprob, abs=1e-5)
        assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in raw.top]
