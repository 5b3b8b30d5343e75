"""Every dialect and client accepts every sampling parameter."""

from __future__ import annotations

import pytest

from genserve.sampling.sampling_params import PARAMETERS
from genserve.sampling.structured_outputs import FORMS
from genserve.server.routes.openai import ChatBody
from genserve.server.routes.openai_completions import CompletionBody
from genserve.server.routes.tgi_fields import Parameters


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, Parameters])
def test_the_openapi_document_has_the_forms_of_an_answer(body) -> None:
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
def test_every_dialect_has_the_parameters_but_those_that_it_names_otherwise(body, otherwise) -> None:
    assert PARAMETERS.keys() - body.model_fields.keys() <= otherwise
