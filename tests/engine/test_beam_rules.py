"""Beam search against `transformers.generate(num_beams=...)`, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from genserve.engine.beam_rules import (
    BeamRules,
    BeamState,
    Candidate,
    Hypothesis,
    ScoredHypothesis,
    advance,
    best_candidates,
    log_softmax,
)
from genserve.engine.beam_search import BeamSearch
from genserve.engine.engine import Engine
from genserve.engine.token_sequence import TokenSequence
from genserve.tensor import Tensor
from genserve.textmodel.runtimes.uncached_logits import UncachedLogits
from tests.backends.inferences import config_of
from tests.fakes.sequences import IdText, sample_loop, sequence_of
from tests.support.representatives import with_extended
from tests.support.stage_chains import WHOLE_CONFIG

VOCAB_SIZE = 40
MAX_LENGTH = 48
_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "initializer_range": 0.6}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": MAX_LENGTH},
    "bloom": {"n_layer": 1, "n_head": 2},
    "llama": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24},
}


@cache
def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(len(kind))
    sizes = {name: value for name, value in _SIZES.items() if name != "hidden_size" or kind != "gpt2"}
    config = AutoConfig.for_model(kind, **sizes, **CONFIGS[kind], bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def engine_of(kind: str) -> Engine:
    def run(inputs: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        with torch.inference_mode():
            ids, mask = (torch.from_numpy(tensor.array.astype(np.int64)) for tensor in inputs.values())
            logits = model_of(kind)(ids, attention_mask=mask).logits
        return {names[0]: Tensor(names[0], logits.numpy())}

    return Engine(UncachedLogits(run, config_of(WHOLE_CONFIG), max_length=MAX_LENGTH), decode=sample_loop)


def search_of(
    prompt: Sequence[int], *, width: int, n: int = 1, stop_at: int | None = None, **options: Any
) -> BeamSearch:
    options = {"max_length": MAX_LENGTH, "vocab_size": VOCAB_SIZE} | options
    if stop_at is not None:
        options["stop"] = (f"<{stop_at}>",)
    answers = [sequence_of(prompt, use_beam_search=True, stop_at=stop_at, **options) for _ in range(n)]
    return BeamSearch(answers, width=width, text=IdText(stop_at))


def finish(engine: Engine, *groups: BeamSearch) -> list[list[list[int]]]:
    for group in groups:
        for answer in group.choices:
            engine.add(answer)
    while (result := engine.step()) is not None:
        engine.check_integrity()
        assert not result.failed
    return [[answer_of(answer) for answer in group.choices] for group in groups]


def answer_of(sequence: TokenSequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def generated(kind: str, prompt: list[int], *, eos: Sequence[int], n: int, **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    rows = model_of(kind).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_return_sequences=n,
        eos_token_id=list(eos) or None,
        pad_token_id=VOCAB_SIZE - 1,
        **options,
    )
    return [up_to_end(row[len(prompt) :].tolist(), eos) for row in rows]


def up_to_end(token_ids: list[int], eos: Sequence[int]) -> list[int]:
    ends = [place for place, token_id in enumerate(token_ids) if token_id in eos]
    return token_ids[: ends[0] + 1] if ends else token_ids


def case_of(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random options with our names, and with transformers' names."""
    rng = random.Random(seed)
    width = rng.choice([2, 3, 4])
    ours: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 9, 14]),
        "length_penalty": rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        "early_stopping": rng.choice([False, True, "never"]),
    }
    theirs: dict[str, Any] = {
        "max_new_tokens": ours["max_tokens"],
        "length_penalty": ours["length_penalty"],
        "early_stopping": ours["early_stopping"],
        "num_beams": width,
        "n": rng.randint(1, width),
        "eos": rng.sample(range(VOCAB_SIZE - 1), rng.choice([0, 1, 2, 4, 8, 12])),
    }
    if rng.random() < 0.4:
        ours["repetition_penalty"] = theirs["repetition_penalty"] = rng.choice([0.8, 1.3])
    if rng.random() < 0.4:
        ours["no_repeat_ngram_size"] = theirs["no_repeat_ngram_size"] = rng.choice([1, 2])
    if rng.random() < 0.3 and theirs["eos"]:
        ours["min_tokens"] = theirs["min_new_tokens"] = rng.randint(1, ours["max_tokens"])
    if rng.random() < 0.3:
        ours["suppress_tokens"] = tuple(rng.sample(range(VOCAB_SIZE), 5))
        theirs["suppress_tokens"] = list(ours["suppress_tokens"])
    return ours, theirs


