"""Custom orders and rarely used samplers, with numpy and with torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from genserve.sampling.sampler_chain import NUMPY_OPS, SamplerChain, apply_chains, chain_of
from genserve.sampling.sampling_params import SAMPLERS, SamplingParams
from genserve.sampling.torch_sampler import TORCH_OPS
from tests.support.recorded_llama_cpp import recorded

VOCAB_SIZE = 300
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_h": TopHLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
VALUES = {
    "temperature": 0.6,
    "top_h": 0.7,
    "top_k": 60,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.8,
    "epsilon_cutoff": 0.002,
    "eta_cutoff": 0.02,
}


def host(row: np.ndarray, chains: SamplerChain, chance: float) -> np.ndarray:
    return apply_chains(row[None], [chains], chances=[chance], ops=NUMPY_OPS)[0]


def device(row: np.ndarray, chains: SamplerChain, chance: float) -> np.ndarray:
    return apply_chains(torch.from_numpy(row[None]), [chains], chances=[chance], ops=TORCH_OPS)[0].numpy()


PLACES = [host, device]


def left_by(
    row: np.ndarray, *, place, chance: float = 0.0, spared: Sequence[int] = (), **options
) -> np.ndarray:
    """The distribution of a row that a token is drawn from."""
    params = SamplingParams(**{"temperature": 1.0, **options})
    # One that needs none would go through the usual order, which others test.
    chains = chain_of(params, spared_ids=tuple(spared)) or SamplerChain(order=params.samplers, params=params)
    before = row.copy()
    left = place(row, chains, chance)
    np.testing.assert_array_equal(row, before)
    assert left.max() == 0
    return softmax(left)


def softmax(row: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(row.astype(np.float64)), dim=0).numpy()


def random_row(rng: np.random.Generator, *, size: int = VOCAB_SIZE, spread: float = 3.0) -> np.ndarray:
    row = (rng.standard_normal(size) * spread).astype(np.float32)
    row[rng.random(size) < 0.1] = -np.inf
    return row


@pytest.mark.parametrize("place", PLACES)
def test_stages_in_any_order_match_transformers(place):
    rng = np.random.default_rng(1)
    for _ in range(60):
        order = rng.permutation(list(WARPERS))[: rng.integers(1, len(WARPERS) + 1)].tolist()
        row = random_row(rng, spread=float(rng.choice([0.5, 2.0, 5.0])))
        warpers = LogitsProcessorList([WARPERS[name](VALUES[name]) for name in order])
        expected = warpers(None, torch.from_numpy(row[None].astype(np.float64)))[0].numpy()
        options = {"temperature": 1.0, **{name: VALUES[name] for name in order}}
        left = left_by(row, place=place, samplers=tuple(order), **options)
        np.testing.assert_allclose(left, softmax(expected), atol=1e-5, err_msg=str(order))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.4, 0.9])
def test_top_h_acts_in_its_place_of_the_default_order(share, place):
    row = np.random.default_rng(2).standard_normal(VOCAB_SIZE).astype(np.float32) * 2
    in_turn = [TemperatureLogitsWarper(0.8), TopHLogitsWarper(share), TopPLogitsWarper(0.7)]
    expected = LogitsProcessorList(in_turn)(None, torch.from_numpy(row[None].astype(np.float64)))[0].numpy()
    left = left_by(row, place=place, temperature=0.8, top_h=share, top_p=0.7)
    np.testing.assert_allclose(left, softmax(expected), atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_temperatures_xtc_and_orders_match_llama_cpp(place):
    for case in recorded("dynatemp_range", "xtc_probability", "samplers"):
        options = {**case["options"], "samplers": tuple(case["options"].get("samplers", ()))}
        left = left_by(case["row"], place=place, **options)
        np.testing.assert_allclose(left, softmax(case["left"]), atol=1e-5, err_msg=str(case["options"]))


@pytest.mark.parametrize("place", PLACES)
def test_mirostat_matches_llama_cpp_at_each_step(place):
    chains: dict[str, SamplerChain | None] = {}
    for case in recorded("mirostat_mode"):
        options = json.dumps(case["options"])
        params = SamplingParams(temperature=1.0, **case["options"])
        now = chains.get(options) or chain_of(params, spared_ids=())
        left = softmax(place(case["row"], now, 0.0))
        np.testing.assert_allclose(left, softmax(case["left"]), atol=1e-5)
        chains[options] = now.after(-np.log2(left[case["selected"]]))


@pytest.mark.parametrize("place", PLACES)
def test_xtc_acts_by_chance_and_never_removes_a_spared_token(place):
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    options = {"place": place, "xtc_probability": 0.5, "xtc_threshold": 0.15}
    whole = [0.4, 0.3, 0.2, 0.1]
    cut = [0, 0, 2 / 3, 1 / 3]
    for chance, spared, expected in [
        (0.49, (), cut),
        (0.5, (), whole),
        (0.0, (1,), whole),
        (0.0, (0, 3), whole),
        (0.0, (2, 3), cut),
    ]:
        np.testing.assert_allclose(left_by(row, chance=chance, spared=spared, **options), expected, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("spared", "expected"), [(1, [0, 4 / 9, 3 / 9, 2 / 9]), (3, [0, 0, 0, 1])])
def test_xtc_knows_spared_tokens_after_a_cut(spared, expected, place):
    row = np.log(np.array([0.1, 0.4, 0.3, 0.2], dtype=np.float32))
    options = {"top_k": 3, "xtc_probability": 1.0, "xtc_threshold": 0.15}
    np.testing.assert_allclose(left_by(row, place=place, spared=(spared,), **options), expected, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spread", [0.5, 4.0, 40.0])
def test_typical_of_a_large_vocabulary_matches_transformers(spread, place):
    row = random_row(np.random.default_rng(4), size=20_000, spread=spread)
    expected = TypicalLogitsWarper(0.8)(None, torch.from_numpy(row[None].astype(np.float64)))[0].numpy()
    np.testing.assert_allclose(left_by(row, place=place, typical_p=0.8), softmax(expected), atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("threshold", [0.0, 0.45, 0.6])
def test_xtc_keeps_one_likely_token(threshold, place):
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    left = left_by(row, place=place, xtc_probability=1.0, xtc_threshold=threshold)
    np.testing.assert_allclose(left, [0.4, 0.3, 0.2, 0.1] if threshold else [0, 0, 0, 1], atol=1e-6)


ODD_ROWS = {
    "one token": np.array([-np.inf, 2.0, -np.inf], dtype=np.float32),
    "all equal": np.zeros(5, dtype=np.float32),
    "a penalty of DRY": np.array([3.0, 1.0, -1e9, 0.0], dtype=np.float32),
    "masked by a graph": np.array([1.0, 0.5, np.finfo(np.float32).min, 0.0], dtype=np.float32),
    "one far above": np.array([500.0, 0.0, 1.0, -np.inf], dtype=np.float32),
}
ODD_OPTIONS = [
    {"mirostat_mode": 1},
    {"mirostat_mode": 1, "mirostat_tau": 0.0},
    {"mirostat_mode": 2, "temperature": 1e-5},
    {"top_h": 1.0},
    {"dynatemp_range": 100.0, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"samplers": ("top_k", "temperature"), "top_k": 10_000, "temperature": 1e-5},
    {"samplers": ("typical_p", "eta_cutoff"), "typical_p": 0.6, "eta_cutoff": 0.3},
    {"top_k": 2, "xtc_probability": 1.0, "xtc_threshold": 0.0},
]


@pytest.mark.parametrize("options", ODD_OPTIONS, ids=str)
@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS)
def test_unusual_rows_give_the_same_distribution_with_numpy_and_torch(row, options):
    left = left_by(row, place=host, **options)
    np.testing.assert_allclose(left_by(row, place=device, **options), left, atol=1e-6)
    assert left.sum() == pytest.approx(1)
    assert left[~np.isfinite(row)].sum() == 0


@pytest.mark.parametrize("place", PLACES)
def test_mirostat_keeps_between_one_token_and_all(place):
    row = np.random.default_rng(3).standard_normal(50).astype(np.float32)
    for mode in (1, 2):
        params = SamplingParams(temperature=1.0, mirostat_mode=mode, mirostat_eta=1.0)
        start = chain_of(params, spared_ids=())
        assert np.isfinite(place(row, start.after(-1e9), 0.0)).all()
        assert np.isfinite(place(row, start.after(1e9), 0.0)).sum() == 1


def test_draws_of_the_kernels_need_no_stages():
    usual = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert chain_of(SamplingParams(**usual), spared_ids=()) is None
    assert chain_of(SamplingParams(**usual, typical_p=0.9), spared_ids=()).order[-1] == "typical_p"
    assert chain_of(SamplingParams(**usual, samplers=tuple(SAMPLERS)), spared_ids=()) is None
    assert chain_of(SamplingParams(**usual, samplers=tuple(reversed(SAMPLERS))), spared_ids=()) is not None


# In the order of transformers, which is ours.
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


def in_turn(row: np.ndarray, rules: dict) -> np.ndarray:
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in rules.items()])
    return softmax(warpers(None, torch.from_numpy(row[None].astype(np.float64)))[0].numpy())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rows_of_any_size_match_transformers(rules, place):
    rng = np.random.default_rng(6)
    for spread in (0.3, 1.0, 4.0):
        for size in (30, 1000, 20_000):
            row = random_row(rng, size=size, spread=spread)
            row[-1] = np.finfo(np.float32).min  # some graphs mask with it
            left = left_by(row, place=place, samplers=tuple(rules), **rules)
            np.testing.assert_allclose(left, in_turn(row, rules), atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_top_n_sigma_matches_the_paper_at_any_temperature(sigma, place):
    row = (np.random.default_rng(7).standard_normal(1000) * 3).astype(np.float32)
    expected = np.flatnonzero(row >= row.max() - sigma * row.std())
    masked = np.append(row, np.float32([-np.inf, np.finfo(np.float32).min]))  # do not count
    for temperature in (0.5, 1.0, 2.0):
        for each in (row, masked):
            left = left_by(each, place=place, top_n_sigma=sigma, temperature=temperature)
            assert np.flatnonzero(left).tolist() == expected.tolist()


@pytest.mark.parametrize("place", PLACES)
def test_top_p_is_a_share_of_the_tokens_that_top_n_sigma_keeps(place):
    row = (np.random.default_rng(8).standard_normal(1000) * 2).astype(np.float32)
    narrowed = np.where(row >= row.max() - row.std(), row, -np.inf).astype(np.float32)
    left = left_by(row, place=place, top_n_sigma=1.0, top_p=0.7)
    np.testing.assert_allclose(left, in_turn(narrowed, {"top_p": 0.7}), atol=1e-5)
