"""Structured outputs over real sockets: openai-python, huggingface_hub and our own clients."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx2
import huggingface_hub
import jsonschema
import openai
import pydantic
import pytest

from genserve import LLM, Client
from genserve.errors import InvalidRequest

SOME_FORM = {"structured_outputs": {"regex": "a+"}}
TURN: list[Any] = [{"role": "user", "content": "Rate Paris."}]


class Rating(pydantic.BaseModel):
    """The structure that a program wants from a chat."""

    model_config = pydantic.ConfigDict(extra="forbid")

    place: Literal["Paris", "Rome"]
    stars: int = pydantic.Field(ge=1, le=5)


def test_a_pydantic_class_is_answered_with_an_instance_of_it(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=TURN, response_format=Rating, temperature=1.0, seed=1, n=3
    )
    assert all(isinstance(choice.message.parsed, Rating) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stream_of_a_pydantic_class_ends_with_an_instance_of_it(client):
    asked: dict[str, Any] = {"model": "tiny", "messages": TURN, "seed": 2}
    with client.chat.completions.stream(**asked, response_format=Rating) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Rating)
    assert "".join(pieces) == final.content
    whole = client.chat.completions.parse(**asked, response_format=Rating)
    assert whole.choices[0].message.content == final.content


def test_the_form_of_a_completion(client):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    asked = {"type": "json_schema", "json_schema": {"name": "flags", "schema": schema}}
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=200, seed=3, extra_body={"response_format": asked}
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), schema)


def test_max_tokens_ends_an_incomplete_form(client):
    answer = client.chat.completions.create(
        model="tiny", messages=TURN, max_tokens=3, extra_body={"structured_outputs": {"regex": "[ab]{50}"}}
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, **SOME_FORM}, "response_format"),
        ({**SOME_FORM, "use_beam_search": True}, "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_form_is_rejected_with_its_field(client, extra, param, stream):
    with pytest.raises(openai.BadRequestError) as rejection:
        client.chat.completions.create(
            model="tiny", messages=TURN, max_tokens=5, temperature=0, stream=stream, extra_body=extra
        )
    assert rejection.value.param == param


def test_tgis_grammar(tiny_server):
    client = huggingface_hub.InferenceClient(tiny_server.url)
    text = client.text_generation(
        "x", grammar={"type": "regex", "value": "[ab]{3}-[0-9]"}, max_new_tokens=30, do_sample=True, seed=4
    )
    assert re.fullmatch("[ab]{3}-[0-9]", text)
    with pytest.raises(huggingface_hub.errors.ValidationError, match=r"parameters\.grammar"):
        client.text_generation("x", grammar={"type": "regex", "value": "[a"}, max_new_tokens=3)


@pytest.mark.parametrize(
    ("kind", "guide", "form"),
    [
        ("json", "", r"\{.*\}"),
        ("json_schema", '{"enum": ["a b", 7]}', '"a b"|7'),
        ("regex", "[ab]{3}-[0-9]", "[ab]{3}-[0-9]"),
        ("ebnf_grammar", 'root ::= "x" [ab]', "x[ab]"),
        ("", "", None),
    ],
)
def test_the_tensors_of_the_ensemble(tiny_server, kind, guide, form):
    body = {"text_input": "x", "max_tokens": 40, "temperature": 1.0, "random_seed": 1}
    guided = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    url = f"{tiny_server.url}/v2/models/tiny/generate"
    text = httpx2.post(url, json=body | guided).json()["text_output"]
    if form is None:
        assert text == httpx2.post(url, json=body).json()["text_output"]
    elif kind == "json":
        assert text.startswith("{")
    else:
        assert re.fullmatch(form, text)


@pytest.mark.parametrize(
    ("kind", "guide", "reason"),
    [
        ("xml", "a", "json_schema"),
        ("", "a", "json_schema"),
        ("json", "{}", "cannot be used with json"),
        ("regex", "", "is required for regex"),
        ("regex", "[a", "unclosed"),
    ],
)
def test_tensors_without_a_valid_form_are_rejected(tiny_server, kind, guide, reason):
    guided = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    answer = httpx2.post(f"{tiny_server.url}/v2/models/tiny/generate", json={"text_input": "x", **guided})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_client_and_library_give_the_same_answer(tiny_server, tiny_repository):
    options: Any = {"structured_outputs": {"choice": ["yes", "no", "both"]}, "temperature": 1.0, "seed": 5}
    with Client(tiny_server.url) as client, LLM(model_repository=tiny_repository) as llm:
        here = llm.chat("?", **options)
        assert here.text in ("yes", "no", "both")
        assert client.chat("?", **options) == here
        assert client.generate("?", **options).text == llm.generate("?", **options).text
        with pytest.raises(InvalidRequest) as rejection:
            client.chat("?", structured_outputs={"regex": "[a"})
    assert rejection.value.field == "structured_outputs"


def test_answers_with_and_without_a_form_share_a_batch(tiny_server):
    """The texts of the other requests are the same as alone."""
    free: Any = {"temperature": 1.0, "seed": 6, "max_tokens": 20, "ignore_eos": True}
    with Client(tiny_server.url) as client:
        alone = client.generate("hello", **free).text
        held: Any = {"structured_outputs": {"regex": "[a-z]{40}"}, "temperature": 1.0, "max_tokens": 60}
        with client.stream("x", **held) as stream:
            assert next(stream.text_stream)
            assert client.generate("hello", **free).text == alone
            assert re.fullmatch("[a-z]{40}", stream.final().text)
