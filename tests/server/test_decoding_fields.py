"""A parameter is no use to a client that cannot send it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from genserve.sampling.sampling_params import SamplingOptions, SamplingParams
from genserve.sampling.structured_outputs import FORMS
from genserve.server.routes.openai import ChatBody
from genserve.server.routes.openai_completions import CompletionBody
from genserve.server.routes.tgi_fields import Parameters

NAMES = {parameter.name for parameter in fields(SamplingParams)}


def test_the_options_of_the_python_clients_are_the_parameters() -> None:
    assert set(SamplingOptions.__annotations__) == NAMES


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, Parameters])
def test_the_document_of_a_route_has_the_forms_of_an_answer(body) -> None:
    written, _null = body.model_json_schema()["properties"]["structured_outputs"]["anyOf"]
    assert written["properties"].keys() == set(FORMS)


@pytest.mark.parametrize(
    ("body", "otherwise"),
    [
        (ChatBody, {"best_of"}),
        (CompletionBody, {"best_of", "top_logprobs"}),      # `logprobs` is their number there
        # TGI's `max_new_tokens` and `details` are the first two of these.
        (Parameters, {"max_tokens", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs"}),
    ],
    ids=["chat", "completions", "tgi"],
)
def test_every_dialect_has_the_parameters_but_those_that_it_says_otherwise(body, otherwise) -> None:
    assert NAMES - body.model_fields.keys() <= otherwise
