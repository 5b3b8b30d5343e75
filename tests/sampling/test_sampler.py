from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from genserve.sampling.batch_sampler import sample_rows
from genserve.sampling.sampler import SamplingMetadata, uniforms
from genserve.sampling.sampler_chain import SamplerChain
from genserve.sampling.sampling_params import SamplingParams, active
from tests.fakes.rows import metadata_of, only
from tests.support.representatives import with_extended

VOCAB_SIZE = 40_000  # more blocks than most top-k, so that they are at work


def rows_of(num: int, *, first_step=0, **params) -> SamplingMetadata:
    return metadata_of(num, step=np.arange(first_step, first_step + num), **params)


def sample(logits: np.ndarray, rows: SamplingMetadata) -> np.ndarray:
    return sample_rows(logits, rows).token_ids


def reference(logits: np.ndarray, *, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution that transformers' own processors leave."""
    scores = torch.from_numpy(logits[None].astype(np.float64))
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


@pytest.mark.parametrize("spread", with_extended([1.0, 4.0], always={1.0}))
@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 1.0},
        pytest.param({"temperature": 1.0, "top_k": 0, "top_p": 0.5}, marks=pytest.mark.extended),
        {"temperature": 0.3, "top_k": 0, "top_p": 0.95},
        pytest.param({"temperature": 0.9, "top_k": 50, "top_p": 0.8}, marks=pytest.mark.extended),
        pytest.param({"temperature": 1.0, "top_k": 1, "top_p": 1.0}, marks=pytest.mark.extended),
        {"temperature": 1.5, "top_k": VOCAB_SIZE, "top_p": 0.999},
    ],
)
def test_drawn_tokens_cover_the_support_that_transformers_keeps(rules, spread):
    logits = (np.random.default_rng(3).standard_normal(VOCAB_SIZE) * spread).astype(np.float32)
    expected = reference(logits, **rules)
    # Invert evenly spaced numbers instead of random ones: then the draws must cover the support by mass.
    num = 512
    drawn = np.concatenate(
        [sample(np.tile(logits, (64, 1)), rows_of(64, first_step=i, **rules)) for i in range(0, num, 64)]
    )
    assert (expected[drawn] > 0).all()
    likely = np.flatnonzero(expected > 0.05)
    assert set(likely) <= set(drawn)


def test_an_unfiltered_draw_inverts_the_whole_distribution():
    logits = np.random.default_rng(5).standard_normal(1000).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    cumulative = np.cumsum(weights) / weights.sum()
    rows = rows_of(500)
    drawn = sample(np.tile(logits, (500, 1)), rows)
    expected = np.searchsorted(cumulative, rows.rules["uniform"], side="right")
    # float32 weights may move a number on a border to the neighbour.
    assert (np.abs(drawn - expected) <= 1).all()
    assert (drawn == expected).mean() > 0.99


def test_a_row_does_not_depend_on_its_neighbours():
    logits = np.random.default_rng(1).standard_normal((5, VOCAB_SIZE)).astype(np.float32)
    rows = metadata_of(
        5,
        temperature=np.array([1.0, 0.5, 2.0, 0.7, 1.0], dtype=np.float32),
        top_k=np.array([0, 10, 0, 50, 0]),
        top_p=np.array([1.0, 1.0, 0.9, 0.5, 0.3], dtype=np.float32),
        seed=np.arange(5, dtype=np.uint64),
        min_p=np.array([0.0, 0.0, 0.1, 0.0, 0.0]),
        typical_p=np.array([1.0, 0.5, 1.0, 0.9, 1.0]),
        epsilon_cutoff=np.array([1e-4, 0.0, 0.0, 0.0, 0.0]),
        top_n_sigma=np.array([0.0, 0.0, 0.0, 0.0, 2.0]),
        step=np.arange(5, dtype=np.uint64),
    )
    together = sample(logits, rows)
    for i in range(5):
        assert sample(logits[i : i + 1], only(rows, i))[0] == together[i]


