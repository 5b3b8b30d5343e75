"""openai-python: the library of OpenAI, synchronous and asynchronous."""

import asyncio
import json
from typing import Literal

import openai
from pydantic import BaseModel
from rows import ENCODER, MODEL, URL, expect, expect_near, expect_text, main, row

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


class City(BaseModel):
    name: str
    continent: Literal["Africa", "America", "Asia", "Europe"]


def check_call(call):
    expect(call.id, "a call has no id")
    expect(call.function.name == "get_weather", f"the call is of {call.function.name}")
    arguments = json.loads(call.function.arguments)
    expect(arguments.keys() == {"city", "unit"}, f"the arguments are {arguments}")
    expect(arguments["unit"] in ("celsius", "fahrenheit"), f"the arguments are {arguments}")
    return call.function.arguments


@row("models")
def models():
    listed = [model.id for model in client.models.list()]
    expect(MODEL in listed, f"models.list() has {listed}")
    expect(client.models.retrieve(MODEL).id == MODEL, "models.retrieve() has another id")


@row("chat")
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=16)
    expect(answer.choices[0].message.content, "the answer is empty")
    expect(answer.usage.total_tokens > 0, "no usage")
    expect(answer.choices[0].message.role == "assistant", "not of the assistant")


@row("chat, an adapter")
def chat_adapter():
    name = f"{MODEL}_adapter"
    if name not in [model.id for model in client.models.list()]:
        return "the server has none"
    expect(client.models.retrieve(name).parent == MODEL, "its parent is another model")
    answer = client.chat.completions.create(model=name, messages=HELLO, max_completion_tokens=16)
    expect(answer.model == name, f"the answer is of {answer.model}")
    expect(answer.choices[0].message.content, "the answer is empty")
    return None


@row("chat, streamed")
def chat_streamed():
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text, "the answer is empty")
    expect(chunks[0].choices[0].delta.role == "assistant", "the first chunk has no role")
    expect(chunks[-1].usage is not None and not chunks[-1].choices, "the last chunk is not the usage")
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    expect(finish in ("stop", "length"), f"finish_reason is {finish}")


@row("chat, log-probabilities")
def chat_logprobs():
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    expect(content and len(content[0].top_logprobs) == 2, f"logprobs.content is {content}")


@row("chat, async")
def chat_async():
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    expect(asyncio.run(ask()), "the answer is empty")


@row("chat, fields without effect")
def chat_fields():
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=4, reasoning_effort="low", verbosity="low",
        metadata={"a": "b"}, service_tier="auto", store=False, user="u", safety_identifier="s",
        prompt_cache_key="k", parallel_tool_calls=True,
        prediction={"type": "content", "content": "Hello"},
    )  # fmt: skip
    expect(answer.choices[0].message.content, "the answer is empty")


@row("content parts, developer")
def content_parts():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ada", "content": [{"type": "text", "text": "Say hello to Ada."}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    expect(answer.choices[0].message.content, "the answer is empty")


@row("tools, auto")
def tools_auto():
    answer = client.chat.completions.create(model=MODEL, messages=WEATHER, tools=TOOLS, max_tokens=128)
    choice = answer.choices[0]
    expect_text(choice.message.tool_calls, f"no call: {choice.message.content}")
    expect(choice.finish_reason == "tool_calls", f"finish_reason is {choice.finish_reason}")
    return check_call(choice.message.tool_calls[0])


@row("tools, required")
def tools_required():
    answer = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="required", max_tokens=256
    )
    expect(answer.choices[0].message.tool_calls, "no call")
    expect(answer.choices[0].finish_reason == "tool_calls", f"finish: {answer.choices[0].finish_reason}")
    return check_call(answer.choices[0].message.tool_calls[0])


@row("tools, named")
def tools_named():
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=named, max_tokens=256
    )
    expect(answer.choices[0].message.tool_calls, "no call")
    return check_call(answer.choices[0].message.tool_calls[0])


@row("tools, none")
def tools_none():
    answer = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    expect(not answer.choices[0].message.tool_calls, "a call despite tool_choice none")
    expect(answer.choices[0].message.content, "the answer is empty")


@row("tools, streamed")
def tools_streamed():
    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="required", stream=True, max_tokens=256
    ):
        [choice] = chunk.choices
        for delta in choice.delta.tool_calls or []:
            expect(delta.index == 0 or name, f"the first call has the index {delta.index}")
            if delta.index == 0:
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        finish = choice.finish_reason or finish
    expect(name == "get_weather", f"the name is {name!r}")
    expect(json.loads(arguments).keys() == {"city", "unit"}, f"the arguments are {arguments}")
    expect(finish == "tool_calls", f"finish_reason is {finish}")
    return arguments


