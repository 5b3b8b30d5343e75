"""Greedy answers under logit rules, token for token beside transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from genserve import LLM
from genserve.export import SilentProgress, export_model
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.reference import greedy_ids, reference_model

NUM_TOKENS = 16
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


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def both(request, tmp_path_factory) -> Iterator[tuple[LLM, torch.nn.Module]]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[request.param])
    repository = folder / "repository"
    export_model(
        str(checkpoint), repository=repository, name="tiny", precision="fp32", progress=SilentProgress()
    )
    with LLM(repository) as llm:
        yield llm, reference_model(checkpoint)


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_answer_is_transformers_own(both, setting):
    llm, reference = both
    ours, theirs = SETTINGS[setting]
    for prompt in PROMPTS:
        ids = llm._model.tokenizer.encode(prompt)
        expected = greedy_ids(reference, ids, num_tokens=NUM_TOKENS, end=END, **theirs)
        assert list(llm.generate(prompt, max_tokens=NUM_TOKENS, **ours).token_ids) == expected


def test_a_bad_word_is_not_written(both):
    llm, _ = both
    plain = llm.generate("hello there", max_tokens=NUM_TOKENS, suppress_tokens=[END])
    tokenizer = llm._model.tokenizer
    texts = {tokenizer.decode([token_id]): token_id for token_id in plain.token_ids}
    word = next(t for t in texts if tokenizer.encode(t, add_special_tokens=False) == [texts[t]])
    answer = llm.generate("hello there", max_tokens=NUM_TOKENS, suppress_tokens=[END], bad_words=[word])
    assert texts[word] not in answer.token_ids
