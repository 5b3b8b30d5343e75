"""Draws by all methods: frequencies, independence of a row from the others, and state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from genserve.engine.engine import Engine
from genserve.engine.speculation import Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.sampling.batch_sampler import sample, sample_rows, sampling_metadata
from genserve.sampling.sampler import SamplingMetadata
from genserve.sampling.sampling_params import DRAW_PARAMETERS, PARAMETERS, SAMPLERS
from tests.fakes.drafts import Foreseen
from tests.fakes.logits import PagedLogits
from tests.fakes.sequences import sample_loop, sequence_of

PLACES = [np.array, torch.tensor]
ROW = np.array([2.1, -0.4, 0.3, 1.9, 0.0, 1.2, -1.5, 0.7, 1.6, -0.2, 0.5, 1.1], dtype=np.float32)
# The 99.9 % quantile of chi-square with as many degrees of freedom as there can be, one less than tokens.
CRITICAL = 31.3
NUM_DRAWS = 2000


def shares(row: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(row.astype(np.float64)), dim=0).numpy()


def warped(*warpers) -> np.ndarray:
    scores = LogitsProcessorList(warpers)(None, torch.from_numpy(ROW[None].astype(np.float64)))
    return torch.softmax(scores, dim=1)[0].numpy()


def among(keep: np.ndarray) -> np.ndarray:
    return np.where(keep, shares(ROW), 0) / shares(ROW)[keep].sum()


def by_entropy(low: float, high: float) -> np.ndarray:
    plain = shares(ROW)
    entropy = -(plain * np.log(plain)).sum() / np.log(ROW.size)
    return shares(ROW / (low + (high - low) * entropy))


def of_zipf(bits: float) -> np.ndarray:
    """Mirostat's first: as many of the best as a Zipf distribution of this slope has within these bits."""
    ordered = np.sort(shares(ROW))[::-1]
    steps = np.log(np.arange(2, ROW.size + 1) / np.arange(1, ROW.size))
    slope = (steps * np.log(ordered[:-1] / ordered[1:])).sum() / (steps**2).sum()
    excess = slope - 1
    count = (excess * 2**bits / (1 - ROW.size**-excess)) ** (1 / slope)
    assert 2 < count < ROW.size - 2
    return among(ordered[int(count) - 1] <= shares(ROW))


