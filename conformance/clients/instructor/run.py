"""instructor: typed answers, in its default mode (tools) and in its other modes for OpenAI's API."""

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field
from rows import MODEL, URL, TextFailure, expect, main, row


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=30)
    country: str = Field(max_length=30)


MESSAGES = [{"role": "user", "content": "Describe the city Paris."}]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 256}


def wrapped(**options):
    raw = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(raw, **options)


def create(client, **others):
    try:
        city = client.chat.completions.create(response_model=City, max_retries=1, **{**ASKED, **others})
    except IncompleteOutputException as error:
        raise TextFailure(str(error)) from error
    except InstructorRetryException as error:
        if "validation error" in str(error):
            raise TextFailure(str(error)) from error
        raise
    expect(isinstance(city, City), f"{city}")
    return str(city)


@row("default mode")
def default_mode():
    return create(wrapped())


@row("default mode, from_provider")
def from_provider():
    client = instructor.from_provider(f"openai/{MODEL}", base_url=f"{URL}/v1", api_key="none")
    return create(client)


@row("default mode, partial stream")
def partial():
    parts = list(wrapped().chat.completions.create_partial(response_model=City, **ASKED))
    expect(parts and parts[-1].name is not None, f"{parts}")


@row("default mode, iterable")
def iterable():
    asked = {**ASKED, "max_tokens": 512}
    parts = list(wrapped().chat.completions.create_iterable(response_model=City, **asked))
    expect(all(isinstance(part, City) for part in parts), f"{parts}")


@row("mode TOOLS_STRICT")
def tools_strict():
    return create(wrapped(mode=instructor.Mode.TOOLS_STRICT))


@row("mode JSON")
def json_mode():
    return create(wrapped(mode=instructor.Mode.JSON))


@row("mode JSON_SCHEMA")
def json_schema():
    return create(wrapped(mode=instructor.Mode.JSON_SCHEMA))


@row("mode RESPONSES_TOOLS")
def responses_tools():
    client = wrapped(mode=instructor.Mode.RESPONSES_TOOLS)
    city = client.responses.create(model=MODEL, input="Describe the city Paris.", response_model=City)
    expect(isinstance(city, City), f"{city}")
    return str(city)


main()
