"""The torch sampler runs here on tensors of the CPU: the same code as on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genserve.sampling.batch_sampler import sample_rows
from genserve.sampling.sampler import LogprobsRequest, SamplerOutput, SamplingMetadata
from genserve.sampling.torch_sampler import sample_on_device
from tests.fakes.rows import metadata_of

VOCAB_SIZE = 20_000


def random_rules(num: int, *, rng: np.random.Generator, **which) -> SamplingMetadata:
    return metadata_of(
        num,
        **which,
        temperature=rng.choice([1e-5, 0.1, 0.7, 1.0, 1.5], num).astype(np.float32),
        top_k=rng.choice([0, 1, 20, 500, VOCAB_SIZE, 10 * VOCAB_SIZE], num),
        top_p=rng.choice([1e-6, 0.3, 0.9, 0.999, 1.0], num).astype(np.float32),
        seed=rng.integers(0, 2**63, num).astype(np.uint64),
        step=rng.integers(0, 1000, num).astype(np.uint64),
    )


def on_a_border(row: np.ndarray, rules: SamplingMetadata, index: int) -> bool:
    """Whether the draw, or the cut of top-p, depends on the rounding of a float32."""
    ordered = np.sort(row.astype(np.float64))[::-1]
    weights = np.exp((ordered - ordered[0]) / float(rules.rules["temperature"][index]))
    k, top_p = int(rules.rules["top_k"][index]) or len(row), float(rules.rules["top_p"][index])
    shares = np.cumsum(weights) / weights[:k].sum()
    cut = np.abs(shares[:k] - top_p).min() < 1e-6
    kept = row >= ordered[min(int(np.searchsorted(shares[:k], top_p)), k - 1, len(row) - 1)]
    unsorted = np.exp((row[kept].astype(np.float64) - ordered[0]) / float(rules.rules["temperature"][index]))
    drawn = np.cumsum(unsorted) / unsorted.sum()
    uniform = rules.rules["uniform"][index]
    return bool(cut or np.abs(drawn - uniform).min() < 1e-6)


def asked(*rows: int, **options) -> list[LogprobsRequest]:
    return [LogprobsRequest(row=row, **options) for row in rows]


def levels(picked: SamplerOutput) -> np.ndarray:
    return np.array([one.logprob for one in picked.logprobs])


def both(logits: np.ndarray, metadata: SamplingMetadata) -> tuple[SamplerOutput, SamplerOutput]:
    before = logits.copy()
    answers = sample_rows(logits, metadata), sample_on_device(torch.from_numpy(logits), metadata)
    np.testing.assert_array_equal(logits, before)
    return answers


@pytest.mark.parametrize(
    "spread",
    [pytest.param(0.5, marks=pytest.mark.extended), 3.0, pytest.param(12.0, marks=pytest.mark.extended)],
)
def test_the_same_seeds_sample_the_tokens_of_the_host(spread):
    rng = np.random.default_rng(8)
    for _ in range(4):
        logits = (rng.standard_normal((40, VOCAB_SIZE)) * spread).astype(np.float32)
        logits[::2, 7] += 10  # far above many others, which weigh as much together
        drawing = sorted(rng.choice(40, 30, replace=False).tolist())
        rules = random_rules(30, rng=rng, drawing=drawing, logprobs=asked(0, 3, 39))
        host, device = both(logits, rules)
        for row in np.flatnonzero(host.token_ids != device.token_ids):
            assert on_a_border(logits[row], rules, drawing.index(row))
        same = (host.token_ids == device.token_ids)[[0, 3, 39]]
        np.testing.assert_allclose(levels(host)[same], levels(device)[same], atol=1e-5)
        assert device.finite.all()
        assert (host.token_ids == device.token_ids).sum() >= 39


def test_thousands_of_small_rows_get_the_same_tokens():
    rng = np.random.default_rng(9)
    num = 5000
    # Whole numbers, so that many values are equal: ties are kept and resolved in the same way.
    logits = rng.integers(-4, 4, (num, 50)).astype(np.float32)
    logits[rng.random((num, 50)) < 0.2] = -np.inf
    logits[:, 7] = 0.0
    rules = random_rules(num, rng=rng, logprobs=asked(*range(num)))
    host, device = both(logits, rules)
    differ = np.flatnonzero(host.token_ids != device.token_ids)
    assert all(on_a_border(logits[row], rules, row) for row in differ)
    assert len(differ) < 5
    agree = host.token_ids == device.token_ids
    np.testing.assert_allclose(levels(host)[agree], levels(device)[agree], atol=1e-5)


def test_rows_that_are_not_finite_are_reported_and_do_not_affect_others():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    logits[1, 5], logits[2, 0], logits[4] = np.nan, np.inf, -np.inf
    rules = random_rules(5, rng=rng, drawing=[0, 1, 2, 4, 5], logprobs=asked(*range(6)))
    host, device = both(logits, rules)
    assert host.finite.tolist() == device.finite.tolist() == [True, False, False, True, False, True]
    assert host.token_ids[device.finite].tolist() == device.token_ids[device.finite].tolist()
    assert ((device.token_ids >= 0) & (device.token_ids < 300)).all()
    np.testing.assert_allclose(levels(host)[device.finite], levels(device)[device.finite], atol=1e-5)


def test_masked_tokens_are_not_among_the_top_logprobs():
    logits = np.array([[0.0, -20_000.0, -np.inf]], dtype=np.float32)
    for picked in both(logits, metadata_of(0, logprobs=asked(0, num_top=3))):
        assert picked.logprobs[0].top == ((0, 0.0), (1, -9999.0))


def test_greedy_ties_go_to_the_lowest_id_on_both():
    logits = np.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]], dtype=np.float32)
    host, device = both(logits, metadata_of(0))
    assert host.token_ids.tolist() == device.token_ids.tolist() == [1, 0]
    assert device.logprobs == ()


@pytest.mark.parametrize(
    "rules",
    [
        {"min_p": [0.0, 0.05, 0.3, 1.0]},
        {"typical_p": [1.0, 0.2, 0.9]},
        {"epsilon_cutoff": [0.0, 0.01, 0.2]},
        {"eta_cutoff": [0.0, 0.01, 0.5]},
        {"top_n_sigma": [0.0, 0.5, 1.5]},
        {
            "top_k": [0, 30],
            "top_p": [1.0, 0.9],
            "min_p": [0.0, 0.02],
            "typical_p": [1.0, 0.8],
            "epsilon_cutoff": [0.0, 0.01],
            "eta_cutoff": [0.0, 0.02],
            "top_n_sigma": [0.0, 1.5],
        },
    ],
)
def test_each_stage_keeps_the_tokens_of_the_host(rules):
    rng = np.random.default_rng(10)
    num = 1000
    logits = (rng.standard_normal((num, 60)) * 2).astype(np.float32)
    logits[rng.random((num, 60)) < 0.1] = -np.inf
    columns = {name: rng.choice(values, num) for name, values in rules.items()}
    rows = metadata_of(num, temperature=rng.choice([0.5, 1.0, 2.0], num), **columns)
    host, device = both(logits, rows)
    assert (host.token_ids != device.token_ids).sum() <= 1  # on a border, to the last digits of a float32
    assert np.isfinite(logits[np.arange(num), device.token_ids]).all()
