"""Anthropic's Python library: a streamed message, and a tool whose result goes back to the model."""

import os

import anthropic

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")
MODEL = "smollm2"
TOOL = {
    "name": "get_weather",
    "description": "The current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}

with anthropic.Anthropic(base_url=URL, api_key=os.environ.get("GENSERVE_API_KEY", "none")) as client:
    question = {"role": "user", "content": "What is the capital of Japan?"}
    greedy = {"temperature": 0}
    with client.messages.stream(
        model=MODEL, max_tokens=32, messages=[question], extra_body=greedy
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()

    chat = [{"role": "user", "content": "Do I need an umbrella in Paris?"}]
    choice = {"type": "tool", "name": "get_weather"}
    asked = client.messages.create(
        model=MODEL, max_tokens=100, messages=chat, tools=[TOOL], tool_choice=choice
    )
    [call] = [block for block in asked.content if block.type == "tool_use"]
    print(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees, rain"}
    chat += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    told = client.messages.create(
        model=MODEL, max_tokens=32, messages=chat, tools=[TOOL], tool_choice={"type": "none"}
    )
    print("".join(block.text for block in told.content))
