from __future__ import annotations

import json

import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.sampling_params import sampling_params
from genserve.sampling.structured_outputs import (
    MAX_CHARS,
    StructuredOutputs,
    structured_outputs,
    structured_outputs_of_format,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


STRUCTURE = {"begin": "<f=g>", "schema": SCHEMA, "end": "</f>"}
TAG = {"structures": [STRUCTURE], "triggers": ["<f="]}


@pytest.mark.parametrize(
    "options",
    [
        {"json": SCHEMA},
        {"structural_tag": TAG},
        {"json_object": True},
        {"json_object": True, "disable_any_whitespace": False, "disable_additional_properties": False},
        {"json": SCHEMA, "whitespace_pattern": " ?"},
        {"regex": "a+"},
        {"choice": ["é", 'b"']},
        {"grammar": "start: X"},
    ],
)
def test_a_form_survives_a_round_trip(options):
    form = structured_outputs(options | {"regex": options.get("regex")})
    assert form is not None
    assert form.as_options() == options
    assert structured_outputs(form.as_options()) == form
    assert sampling_params({"structured_outputs": options}).given() == {"structured_outputs": options}


def test_the_options_that_vllm_sends_with_any_form_are_accepted():
    sent = {"disable_any_whitespace": False, "whitespace_pattern": None}
    assert structured_outputs({"regex": "a", **sent}) == StructuredOutputs(kind="regex", text="a")
    assert structured_outputs({"json": SCHEMA, **sent}) != structured_outputs({"json": SCHEMA})


def test_the_properties_of_a_schema_keep_their_order():
    form = structured_outputs({"json": SCHEMA})
    assert form is not None
    assert list(form.as_options()["json"]["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("json", "structured_outputs"),
        ({}, "structured_outputs"),
        ({"json": None}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        *(
            ({"structural_tag": TAG | change}, f"structured_outputs.structural_tag{field}")
            for change, field in (
                ({"format": {}}, ""),
                ({"structures": []}, ".structures"),
                ({"triggers": "<f="}, ".triggers"),
                ({"triggers": ["<f=", ""]}, ".triggers[1]"),
                ({"triggers": ["<g="]}, ".structures[0].begin"),
                ({"structures": [{"begin": "<f="}]}, ".structures[0]"),
                ({"structures": [STRUCTURE | {"end": None}]}, ".structures[0].end"),
                ({"structures": [STRUCTURE | {"schema": 3}]}, ".structures[0].schema"),
            )
        ),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json": False}, "structured_outputs.json"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"regex": ""}, "structured_outputs"),
        ({"regex": "a" * (MAX_CHARS + 1)}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": ["a", 3]}, "structured_outputs.choice"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        *(
            ({"json": {}, name: 1}, f"structured_outputs.{name}")
            for name in ("disable_any_whitespace", "disable_additional_properties")
        ),
        ({"json": {}, "whitespace_pattern": 3}, "structured_outputs.whitespace_pattern"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"whitespace_pattern": " "}, "structured_outputs"),
    ],
)
def test_anything_but_one_form_is_rejected_by_name(options, field):
    with pytest.raises(InvalidRequest) as rejection:
        structured_outputs(options)
    assert rejection.value.field == field


@pytest.mark.parametrize(
    "written",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ],
)
def test_all_spellings_of_a_schema_are_equal(written):
    assert structured_outputs_of_format(written, field="f") == structured_outputs({"json": SCHEMA})


def test_other_types_of_response_format():
    assert structured_outputs_of_format({"type": "text"}, field="f") is None
    assert structured_outputs_of_format(None, field="f") is None
    regex = structured_outputs_of_format({"type": "regex", "value": "a+"}, field="f")
    assert regex == StructuredOutputs(kind="regex", text="a+")
    tags = structured_outputs_of_format({"type": "structural_tag", **TAG}, field="f")
    assert tags == structured_outputs({"structural_tag": TAG})
    written = json.dumps({"type": "structural_tag", **TAG})     # as vLLM has it
    assert tags == structured_outputs({"structural_tag": written})
    anything = structured_outputs_of_format({"type": "json_object"}, field="f")
    assert anything == StructuredOutputs(kind="json_object", text="{}")


@pytest.mark.parametrize(
    "written",
    [
        "json",
        {},
        {"type": "xml"},
        {"type": "text", "value": "x"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json"},
        {"type": "regex", "value": 3},
        {"type": "regex", "value": "a", "schema": {}},
        {"type": "json_object", "schema": {}, "value": {}},
    ],
)
def test_a_malformed_response_format_is_rejected(written):
    with pytest.raises(InvalidRequest) as rejection:
        structured_outputs_of_format(written, field="parameters.grammar")
    assert rejection.value.field == "parameters.grammar"


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({}, "type"),
        ({"type": "xml"}, "xml"),
        ({"type": "json"}, "value"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema"),
        ({"type": "regex", "value": 3}, "regex"),
    ],
)
def test_a_malformed_response_format_is_rejected_with_its_cause(written, named):
    with pytest.raises(InvalidRequest) as rejection:
        structured_outputs_of_format(written, field="response_format")
    assert rejection.value.field == "response_format"
    assert f"'{named}'" in rejection.value.message


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_replaced_names_are_rejected_with_the_new_name(name):
    with pytest.raises(InvalidRequest, match="structured_outputs") as rejection:
        sampling_params({name: "a"})
    assert rejection.value.field == name
    assert f'"{name.removeprefix("guided_")}"' in rejection.value.remedy


def test_parameters_that_contradict_a_form_are_rejected():
    for other, field in (("ignore_eos", "ignore_eos"), ("use_beam_search", "structured_outputs")):
        with pytest.raises(InvalidRequest, match=other) as rejection:
            sampling_params({"structured_outputs": {"regex": "a"}, other: True})
        assert rejection.value.field == field
