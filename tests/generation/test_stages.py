"""Orders of their own and the stages that few ask for, on the host and as torch has them on a device."""

from __future__ import annotations

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

from genserve.backends import torch_stages
from genserve.generation import stages as host_stages
from genserve.generation.stages import Stages, stages_of
from genserve.sampling_params import SamplingParams

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


def host(row: np.ndarray, stages: Stages, chance: float) -> np.ndarray:
    left = np.full_like(row, -np.inf)
    ids, left[ids] = host_stages.left_by(row, stages, chance=chance)
    return left


def device(row: np.ndarray, stages: Stages, chance: float) -> np.ndarray:
    return torch_stages.left_by(torch.from_numpy(row[None]), stages, chance=chance)[0].numpy()


PLACES = [host, device]


def left_by(
    row: np.ndarray, *, place, chance: float = 0.0, spared: Sequence[int] = (), **options
) -> np.ndarray:
    """The distribution of a row that a token is drawn from."""
    stages = stages_of(SamplingParams(**{"temperature": 1.0, **options}), spared_ids=tuple(spared))
    assert stages is not None
    before = row.copy()
    left = place(row, stages, chance)
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
def test_stages_in_any_order_leave_what_transformers_leaves_in_the_same_order(place):
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
def test_top_h_alone_stands_in_its_place_of_the_default_order(share, place):
    row = np.random.default_rng(2).standard_normal(VOCAB_SIZE).astype(np.float32) * 2
    in_turn = [TemperatureLogitsWarper(0.8), TopHLogitsWarper(share), TopPLogitsWarper(0.7)]
    expected = LogitsProcessorList(in_turn)(None, torch.from_numpy(row[None].astype(np.float64)))[0].numpy()
    left = left_by(row, place=place, temperature=0.8, top_h=share, top_p=0.7)
    np.testing.assert_allclose(left, softmax(expected), atol=1e-5)
