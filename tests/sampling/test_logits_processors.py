from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from genserve.completion import FinishReason
from genserve.sampling.batch_sampler import sample
from tests.fakes.sequences import sequence_of
from tests.support.recorded_llama_cpp import recorded

VOCAB_SIZE = 50
END = 2
PROMPT = [5, 6, 7, 5, 6, 8, 5, 6]
BAD_WORDS = [[9], [5, 6, 11], [7, 12, 13], [12, 14]]


def host(array):
    return array.copy()


def device(array):
    """As a model hands them out that ran in this mode."""
    with torch.inference_mode():
        return torch.from_numpy(array.copy()) + 0


def sequence(prompt=PROMPT, *, bad_words=(), **params):
    return sequence_of(
        prompt, vocab_size=VOCAB_SIZE, eos_token_ids=[END], bad_words=bad_words, ignore_eos=False, **params
    )


def edited(logits, sequences, *, place):
    """The logits from which the tokens are sampled."""
    rows = place(logits)
    sample(rows, sequences)
    return np.asarray(rows)


def lowered_by_count(history, scores, *, frequency, presence):
    """OpenAI's formula; transformers has none."""
    counts = np.bincount(history[len(PROMPT) :], minlength=VOCAB_SIZE)
    return scores - (counts * frequency + (counts > 0) * presence)


PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": -0.4}
CASES = {
    "repetition": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "encouraged repetition": ({"repetition_penalty": 0.6}, [RepetitionPenaltyLogitsProcessor(0.6)]),
    "unigrams": ({"no_repeat_ngram_size": 1}, [NoRepeatNGramLogitsProcessor(1)]),
    "trigrams": ({"no_repeat_ngram_size": 3}, [NoRepeatNGramLogitsProcessor(3)]),
    "longer than the prompt": ({"no_repeat_ngram_size": 12}, [NoRepeatNGramLogitsProcessor(12)]),
    "bad words": ({}, [NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=END)]),
    "min_tokens": ({"min_tokens": 4}, [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, END)]),
    "suppressed": ({"suppress_tokens": (3, 4, 3)}, [SuppressTokensLogitsProcessor([3, 4])]),
    "biased": ({"logit_bias": {5: 2.5, 7: -100}}, [SequenceBiasLogitsProcessor({(5,): 2.5, (7,): -100.0})]),
    "all in their order": (
        {
            "logit_bias": {5: 2.5, 9: 5.0},
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "min_tokens": 9,
            "suppress_tokens": (4,),
        },
        [
            SequenceBiasLogitsProcessor({(5,): 2.5, (9,): 5.0}),
            RepetitionPenaltyLogitsProcessor(1.3),
            NoRepeatNGramLogitsProcessor(2),
            NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=END),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, END),
            SuppressTokensLogitsProcessor([4]),
        ],
    ),
    "counted": (PENALTIES, []),
}


@pytest.mark.parametrize("place", [host, device])
@pytest.mark.parametrize("case", CASES)
def test_edited_logits_match_transformers_processors_at_each_step(case, place):
    params, processors = CASES[case]
    with_words = any(isinstance(p, NoBadWordsLogitsProcessor) for p in processors)
    rng = np.random.default_rng(4)
    growing = sequence(bad_words=BAD_WORDS if with_words else (), **params)
    for _ in range(30):
        logits = rng.standard_normal((1, VOCAB_SIZE)).astype(np.float32) * 3
        history = growing.token_ids
        scores = LogitsProcessorList(processors)(torch.tensor([history]), torch.from_numpy(logits)).numpy()
        if case == "counted":
            scores = lowered_by_count(history, scores, frequency=0.7, presence=-0.4)
        np.testing.assert_allclose(edited(logits, [growing], place=place), scores, atol=1e-5)
        growing.append(int(rng.choice([5, 6, 7, 11, 12])))


@pytest.mark.parametrize("place", [host, device])
@pytest.mark.parametrize("window", [1, 3, 9, 100])
def test_penalty_window_limits_the_penalties_to_the_last_tokens(window, place):
    rng = np.random.default_rng(4)
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.7, "presence_penalty": -0.4}
    growing = sequence(penalty_window=window, **params)
    for _ in range(20):
        logits = rng.standard_normal((1, VOCAB_SIZE)).astype(np.float32) * 3
        recent = torch.tensor([growing.token_ids[-window:]])
        expected = RepetitionPenaltyLogitsProcessor(1.7)(recent, torch.from_numpy(logits)).numpy()
        answer = growing.token_ids[max(len(PROMPT), len(growing.token_ids) - window) :]
        counts = np.bincount(answer, minlength=VOCAB_SIZE)
        expected = expected - (counts * 0.7 - (counts > 0) * 0.4)
        np.testing.assert_allclose(edited(logits, [growing], place=place), expected, atol=1e-5)
        growing.append(int(rng.choice([5, 6, 7, 11, 12])))


