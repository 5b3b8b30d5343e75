"""The events of streamed responses, and OpenAI's types of what the Responses API sends."""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseCustomToolCall, ResponseStreamEvent
from pydantic import BaseModel

# Fields that OpenAI's answers have, and its Python types lack.
UNTYPED = {"store", "frequency_penalty", "presence_penalty", "timings"}
EVENTS = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are those in their data."""
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def assert_typed(kind: type[BaseModel], data: dict[str, Any]) -> None:
    """Validate an object by openai-python's type, strictly, and without fields that the type lacks.

    A custom call of a response has no status there, but the same call in a list of items has one.
    """
    _assert_no_extras(kind.model_validate_json(json.dumps(data), strict=True))


def _assert_no_extras(value: Any) -> None:
    if isinstance(value, BaseModel):
        allowed = UNTYPED if isinstance(value, Response) else set()
        allowed = {"status"} if isinstance(value, ResponseCustomToolCall) else allowed
        assert set(value.model_extra or ()) <= allowed, type(value)
        if isinstance(value, Response):
            assert value.model_fields_set >= type(value).model_fields.keys()
        for name in value.model_fields_set:
            _assert_no_extras(getattr(value, name, None))
    elif isinstance(value, list):
        for one in value:
            _assert_no_extras(one)
