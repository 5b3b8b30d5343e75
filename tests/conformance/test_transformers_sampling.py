"""Sampling compared with transformers: greedy answers, and the distribution after each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from genserve import LLM
from genserve.engine.token_sequence import TokenSequence
from genserve.export import SilentProgress, export_model
from genserve.sampling.batch_sampler import sample_rows, sampling_metadata
from genserve.sampling.sampler import LogprobsRequest
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.fakes.sequences import sequence_of
from tests.support.representatives import with_extended
from tests.support.transformers_reference import greedy_ids, reference_logits, reference_model

NUM_TOKENS = 16
VOCAB_SIZE = 320
END = 2
PROMPTS = ["hello there", "1 2 3 1 2 3 1 2"]
# Our options, and what `generate` calls the same.
SETTINGS = {
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "bigrams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "biased": ({"logit_bias": {7: 3.0, 30: -5.0}}, {"sequence_bias": {(7,): 3.0, (30,): -5.0}}),
    "several": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_tokens": 16, "logit_bias": {END: 9.0}},
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 16,
            "sequence_bias": {(END,): 9.0},
        },
    ),
}


@pytest.fixture(scope="module", params=with_extended(["gpt2", "bloom_4_heads", "llama"], always=["llama"]))
def both(request, tmp_path_factory) -> Iterator[tuple[LLM, torch.nn.Module]]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[request.param])
    repository = folder / "repository"
    export_model(
        str(checkpoint), repository=repository, name="tiny", precision="fp32", progress=SilentProgress()
    )
    with LLM(model_repository=repository) as llm:
        yield llm, reference_model(checkpoint)


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_answer_matches_transformers(both, setting):
    llm, reference = both
    ours, theirs = SETTINGS[setting]
    for prompt in PROMPTS:
        ids = llm._model.tokenizer.encode(prompt)
        expected = greedy_ids(reference, ids, num_tokens=NUM_TOKENS, end=END, **theirs)
        assert list(llm.generate(prompt, max_tokens=NUM_TOKENS, **ours).token_ids) == expected


def test_a_bad_word_is_not_generated(both):
    llm, _ = both
    plain = llm.generate("hello there", max_tokens=NUM_TOKENS, suppress_tokens=[END])
    tokenizer = llm._model.tokenizer
    texts = {tokenizer.decode([token_id]): token_id for token_id in plain.token_ids}
    word = next(t for t in texts if tokenizer.encode(t, add_special_tokens=False) == [texts[t]])
    answer = llm.generate("hello there", max_tokens=NUM_TOKENS, suppress_tokens=[END], bad_words=[word])
    assert texts[word] not in answer.token_ids


def random_rules(rng: np.random.Generator, llm: LLM) -> tuple[dict[str, Any], dict[str, Any]]:
    """Some of the rules, in our words and in transformers'."""
    rules: list[tuple[dict[str, Any], dict[str, Any]]] = []
    penalty = float(rng.uniform(0.7, 1.8))
    rules.append(({"repetition_penalty": penalty}, {"repetition_penalty": penalty}))
    size = int(rng.integers(1, 4))
    rules.append(({"no_repeat_ngram_size": size}, {"no_repeat_ngram_size": size}))
    biases = {int(i): float(rng.normal() * 4) for i in rng.choice(VOCAB_SIZE, 20, replace=False)}
    biases[END] = float(rng.uniform(0, 8))
    rules.append(({"logit_bias": biases}, {"sequence_bias": {(i,): b for i, b in biases.items()}}))
    num = int(rng.integers(1, NUM_TOKENS))
    rules.append(({"min_tokens": num}, {"min_new_tokens": num}))
    ids = rng.choice(np.arange(3, VOCAB_SIZE), 60, replace=False).tolist()
    rules.append(({"suppress_tokens": ids}, {"suppress_tokens": ids}))
    word = llm._model.tokenizer.decode([int(rng.integers(40, 90))]).strip() or "e"
    spelled = [llm._model.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]
    possible = [ids for ids in spelled if ids and max(ids) < VOCAB_SIZE]
    rules.append(({"bad_words": [word]}, {"bad_words_ids": possible}))
    ours, theirs = {}, {}
    for index in rng.choice(len(rules), rng.integers(1, len(rules) + 1), replace=False):
        ours |= rules[index][0]
        theirs |= rules[index][1]
    return ours, theirs