@pytest.mark.parametrize("place", [host, device])
def test_dry_and_frequency_penalties_add_up(place):
    repeating = sequence([5, 6, 7, 8, 5], dry_multiplier=1.0, dry_base=2.0, frequency_penalty=0.5)
    for token_id in (6, 7):
        repeating.append(token_id)
    logits = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
    expected = logits.copy()
    expected[0, [6, 7]] = -0.5
    expected[0, 8] = -2.0  # three tokens, one more than the first that counts
    np.testing.assert_allclose(edited(logits, [repeating], place=place), expected, atol=1e-6)


@pytest.mark.parametrize("place", [host, device])
def test_windows_and_dry_match_llama_cpp(place):
    for case in recorded("penalty_window", "dry_multiplier"):
        first, *history = case["history"]
        options = case["options"]
        breakers = [[3], [4, 5]] if "dry_base" in options else []  # those of the recording
        growing = sequence_of([first], vocab_size=200, max_length=300, dry_breakers=breakers, **options)
        for token_id in history:
            growing.append(token_id)
        found = edited(case["row"][None].copy(), [growing], place=place)[0]
        np.testing.assert_allclose(found, case["left"], rtol=1e-4, atol=1e-4, err_msg=str(options))


@pytest.mark.parametrize("place", [host, device])
def test_allowed_tokens_are_kept_and_edited_by_other_rules(place):
    logits = np.random.default_rng(1).standard_normal((2, VOCAB_SIZE)).astype(np.float32)
    limited = sequence(allowed_token_ids=(3, 20, 3, 21), suppress_tokens=(21,), logit_bias={3: 1.0, 9: 50.0})
    rows = edited(logits, [limited, sequence()], place=place)
    assert np.flatnonzero(np.isfinite(rows[0])).tolist() == [3, 20]
    assert rows[0, 3] == logits[0, 3] + 1
    np.testing.assert_array_equal(rows[1], logits[1])


@pytest.mark.parametrize("place", [host, device])
def test_the_edits_of_a_row_do_not_depend_on_its_index(place):
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, VOCAB_SIZE)).astype(np.float32)
    cases = [{"repetition_penalty": 2.0}, {}, {"min_tokens": 3}, PENALTIES, {"suppress_tokens": (1,)}, {}]
    sequences = [sequence(rng.integers(3, 50, 9).tolist(), **case) for case in cases]
    for one in sequences:
        one.append(5)
    order = rng.permutation(6)
    together = edited(logits[order], [sequences[i] for i in order], place=place)
    for place_of, i in enumerate(order):
        np.testing.assert_array_equal(together[place_of], edited(logits[[i]], [sequences[i]], place=place)[0])


@pytest.mark.parametrize("place", [host, device])
def test_raw_log_probabilities_ignore_edits(place):
    logits = np.random.default_rng(3).standard_normal((2, VOCAB_SIZE)).astype(np.float32)
    best = logits.argmax(axis=1)
    sequences = [sequence(logprobs=True, suppress_tokens=(int(best[0]),)), sequence(logprobs=True)]
    picks = sample(place(logits), sequences)
    assert picks[0].token_id == logits[0].argsort()[-2]
    assert picks[1].token_id == best[1]
    raw = torch.log_softmax(torch.from_numpy(logits), dim=1)
    for row, picked in enumerate(picks):
        assert picked.logprob.logprob == pytest.approx(raw[row, picked.token_id].item(), abs=1e-5)


@pytest.mark.parametrize("place", [host, device])
def test_rows_of_minus_infinity_and_nan_are_unchanged(place):
    logits = np.zeros((2, VOCAB_SIZE), dtype=np.float32)
    logits[0, 5], logits[1, 5] = -np.inf, np.nan
    rows = edited(logits, [sequence(repetition_penalty=2.0, presence_penalty=1.0)] * 2, place=place)
    assert rows[0, 5] == -np.inf
    assert np.isnan(rows[1, 5])


def test_a_row_without_a_token_left_is_reported_as_not_finite():
    nothing = sequence([5], allowed_token_ids=(9,), bad_words=[[9]])
    [picked] = sample(np.zeros((1, VOCAB_SIZE), dtype=np.float32), [nothing])
    assert not picked.finite


def test_neutral_parameters_need_no_processors():
    assert sequence().sampling.processors is None
    assert sequence(temperature=1.0, stop_token_ids=(3,)).sampling.processors is None


def test_end_ids_outside_the_vocabulary_are_ignored():
    odd = sequence_of([5], vocab_size=VOCAB_SIZE, eos_token_ids=[VOCAB_SIZE, END], min_tokens=1)
    rows = edited(np.zeros((1, VOCAB_SIZE), dtype=np.float32), [odd], place=host)
    assert np.flatnonzero(np.isinf(rows[0])).tolist() == [END]


def test_min_tokens_does_not_prevent_stop_strings():
    early = sequence_of([5], stop_at=6, min_tokens=5)
    early.append(6)
    assert early.finish_reason is FinishReason.STOP
