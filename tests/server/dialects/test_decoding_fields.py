"""Every dialect accepts every sampling parameter, and the OpenAPI document describes all fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from genserve.sampling.param_table import SECTIONS
from genserve.sampling.sampling_params import PARAMETERS
from genserve.sampling.structured_outputs import StructuredOutputOptions
from genserve.server.dialects.openai.chat import ChatBody
from genserve.server.dialects.openai.completions import CompletionBody
from genserve.server.dialects.tgi import Parameters


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, Parameters])
def test_the_openapi_document_has_the_forms_of_an_answer(body) -> None:
    written, _null = body.model_json_schema()["properties"]["structured_outputs"]["anyOf"]
    assert written["properties"].keys() == StructuredOutputOptions.__annotations__.keys()


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


@cache
def schema_of(body: type[BaseModel]) -> dict[str, Any]:
    return body.model_json_schema()


def accepts(schema: Mapping[str, Any], value: Any) -> bool:
    return Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("row", PARAMETERS.values(), ids=PARAMETERS)
def test_the_schema_of_a_field_has_the_text_the_default_and_the_range_of_the_table(row):
    # Parameters that OpenAI's routes have under another name, or as another type.
    body = CompletionBody if row.name in ("best_of", "prompt_logprobs", "logprob_token_ids") else ChatBody
    schema = schema_of(body)
    field = {**schema["properties"][row.name], "$defs": schema["$defs"]}
    effect = re.sub(r" \(\[.*?\)\)", "", row.doc)
    assert field["description"].lower().startswith(effect.lower())
    assert field["x-section"] == SECTIONS[row.section]
    assert field.get("x-common", False) == row.common
    default = {"temperature": 1.0}.get(row.name, row.default)
    assert field["default"] == (None if default in ((), {}) else json.loads(json.dumps(default)))
    wider = {"top_k": {-1}, "seed": {-1}}.get(row.name, ())
    if row.range is not None:
        near = {row.range.low, row.range.high} - {float("inf")}
        for value in {number + step for number in near for step in (-1, 0, 1)} | {-1}:
            assert accepts(field, value) == (value in row.range or value in wider), value
    if row.max_items is not None:
        item = 1 if row.item is int else "x"
        assert [accepts(field, [item] * (row.max_items + extra)) for extra in (0, 1)] == [True, False]
    if row.item is int:
        assert not accepts(field, [-1])
    if row.max_chars:
        lengths = {0: row.min_chars == 0, row.max_chars: True, row.max_chars + 1: False}
        for num_chars, holds in lengths.items():
            text = "x" * num_chars
            assert accepts(field, text if row.item is None else [text]) == holds, num_chars


def test_the_schemas_have_the_ranges_that_no_row_has():
    fields = ChatBody.model_json_schema()["properties"]
    assert accepts(fields["stop"], "one text")
    assert not accepts(fields["logit_bias"], {"7": 101})
    assert not accepts(fields["samplers"], ["nobody"])
    assert not accepts(fields["repetition_detection"], {"max_pattern_size": 2})
    assert accepts(CompletionBody.model_json_schema()["properties"]["max_tokens"], 0)
    temperature = Parameters.model_json_schema()["properties"]["temperature"]
    assert [accepts(temperature, value) for value in (0, 0.1, 100, 101)] == [False, True, True, False]


def test_every_field_of_every_body_has_a_text_and_a_default_that_its_schema_accepts(http):
    document = http.get("/openapi.json").json()
    fields = list(fields_of_bodies(document))
    assert {"ChatBody.temperature", "ChatMessage.role", "GenerateBody.inputs"} <= {*dict(fields)}
    for name, field in fields:
        assert re.fullmatch(r".+\.", field["description"]), name
        if "default" in field and "$ref" not in field:
            assert accepts({**field, "components": document["components"]}, field["default"]), name


def fields_of_bodies(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of the bodies and of the objects in them."""
    schemas = document["components"]["schemas"]
    operations = [of for methods in document["paths"].values() for of in methods.values()]
    queue = [json.dumps(operation["requestBody"]) for operation in operations if "requestBody" in operation]
    seen = set()
    while queue:
        for name in re.findall(r'"#/components/schemas/(\w+)"', queue.pop()):
            if name not in seen:
                seen.add(name)
                queue.append(json.dumps(schemas[name]))
                for field, schema in schemas[name].get("properties", {}).items():
                    yield f"{name}.{field}", schema


def test_the_sections_are_the_headings_of_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "sampling.md").read_text()
    for section, heading in SECTIONS.items():
        assert f"## {heading}\n" in page.partition(f"<!-- table: {section} -->")[0]
