"""huggingface_hub: InferenceClient, over TGI's routes and chat completions."""

import asyncio
import json

from huggingface_hub import AsyncInferenceClient, InferenceClient
from rows import MODEL, URL, expect, expect_text, main, row

client = InferenceClient(URL)
HELLO = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}},
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
    }
]


@row("text_generation")
def text_generation():
    expect(client.text_generation("The sea is", max_new_tokens=8), "the text is empty")


@row("text_generation, details")
def details():
    answer = client.text_generation(
        "The sea is", max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2, seed=1,
        do_sample=True, temperature=0.7,
    )  # fmt: skip
    expect(answer.details.generated_tokens == len(answer.details.tokens), f"{answer.details}")
    expect(answer.details.prefill and answer.details.finish_reason, f"{answer.details}")


@row("text_generation, streamed details")
def details_streamed():
    parts = list(client.text_generation("The sea is", max_new_tokens=8, details=True, stream=True))
    expect(parts[-1].details and parts[-1].generated_text, f"{parts[-1]}")
    text = "".join(part.token.text for part in parts)
    expect(text == parts[-1].generated_text, f"{text!r} is not {parts[-1].generated_text!r}")


@row("text_generation, grammar")
def grammar():
    text = client.text_generation(
        "Paris as JSON:", max_new_tokens=128, grammar={"type": "json", "value": PARAMETERS}
    )
    expect(json.loads(text).keys() == {"city"}, text)
    return text


@row("chat_completion")
def chat():
    answer = client.chat_completion(HELLO, max_tokens=16)
    expect(answer.choices[0].message.content, "the text is empty")


@row("chat_completion, named model")
def chat_named():
    named = InferenceClient(base_url=f"{URL}/v1", api_key="none")
    answer = named.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    expect(answer.choices[0].message.content, "the text is empty")


@row("chat_completion, streamed")
def chat_streamed():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat_completion(HELLO, max_tokens=16, **options))
    expect("".join(part.choices[0].delta.content or "" for part in parts if part.choices), "no text")
    expect(parts[-1].usage, "no usage")


@row("chat_completion, async")
def chat_async():
    async def ask():
        async with AsyncInferenceClient(URL) as client:
            return (await client.chat_completion(HELLO, max_tokens=8)).choices[0].message.content

    expect(asyncio.run(ask()), "the text is empty")


@row("tools, auto")
def tools():
    message = client.chat_completion(WEATHER, tools=TOOLS, max_tokens=128).choices[0].message
    expect_text(message.tool_calls, f"no call: {message.content}")
    expect(message.tool_calls[0].function.name == "get_weather", f"{message}")


@row("tools, required")
def tools_required():
    answer = client.chat_completion(WEATHER, tools=TOOLS, tool_choice="required", max_tokens=128)
    [call, *_] = answer.choices[0].message.tool_calls
    arguments = call.function.arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(arguments.keys() == {"city"}, f"{call}")


@row("tools, named, streamed")
def tools_streamed():
    choice = {"function": {"name": "get_weather"}}
    arguments = ""
    for part in client.chat_completion(WEATHER, tools=TOOLS, tool_choice=choice, max_tokens=128, stream=True):
        for call in part.choices[0].delta.tool_calls or []:
            arguments += (call.function.arguments or "") if not getattr(call, "index", 0) else ""
    expect(json.loads(arguments).keys() == {"city"}, arguments)


@row("tools, round trip")
def tools_round_trip():
    asked = client.chat_completion(WEATHER, tools=TOOLS, tool_choice="required", max_tokens=128)
    message = asked.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"} for call in message.tool_calls
    ]
    answer = client.chat_completion([*WEATHER, message, *results], tools=TOOLS, max_tokens=64)
    expect_text("18 degrees" in (answer.choices[0].message.content or ""), f"{answer.choices[0].message}")


@row("response_format, JSON schema")
def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "City", "schema": PARAMETERS, "strict": True}}
    text = client.chat_completion(WEATHER, response_format=form, max_tokens=128).choices[0].message.content
    expect(json.loads(text).keys() == {"city"}, text)


@row("response_format, TGI's")
def json_value():
    form = {"type": "json", "value": PARAMETERS}
    text = client.chat_completion(WEATHER, response_format=form, max_tokens=128).choices[0].message.content
    expect(json.loads(text).keys() == {"city"}, text)


@row("endpoint info, health")
def endpoint():
    of_endpoint = InferenceClient(URL, provider="hf-inference")
    expect(of_endpoint.health_check(), "not healthy")
    expect(of_endpoint.get_endpoint_info()["model_id"], "no model_id")


main()
