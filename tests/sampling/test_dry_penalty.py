"""DRY against llama.cpp's answers and its definition."""

from __future__ import annotations

import numpy as np
import pytest

from genserve.sampling.logits_processors import MAX_LENGTH, MAX_PENALTY, DryBreakers, DryPenalty
from genserve.sampling.sampling_params import SamplingParams

VOCAB_SIZE = 6


def penalties(token_ids, *, breakers=(), **params):
    sampling = SamplingParams(**{"dry_multiplier": 0.8, **params})
    ids, amounts = DryPenalty(sampling, breakers=DryBreakers(breakers)).penalties(token_ids)
    return dict(zip(ids.tolist(), amounts.tolist(), strict=True))


def defined(token_ids, *, multiplier, base, allowed, window, breakers):
    """Straight from the definition: each place before, letter by letter."""
    recent = token_ids if window < 0 else token_ids[max(0, len(token_ids) - window) :]
    ends = [
        end
        for end in range(len(token_ids) + 1)
        for breaker in breakers
        if end >= len(breaker) and token_ids[end - len(breaker) : end] == list(breaker)
    ]
    limit = len(token_ids) - max(ends, default=0)
    found: dict[int, float] = {}
    for place in range(len(recent) - 1):
        length = 0
        while length <= place and recent[place - length] == recent[len(recent) - 1 - length]:
            length += 1
        length = min(length, limit)
        if length >= allowed and (recent[place + 1],) not in breakers:
            penalty = multiplier * base ** (length - allowed)
            found[recent[place + 1]] = max(penalty, found.get(recent[place + 1], 0))
    return found


@pytest.mark.parametrize("breakers", [(), ((5,),), ((5,), (3, 4), (4, 4, 1))])
@pytest.mark.parametrize(("allowed", "window"), [(1, -1), (2, -1), (3, 40), (2, 7)])
def test_penalties_match_the_definition_after_each_token(breakers, allowed, window):
    rng = np.random.default_rng(3)
    params = SamplingParams(dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=window)
    repetition = DryPenalty(params, breakers=DryBreakers(breakers))
    token_ids = rng.integers(0, VOCAB_SIZE, 30).tolist()
    num_found = 0
    for _ in range(120):
        token_ids.append(int(rng.integers(0, VOCAB_SIZE)) if rng.random() < 0.5 else token_ids[-9])
        ids, amounts = repetition.penalties(token_ids)
        expected = defined(
            token_ids, multiplier=0.8, base=1.75, allowed=allowed, window=window, breakers=breakers
        )
        assert dict(zip(ids.tolist(), amounts.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)
        num_found += len(expected)
    assert num_found > 5


def test_the_penalty_of_a_long_repetition_is_finite_and_rules_the_token_out():
    [amount] = penalties([1] * 1000, dry_base=100).values()
    assert amount == np.float32(MAX_PENALTY)


def test_the_length_of_a_repetition_is_limited():
    [amount] = penalties([1] * 1000, dry_base=1.01, dry_multiplier=1).values()
    assert amount == pytest.approx(1.01 ** (MAX_LENGTH - 2), rel=1e-5)


def test_a_single_token_is_no_repetition():
    assert penalties([1]) == {}