@row("tools, stream helper")
def tools_helper():
    with client.chat.completions.stream(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="required", max_tokens=256
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    expect("tool_calls.function.arguments.delta" in events, f"the events are {set(events)}")
    expect("tool_calls.function.arguments.done" in events, f"the events are {set(events)}")
    return check_call(message.tool_calls[0])


@row("tools, strict, parsed", text_errors=(openai.LengthFinishReasonError,))
def tools_parsed():
    class GetWeather(BaseModel):
        """The weather of a city."""

        city: str
        days: int

    answer = client.chat.completions.parse(
        model=MODEL, messages=WEATHER, tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required", max_tokens=512,
    )  # fmt: skip
    [call, *_] = answer.choices[0].message.tool_calls
    expect(isinstance(call.function.parsed_arguments, GetWeather), f"parsed: {call.function}")
    return call.function.arguments


@row("tools, round trip")
def tools_round_trip():
    asked = client.chat.completions.create(
        model=MODEL, messages=WEATHER, tools=TOOLS, tool_choice="required", max_tokens=256
    ).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"}
        for call in asked.tool_calls
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=[*WEATHER, asked, *results], tools=TOOLS, max_tokens=64
    ).choices[0].message
    expect(answer.content or answer.tool_calls, "the answer is empty")
    expect_text("18 degrees" in (answer.content or ""), f"the answer is {answer.content!r}")


@row("tools, parallel")
def tools_parallel():
    messages = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=256)
    calls = answer.choices[0].message.tool_calls or []
    expect_text(len(calls) == 2, f"{len(calls)} calls")
    expect(len({call.id for call in calls}) == 2, "both calls have one id")
    one = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, parallel_tool_calls=False, max_tokens=256
    )
    expect(len(one.choices[0].message.tool_calls) == 1, "several calls despite parallel_tool_calls=false")


@row("structured output, parsed")
def chat_parse():
    answer = client.chat.completions.parse(
        model=MODEL, messages=WEATHER, response_format=City, max_tokens=256, temperature=0
    )
    expect_text(answer.choices[0].finish_reason == "stop", "the text is cut off")
    expect(isinstance(answer.choices[0].message.parsed, City), f"{answer.choices[0].message}")
    return answer.choices[0].message.content


@row("structured output, stream helper")
def chat_parse_streamed():
    with client.chat.completions.stream(
        model=MODEL, messages=WEATHER, response_format=City, max_tokens=256, temperature=0
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    expect("content.done" in events, f"the events are {set(events)}")
    expect(isinstance(message.parsed, City), f"{message}")
    return message.content


@row("JSON object")
def json_object():
    answer = client.chat.completions.create(
        model=MODEL, messages=WEATHER, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    expect_text(answer.choices[0].finish_reason == "stop", f"cut off: {answer.choices[0].message.content}")
    expect(isinstance(json.loads(answer.choices[0].message.content), dict), "not an object")


@row("reasoning")
def reasoning():
    messages = [{"role": "user", "content": "Please think, and say hello to Ada."}]
    message = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=64).choices[0].message
    thought = getattr(message, "reasoning_content", None)
    expect_text(thought, "no thought")
    expect("think>" not in thought + (message.content or ""), f"{message}")
    chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=64, stream=True)
    parts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    expect_text("".join(parts), "no thought in the stream")


@row("completions")
def completions():
    answer = client.completions.create(model=MODEL, prompt="The sea is", max_tokens=8, logprobs=1)
    expect(answer.choices[0].text, "the text is empty")
    expect(answer.choices[0].logprobs.tokens, "no tokens in logprobs")


@row("completions, streamed")
def completions_streamed():
    stream = client.completions.create(model=MODEL, prompt="The sea is", max_tokens=8, stream=True)
    expect("".join(chunk.choices[0].text for chunk in stream), "the text is empty")


@row("responses")
def responses():
    answer = client.responses.create(
        model=MODEL, input="Say hello to Ada.", instructions="Be kind.", max_output_tokens=16
    )
    expect(answer.output_text, "the answer is empty")
    expect(answer.status in ("completed", "incomplete"), f"status is {answer.status}")
    expect(answer.usage.output_tokens > 0, "no usage")


@row("responses, streamed")
def responses_streamed():
    events = list(
        client.responses.create(model=MODEL, input="Say hello to Ada.", max_output_tokens=16, stream=True)
    )
    kinds = [event.type for event in events]
    expect(kinds[:2] == ["response.created", "response.in_progress"], f"the events begin with {kinds[:2]}")
    expect(kinds[-1] in ("response.completed", "response.incomplete"), f"the events end with {kinds[-1]}")
    expect([event.sequence_number for event in events] == list(range(len(events))), "sequence numbers")
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(deltas and deltas == events[-1].response.output_text, "the deltas are not the text")


@row("responses, stream helper")
def responses_helper():
    with client.responses.stream(model=MODEL, input="Say hello to Ada.", max_output_tokens=16) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        try:
            final = stream.get_final_response()
        except RuntimeError as error:   # the helper raises if a response is incomplete
            expect("completed" in str(error), str(error))
        else:
            expect(text and final.output_text == text, "the deltas are not the text")
    expect(text, "the answer is empty")


