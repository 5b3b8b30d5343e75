"""Greedy answers of the default model, token for token beside transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from genserve import LLM
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.pulling import cache_folder, fetch_gguf
from genserve.export.source_model import source_model
from tests.export.graphs import write_graph

pytestmark = pytest.mark.extended   # a model of 135 million parameters; test_families.py has tiny ones
NUM_TOKENS = 64
END = 2  # <|im_end|>
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees Celsius because",
    "In 1969, the first",
    "To bake bread you need flour,",
    "The quick brown fox",
    "SELECT name, age FROM",
    "Shakespeare wrote",
    "A healthy breakfast consists of",
    "The main difference between Python and C is that",
    "My favourite season is autumn because",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Photosynthesis is the process by which",
    "La capitale de l'Italie est",
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(fetch_gguf(cache_folder()), source="smollm2")


@pytest.fixture(scope="module")
def fp32(checkpoint, tmp_path_factory):
    repository = tmp_path_factory.mktemp("fp32")
    write_graph(checkpoint, repository)
    with LLM(model_repository=repository) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(checkpoint, fp32) -> list[tuple[int, ...]]:
    """What transformers generates, the end-of-sequence token included."""
    model = source_model(checkpoint)
    prompts = [fp32._model.tokenizer.encode(prompt) for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), END)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=END,
    )
    return [_up_to_the_end(answer) for answer in output[:, width:].tolist()]


def answers_together(llm: LLM, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: llm.generate(prompt, max_tokens=NUM_TOKENS).token_ids, prompts))


@pytest.mark.timeout(600)
def test_alone_each_answer_is_transformers_own(fp32, expected):
    """A quarter of them; all are in the test below."""
    alone = [fp32.generate(prompt, max_tokens=NUM_TOKENS).token_ids for prompt in PROMPTS[::4]]
    assert alone == expected[::4]


@pytest.mark.timeout(300)
def test_with_eight_others_in_the_batch_each_answer_is_the_same(fp32, expected):
    """All prompts at once, over eight strangers that sample and never rest."""
    strangers = [
        fp32.stream(f"Stranger {i} says", temperature=1.0, seed=i, ignore_eos=True, max_tokens=400)
        for i in range(8)
    ]
    answers = answers_together(fp32, PROMPTS)
    assert fp32._model.engine.num_running == len(strangers)
    for stream in strangers:
        stream.close()
    assert answers == expected


@pytest.mark.timeout(300)
def test_the_agreement_of_int8_is_printed(smollm2_repository, expected, capsys):
    with LLM(model_repository=smollm2_repository) as llm:
        answers = answers_together(llm, PROMPTS)
    same = [_common_prefix(a, b) for a, b in zip(answers, expected, strict=True)]
    share = sum(same) / sum(map(len, expected))
    whole = sum(a == b for a, b in zip(answers, expected, strict=True))
    with capsys.disabled():
        print(
            f"\nint8 against fp32: {share:.0%} of the tokens come before the first difference; "
            f"{whole} of {len(PROMPTS)} answers are the same to the end"
        )
    assert share > 0.2


def _up_to_the_end(answer: list[int]) -> tuple[int, ...]:
    """The answer without the padding behind its end-of-sequence token."""
    return tuple(answer[: answer.index(END) + 1] if END in answer else answer)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