LIKELY = shares(ROW) >= 0.12
BITS = -np.log2(shares(ROW))
METHODS = {
    "temperature": ({"temperature": 0.6}, warped(TemperatureLogitsWarper(0.6))),
    "top_k": ({"top_k": 5}, warped(TopKLogitsWarper(5))),
    "top_p": ({"top_p": 0.7}, warped(TopPLogitsWarper(0.7))),
    "min_p": ({"min_p": 0.3}, warped(MinPLogitsWarper(0.3))),
    "typical_p": ({"typical_p": 0.6}, warped(TypicalLogitsWarper(0.6))),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.08}, warped(EpsilonLogitsWarper(0.08))),
    "eta_cutoff": ({"eta_cutoff": 0.4}, warped(EtaLogitsWarper(0.4))),
    "top_n_sigma": ({"top_n_sigma": 1.5}, among(ROW.max() - 1.5 * ROW.std() <= ROW)),
    "top_h": ({"top_h": 0.5}, warped(TopHLogitsWarper(0.5))),
    "dynamic temperature": ({"dynatemp_range": 0.8}, by_entropy(0.2, 1.8)),
    "XTC": (
        {"xtc_probability": 0.4, "xtc_threshold": 0.12},
        0.6 * shares(ROW) + 0.4 * among(~LIKELY | (ROW[LIKELY].min() == ROW)),
    ),
    "mirostat 1": ({"mirostat_mode": 1, "mirostat_tau": 2.0, "mirostat_eta": 0}, of_zipf(4.0)),
    "mirostat 2": ({"mirostat_mode": 2, "mirostat_tau": 1.6, "mirostat_eta": 0}, among(BITS <= 3.2)),
    "three together": (
        {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
        warped(TemperatureLogitsWarper(0.8), TopKLogitsWarper(7), TopPLogitsWarper(0.9)),
    ),
    "an order": (
        {"samplers": ("top_p", "temperature"), "top_p": 0.7, "temperature": 2.0},
        warped(TopPLogitsWarper(0.7), TemperatureLogitsWarper(2.0)),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_frequencies_follow_the_exact_distribution(method, place):
    options, expected = METHODS[method]
    sequence = sequence_of([0], vocab_size=ROW.size, **{"temperature": 1.0, **options})
    # The rules of one sequence, over several steps.
    one = sampling_metadata([sequence], num_tokens=ROW.size)
    state = sequence.sampling
    many = SamplingMetadata.of(
        range(NUM_DRAWS),
        [state.rule] * NUM_DRAWS,
        chains=[state.chain] * NUM_DRAWS,
        seeds=[11] * NUM_DRAWS,
        steps=range(NUM_DRAWS),
    )
    assert one.chains == [state.chain]
    drawn = sample_rows(place(np.tile(ROW, (NUM_DRAWS, 1))), many).token_ids
    counts = np.bincount(drawn, minlength=ROW.size)
    likely = expected > 0
    assert counts[~likely].sum() == 0
    assert likely.sum() > 1
    wanted = NUM_DRAWS * expected[likely]
    assert ((counts[likely] - wanted) ** 2 / wanted).sum() < CRITICAL


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, width=32)


KEEPING = {
    "top_n_sigma": numbers(0, 3),
    "top_h": numbers(0, 1),
    "top_k": st.integers(0, 80),
    "top_p": numbers(0.125, 1),
    "min_p": numbers(0, 1),
    "typical_p": numbers(0.125, 1),
    "epsilon_cutoff": numbers(0, 0.5),
    "eta_cutoff": numbers(0, 0.5),
    "xtc_probability": numbers(0, 1),
    "xtc_threshold": numbers(0, 0.5),
}
TEMPERATURE = {
    "temperature": numbers(0, 3),
    "dynatemp_range": numbers(0, 2),
    "dynatemp_exponent": numbers(0.5, 3),
}
MIROSTAT = {
    "mirostat_mode": st.integers(1, 2),
    "mirostat_tau": numbers(0, 8),
    "mirostat_eta": numbers(0, 1),
    "temperature": numbers(0.5, 2),
}
EDITS = {
    "repetition_penalty": numbers(0.5, 2),
    "frequency_penalty": numbers(-2, 2),
    "presence_penalty": numbers(-2, 2),
    "penalty_window": st.integers(0, 6),
    "dry_multiplier": numbers(0, 2),
    "dry_allowed_length": st.integers(1, 3),
    "no_repeat_ngram_size": st.integers(0, 4),
    "logit_bias": st.dictionaries(st.integers(0, 59), numbers(-5, 5), max_size=4),
    "suppress_tokens": st.lists(st.integers(0, 59), max_size=4).map(tuple),
    "min_tokens": st.integers(0, 4),
}
ORDERS = st.permutations(list(SAMPLERS)).map(lambda order: {"samplers": tuple(order)})


@st.composite
def sequences(draw) -> dict:
    """Arguments of `sequence_of`: any of the parameters, and some tokens."""
    chosen = draw(st.fixed_dictionaries({}, optional=EDITS)) | {"logprobs": draw(st.booleans())}
    if draw(st.integers(0, 3)):
        chosen |= draw(st.fixed_dictionaries({}, optional=KEEPING | TEMPERATURE))
        chosen |= draw(st.one_of(st.just({}), ORDERS))
    else:
        chosen |= draw(st.fixed_dictionaries(MIROSTAT))
    return chosen | {
        "prompt": draw(st.lists(st.integers(0, 6), min_size=1, max_size=12)),
        "answer": draw(st.lists(st.integers(0, 6), max_size=4)),
        "seed": draw(st.integers(0, 2**32)),
    }


def begun(*, prompt, answer, **options):
    sequence = sequence_of(prompt, vocab_size=60, eos_token_ids=[59], xtc_spared_ids=[59], **options)
    for token_id in answer:
        sequence.append(token_id)
    return sequence


@settings(derandomize=True)
@given(rows=st.lists(sequences(), min_size=1, max_size=5), data=st.data())
@pytest.mark.parametrize("place", PLACES)
def test_a_row_gets_the_same_token_with_any_neighbours_at_any_index(place, rows, data):
    logits = np.random.default_rng(len(rows)).standard_normal((len(rows), 60)).astype(np.float32) * 2
    order = data.draw(st.permutations(range(len(rows))))
    alone = [sample(place(logits[[i]]), [begun(**row)])[0] for i, row in enumerate(rows)]
    together = sample(place(logits[order]), [begun(**rows[i]) for i in order])
    for found, i in zip(together, order, strict=True):
        assert found.token_id == alone[i].token_id
        assert found.finite == alone[i].finite
        assert found.surprise_bits == pytest.approx(alone[i].surprise_bits, abs=1e-5)
        if rows[i]["logprobs"]:
            assert found.logprob.logprob == pytest.approx(alone[i].logprob.logprob, abs=1e-5)


@settings(derandomize=True)
@given(rows=st.lists(sequences(), min_size=1, max_size=3))
def test_numpy_and_torch_sample_the_same_tokens(rows):
    logits = np.random.default_rng(len(rows)).standard_normal((len(rows), 60)).astype(np.float32) * 2
    [host, device] = [sample(place(logits.copy()), [begun(**row) for row in rows]) for place in PLACES]
    assert [p.token_id for p in host] == [p.token_id for p in device]
    assert [p.surprise_bits for p in host] == [pytest.approx(p.surprise_bits, abs=1e-4) for p in device]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mirostat_mode": 1, "mirostat_tau": 3.0}, marks=pytest.mark.extended),
        {"mirostat_mode": 2, "mirostat_tau": 3.0},
        {"xtc_probability": 0.5, "xtc_threshold": 0.02, "dry_multiplier": 0.8, "dry_allowed_length": 1},
        pytest.param(
            {"samplers": ("top_k", "temperature"), "top_k": 9, "penalty_window": 4, "frequency_penalty": 1.0},
            marks=pytest.mark.extended,
        ),
    ],
    ids=str,
)
def test_sampling_state_survives_preemption_and_speculation(options):
    def sequence(number: int) -> TokenSequence:
        prompt = [number + 1, 5, 6, 5]
        return sequence_of(prompt, seed=number, max_tokens=50, **{"temperature": 1.2, **options})

    alone = []
    for number in range(4):
        alone.append(sequence(number))
        finish(Engine(PagedLogits(), decode=sample_loop), alone[-1:])
    model = PagedLogits(num_blocks=30)
    crowd = [sequence(number) for number in range(4)]
    speculation = Speculation(Foreseen(alone, error_rate=0.2))
    finish(Engine(model, decode=sample_loop, speculation=speculation), crowd)
    assert [one.token_ids for one in crowd] == [one.token_ids for one in alone]
    assert any(one.num_preemptions for one in crowd)
    assert max(max(forward) for forward in model.forwards[1:]) > 1


def finish(engine: Engine, sequences: list[TokenSequence]) -> None:
    for sequence in sequences:
        engine.add(sequence)
    while engine.step() is not None:
        for sequence in sequences:
            sequence.pop_delta()


def test_every_parameter_of_a_draw_is_covered():
    tried = {*KEEPING, *TEMPERATURE, *MIROSTAT, *EDITS, "samplers"}
    assert DRAW_PARAMETERS.keys() <= tried <= PARAMETERS.keys()