@row("responses, tools")
def responses_tools():
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    asked = client.responses.create(
        model=MODEL, input=WEATHER, tools=tools, tool_choice="required", max_output_tokens=256
    )
    [call, *_] = [item for item in asked.output if item.type == "function_call"]
    expect(json.loads(call.arguments).keys() == {"city", "unit"}, f"the arguments are {call.arguments}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees and sunny"}
    others = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "unknown"}
        for item in asked.output
        if item.type == "function_call" and item is not call
    ]
    answer = client.responses.create(
        model=MODEL, input=[*WEATHER, *asked.output, result, *others], tools=tools, max_output_tokens=64
    )
    expect_text("18 degrees" in answer.output_text, f"the answer is {answer.output_text!r}")


@row("responses, tools, streamed")
def responses_tools_streamed():
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    with client.responses.stream(
        model=MODEL, input=WEATHER, tools=tools, tool_choice="required", max_output_tokens=256
    ) as stream:
        events = list(stream)
    kinds = {event.type for event in events}
    expect("response.function_call_arguments.delta" in kinds, f"the events are {kinds}")
    [done, *_] = [event for event in events if event.type == "response.function_call_arguments.done"]
    expect(json.loads(done.arguments).keys() == {"city", "unit"}, f"the arguments are {done.arguments}")


@row("responses, reasoning")
def responses_reasoning():
    asked = {"model": MODEL, "input": "Please think, and say hello to Ada.", "max_output_tokens": 64}
    answer = client.responses.create(**asked, reasoning={"effort": "low", "summary": "auto"})
    kinds = [item.type for item in answer.output]
    expect_text("reasoning" in kinds, f"the items are {kinds}")
    expect("think>" not in answer.output_text, answer.output_text)
    events = {event.type for event in client.responses.create(**asked, stream=True)}
    expect_text(any("reasoning" in event for event in events), f"the events are {events}")


@row("responses, parsed")
def responses_parse():
    answer = client.responses.parse(
        model=MODEL, input="Describe Paris.", text_format=City, max_output_tokens=256, temperature=0
    )
    expect_text(answer.status == "completed", f"cut off: {answer.output_text}")
    expect(isinstance(answer.output_parsed, City), f"{answer.output}")


@row("responses, previous response")
def responses_previous():
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=16, store=True)
    second = client.responses.create(
        model=MODEL, input="Say hello to me.", previous_response_id=first.id, max_output_tokens=16
    )
    expect(second.previous_response_id == first.id, "previous_response_id is another")
    expect(second.usage.input_tokens > first.usage.input_tokens, "the prompt lacks the first turn")
    expect(client.responses.retrieve(first.id).id == first.id, "retrieve returns another")
    client.responses.delete(first.id)


@row("responses, what Codex sends")
def responses_codex():
    asked = {
        "model": MODEL,
        "instructions": "You are kind. " * 40,
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "input_text", "text": "Be polite."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "Say hello to Ada."}]},
            # Reasoning that another server has encrypted.
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "Again."}]},
        ],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 16,
        "extra_body": {"client_metadata": {"session": "1"}},
    }
    first = client.responses.create(**asked)
    expect(first.store is False, f"store is {first.store}")
    usage = client.responses.create(**asked).usage
    cached = usage.input_tokens_details.cached_tokens
    expect(cached > 0.5 * usage.input_tokens, f"the prompt is not cached: {usage}")


@row("a prompt that is too long")
def too_long():
    long = "word " * 200_000
    for ask, given in (
        (client.chat.completions.create, {"messages": [{"role": "user", "content": long}]}),
        (client.responses.create, {"input": long}),
    ):
        try:
            ask(model=MODEL, **given)
        except openai.BadRequestError as error:
            expect(error.code == "context_length_exceeded", f"{error.body}")
            expect("maximum context length is" in error.message, error.message)
        else:
            expect(condition=False, detail="it is accepted")


@row("errors")
def errors():
    for expected, change in (
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"temperature": -1}),
    ):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 4, **change})
        except expected as error:
            expect(error.message and error.type, f"no message or type: {error.body}")
        else:
            expect(condition=False, detail=f"{change} is accepted")


SEA = ["How deep is the ocean?", "The sea has a depth of 4,000 metres.", "My cat sleeps."]


@row("embeddings")
def embeddings():
    answer = client.embeddings.create(model=ENCODER, input=SEA)     # the client asks for base64
    vectors = [item.embedding for item in answer.data]
    expect_near(*vectors)
    expect(answer.usage.prompt_tokens == answer.usage.total_tokens > 15, f"{answer.usage}")
    floats = client.embeddings.create(model=ENCODER, input=SEA[0], encoding_format="float")
    difference = max(abs(a - b) for a, b in zip(floats.data[0].embedding, vectors[0], strict=True))
    expect(difference < 1e-5, f"vectors in base64 differ by {difference}")
    short = client.embeddings.create(model=ENCODER, input=SEA[0], dimensions=64)
    expect(len(short.data[0].embedding) == 64, f"{len(short.data[0].embedding)} numbers")


@row("embeddings, error")
def embeddings_error():
    try:
        client.embeddings.create(model=ENCODER, input="word " * 1000)
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", f"the code is {error.code}")
    else:
        raise AssertionError("a text that is too long is not rejected")


main()