@given(size=st.integers(1, 3000), spread=st.sampled_from([0.5, 3.0, 12.0]), seed=st.integers(0, 2**32))
def test_stages_and_kernels_draw_the_same_tokens(size, spread, seed):
    rng = np.random.default_rng(seed)
    num = 20
    logits = (rng.standard_normal((num, size)) * spread).astype(np.float32)
    logits[::2, 1::2] = -np.inf
    columns = {
        "temperature": rng.choice([1e-5, 0.5, 1.0, 2.0], num),
        "top_k": rng.choice([0, 1, 20, 5000], num),
        "top_p": rng.choice([0.3, 0.9, 1.0], num),
        "min_p": rng.choice([0.0, 0.05, 1.0], num),
    }
    rows = metadata_of(num, **columns, seed=rng.integers(0, 2**63, num))
    params = [SamplingParams(**{name: c[i].item() for name, c in columns.items()}) for i in range(num)]
    chained = replace(
        rows,
        chains=[
            SamplerChain(order=tuple(n for n in columns if any(active(p, [n]))), params=p) for p in params
        ],
        chances=[0.5] * num,
    )
    assert sample(logits, rows).tolist() == sample(logits, chained).tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-38])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = np.random.default_rng(1).standard_normal((3, VOCAB_SIZE)).astype(np.float32)
    assert sample(logits, rows_of(3, temperature=temperature)).tolist() == logits.argmax(axis=1).tolist()


def test_a_tiny_top_p_keeps_the_best_token():
    logits = np.random.default_rng(1).standard_normal((3, VOCAB_SIZE)).astype(np.float32)
    assert sample(logits, rows_of(3, top_p=1e-9)).tolist() == logits.argmax(axis=1).tolist()


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.array([[0.0, 2.0, 2.0]], dtype=np.float32)
    assert sample_rows(logits, rows_of(0)).token_ids.tolist() == [1]


def test_uniform_numbers_are_even_and_uncorrelated():
    steps = np.arange(100_000, dtype=np.uint64)
    numbers = uniforms(np.full_like(steps, 3), steps)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # 99.9 % quantile, 99 degrees of freedom
    other = uniforms(np.full_like(steps, 4), steps)
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_top_p_works_with_a_top_k_above_the_vocabulary_size():
    logits = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float32)
    assert sample(logits, rows_of(3, top_k=5000, top_p=1e-9)).tolist() == logits.argmax(axis=1).tolist()


def test_masked_tokens_are_never_drawn():
    logits = np.full((400, 300), -np.inf, dtype=np.float32)
    allowed = [64, 70, 131, 250]
    logits[:, allowed] = np.random.default_rng(1).standard_normal(4)
    for rules in ({}, {"top_k": 50}, {"top_p": 0.99999}, {"temperature": 1e-4}):
        drawn = sample(logits, rows_of(400, **rules))
        assert set(drawn.tolist()) <= set(allowed)
    assert set(sample(logits, rows_of(400)).tolist()) == set(allowed)


@pytest.mark.parametrize("rules", [{}, {"top_k": 50}, {"top_k": 5000}, {"top_p": 0.9}])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 777, VOCAB_SIZE - 1])
def test_a_row_that_is_not_finite_is_reported_and_does_not_affect_others(rules, value, place):
    logits = np.random.default_rng(1).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    good = sample(logits, rows_of(4, **rules))
    logits[1, place] = value
    logits[2] = -np.inf
    picked = sample_rows(logits, rows_of(4, **rules))
    assert picked.finite.tolist() == [True, False, False, True]
    assert picked.token_ids[[0, 3]].tolist() == good[[0, 3]].tolist()


def test_a_batch_may_mix_greedy_and_drawing_rows():
    logits = np.random.default_rng(1).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    drawn = sample(logits[[1, 2]], rows_of(2))
    mixed = sample_rows(logits, metadata_of(2, drawing=[1, 2])).token_ids
    best = logits.argmax(axis=1)
    assert mixed.tolist() == [best[0], *drawn, best[3]]