@pytest.mark.parametrize("num_cases", [5, pytest.param(70, marks=pytest.mark.slow)])
def test_random_prompts_and_rules_match_transformers(both, num_cases):
    llm, reference = both
    rng = np.random.default_rng(num_cases)
    for _ in range(num_cases):
        prompt = rng.integers(3, VOCAB_SIZE, rng.integers(1, 12)).tolist()
        ours, theirs = random_rules(rng, llm)
        num = int(rng.integers(1, 9))
        if "min_tokens" in ours:
            ours["min_tokens"] = theirs["min_new_tokens"] = min(num, ours["min_tokens"])
        expected = greedy_ids(reference, prompt, num_tokens=num, end=END, **theirs)
        [answer] = llm.complete(prompt, max_tokens=num, **ours)
        assert list(answer.token_ids) == expected, (prompt, ours)


PROMPT = [5, 6, 7, 5, 6, 8, 5, 6]
BAD_WORDS = [[9], [6, 11]]
# In their order: our option, and transformers' processor.
STAGES: list[tuple[dict[str, Any], Any]] = [
    ({"logit_bias": {5: 2.5, 11: 5.0}}, SequenceBiasLogitsProcessor({(5,): 2.5, (11,): 5.0})),
    ({"repetition_penalty": 1.4}, RepetitionPenaltyLogitsProcessor(1.4)),
    ({"no_repeat_ngram_size": 3}, NoRepeatNGramLogitsProcessor(3)),
    ({"bad_words": BAD_WORDS}, NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=END)),
    ({"min_tokens": 5}, MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, END)),
    ({"suppress_tokens": (3, 4, 50)}, SuppressTokensLogitsProcessor([3, 4, 50])),
    ({"temperature": 0.7}, TemperatureLogitsWarper(0.7)),
    ({"top_h": 0.9}, TopHLogitsWarper(0.9)),
    ({"top_k": 80}, TopKLogitsWarper(80)),
    ({"top_p": 0.97}, TopPLogitsWarper(0.97)),
    ({"min_p": 0.005}, MinPLogitsWarper(0.005)),
    ({"typical_p": 0.95}, TypicalLogitsWarper(0.95)),
    ({"epsilon_cutoff": 0.003}, EpsilonLogitsWarper(0.003)),
    ({"eta_cutoff": 0.02}, EtaLogitsWarper(0.02)),
]


def distribution(row: torch.Tensor | np.ndarray, sequence: TokenSequence) -> np.ndarray:
    """What the sequence's next token is drawn from, of a row [1, V] wherever it lies."""
    shares = np.zeros(VOCAB_SIZE)
    everything = LogprobsRequest(row=0, num_top=VOCAB_SIZE, processed=True)
    metadata = sampling_metadata([sequence], num_tokens=VOCAB_SIZE)
    [found] = sample_rows(row, replace(metadata, logprobs=[everything])).logprobs
    for token_id, logprob in found.top:
        shares[token_id] = np.exp(logprob)
    return shares


@pytest.mark.parametrize("num_stages", range(1, len(STAGES) + 1))
@pytest.mark.parametrize("alone", [False, True])
def test_each_stage_alone_and_in_turn_matches_transformers(both, num_stages, alone):
    _, reference = both
    stages = STAGES[num_stages - 1 :][:1] if alone else STAGES[:num_stages]
    options = {"temperature": 1.0}
    for option, _ in stages:
        options |= option
    bad_words = options.pop("bad_words", ())
    rng = np.random.default_rng(num_stages)
    random = rng.standard_normal((2, VOCAB_SIZE)).astype(np.float32) * 3
    for row in [*reference_logits(reference, np.array(PROMPT))[-2:], *random]:
        sequence = sequence_of(
            PROMPT, vocab_size=VOCAB_SIZE, eos_token_ids=[END], bad_words=bad_words, **options
        )
        processors = LogitsProcessorList([processor for _, processor in stages])
        scores = processors(torch.tensor([PROMPT]), torch.from_numpy(row.copy()[None]).double())
        expected = torch.softmax(scores, dim=1)[0].numpy()
        for place in (np.array, torch.tensor):
            np.testing.assert_allclose(distribution(place(row[None]), sequence), expected, atol=1e-5)
