"""Whatever a model writes at temperature 1, `jsonschema` accepts it as JSON of the schema."""

from __future__ import annotations

import json
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from genserve import LLM
from genserve.completion import FinishReason
from tests.conformance.schemas import random_schema


def num_valid(llm: LLM, seeds: range, **options: Any) -> int:
    """Return how many answers came to an end; each of them matches its schema."""

    def ends(seed: int) -> bool:
        schema = random_schema(seed)
        answer = llm.chat(
            "Give an example of such data.",
            structured_outputs={"json": schema},
            temperature=1.0,
            seed=seed,
            **options,
        )
        if answer.finish_reason is FinishReason.LENGTH:
            return False
        judge = jsonschema.Draft202012Validator
        judge(schema, format_checker=judge.FORMAT_CHECKER).validate(json.loads(answer.text))
        return True

    with ThreadPoolExecutor(8) as callers:
        return sum(callers.map(ends, seeds))


def test_a_random_model_keeps_to_a_dozen_schemas(tiny_repository: Path) -> None:
    with LLM(model_repository=tiny_repository) as llm:
        # It would fill each gap with blanks, and its context with them.
        blanks = {llm._model.tokenizer.encode(blank)[0]: -100.0 for blank in string.whitespace[:4]}
        assert num_valid(llm, range(12), logit_bias=blanks) >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_model_keeps_to_two_hundred_schemas(smollm2_repository: Path) -> None:
    with LLM(model_repository=smollm2_repository) as llm:
        # Some go on for ever: digits behind a point, and schemas that contain themselves.
        assert num_valid(llm, range(220), max_tokens=400) >= 200