@pytest.mark.parametrize("kind", with_extended(CONFIGS, always=list(CONFIGS)[:2]))
@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in (1, 2, 3))])
def test_the_answers_are_those_of_transformers_generate(kind, block):
    """Twenty random requests, which share their steps; eos is likely to come early."""
    engine = engine_of(kind)
    cases = [case_of(1000 * block + i) for i in range(20)]
    rng = random.Random(block)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in cases]
    groups = [
        search_of(prompt, width=theirs["num_beams"], n=theirs["n"], eos_token_ids=theirs["eos"], **ours)
        for prompt, (ours, theirs) in zip(prompts, cases, strict=True)
    ]
    answers = finish(engine, *groups)
    for prompt, (_, theirs), answer in zip(prompts, cases, answers, strict=True):
        assert answer == generated(kind, prompt, **theirs), theirs


def test_the_best_candidates_are_those_of_a_sort_over_all_beams():
    rng = np.random.default_rng(0)
    for size, count in ((7, 3), (200, 8), (5000, 8), (5000, 300), (63, 100)):
        log_probs = log_softmax(rng.standard_normal((3, size), dtype=np.float32))
        log_probs[:, 5] = -np.inf
        scores = [-1.0, -0.5, -np.inf]
        found = best_candidates(log_probs, scores=scores, count=count)
        sums = (log_probs[:2] + np.array(scores[:2], dtype=np.float32)[:, None]).reshape(-1)
        order = np.argsort(-sums, kind="stable")[: min(count, 2 * size - 2)]
        assert [(c.beam, c.token_id) for c in found] == [divmod(int(i), size) for i in order]
        assert [c.score for c in found] == sums[order].tolist()


def test_log_softmax_is_torch_s_and_a_row_that_is_not_finite_becomes_nan():
    logits = np.random.default_rng(1).standard_normal((4, 300), dtype=np.float32) * 40
    logits[0, :200] = -np.inf
    logits[1] = -np.inf
    logits[2, 7] = np.nan
    found = log_softmax(logits)
    expected = torch.from_numpy(logits[[0, 3]]).log_softmax(1).numpy()
    np.testing.assert_allclose(found[[0, 3]], expected, atol=1e-5)
    assert np.isnan(found[1:3]).all()


def test_a_candidate_that_ends_below_the_width_is_no_hypothesis():
    """With two beams, only the first two candidates may become hypotheses; the third is a reserve."""
    rules = BeamRules(width=2, length_penalty=1.0, early_stopping=False, max_new_tokens=9)
    candidates = [Candidate(beam=0, token_id=i, score=-1.0 - i) for i in range(4)]

    def complete(candidate: Candidate) -> Hypothesis | None:
        ends = candidate.token_id in (0, 2)
        return Hypothesis(token_ids=(candidate.token_id,), logprobs=()) if ends else None

    after = advance(BeamState(), candidates, complete=complete, num_tokens=1, rules=rules)
    assert [f.hypothesis.token_ids for f in after.finished] == [(0,)]
    assert [c.token_id for c in after.live] == [1, 3]
    assert not after.done


def test_a_search_is_done_when_transformers_heuristic_says_so():
    rng = random.Random(0)
    verdicts = set()
    for _ in range(300):
        width, length_penalty = rng.choice([1, 2, 4]), rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])
        early_stopping = rng.choice([False, True, "never"])
        num_tokens = rng.randint(1, 12)
        rules = BeamRules(
            width=width, length_penalty=length_penalty, early_stopping=early_stopping, max_new_tokens=12
        )
        scores = sorted((-10 * rng.random() for _ in range(rng.randint(0, width))), reverse=True)
        answer = Hypothesis(token_ids=(1,), logprobs=())
        finished = tuple(ScoredHypothesis(hypothesis=answer, score=score) for score in scores)
        before = BeamState(finished=finished)
        best_live = -30 * rng.random()
        live = [Candidate(beam=0, token_id=i, score=best_live - i) for i in range(width)]
        after = advance(before, live, complete=lambda _: None, num_tokens=num_tokens, rules=rules)
        finished = torch.tensor([[True] * len(scores) + [False] * (width - len(scores))])
        may_improve = GenerationMixin._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=torch.ones((1, 1), dtype=torch.bool),
            running_beam_scores=torch.tensor([[c.score for c in live]]),
            beam_scores=torch.tensor([scores + [-1e9] * (width - len(scores))]),
            is_sent_finished=finished,
            cur_len=num_tokens + 5,
            max_length=12 + 5,
            decoder_prompt_len=5,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        goes_on = GenerationMixin._beam_search_has_unfinished_sequences(
            may_improve, finished, torch.zeros((1, width), dtype=torch.bool), early_stopping
        )
        assert after.done is not bool(goes_on)
        verdicts.add((early_stopping, after.done))
    assert len(verdicts) == 6
