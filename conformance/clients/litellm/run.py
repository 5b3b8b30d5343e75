"""litellm: its providers for OpenAI's API, vLLM, Anthropic's and Ollama's API."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"     # it asks the internet for prices otherwise

import litellm
from pydantic import BaseModel, Field
from rows import MODEL, URL, expect, expect_text, main, row

PROVIDERS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"},
    "ollama_chat": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}
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


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)


def chat(options):
    answer = litellm.completion(messages=HELLO, max_tokens=16, **options)
    expect(answer.choices[0].message.content and answer.usage.total_tokens, f"{answer}")


def streamed(options):
    parts = litellm.completion(
        messages=HELLO, max_tokens=16, stream=True, stream_options={"include_usage": True}, **options
    )
    expect("".join(part.choices[0].delta.content or "" for part in parts if part.choices), "no text")


def tools(options):
    asked = litellm.completion(messages=WEATHER, tools=TOOLS, max_tokens=128, **options).choices[0].message
    expect_text(asked.tool_calls, f"no call: {asked.content}")
    [call, *_] = asked.tool_calls
    expect(call.function.name == "get_weather", f"{call}")
    expect_text("city" in json.loads(call.function.arguments), f"{call}")
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "18 degrees"}
        for call in asked.tool_calls
    ]
    answer = litellm.completion(messages=[*WEATHER, asked, *results], tools=TOOLS, max_tokens=64, **options)
    expect_text("18 degrees" in (answer.choices[0].message.content or ""), f"{answer.choices[0].message}")


def tools_streamed(options):
    parts = list(litellm.completion(messages=WEATHER, tools=TOOLS, max_tokens=128, stream=True, **options))
    message = litellm.stream_chunk_builder(parts).choices[0].message
    expect_text(message.tool_calls, f"no call: {message.content}")
    expect_text("city" in json.loads(message.tool_calls[0].function.arguments), f"{message}")


def structured(options):
    answer = litellm.completion(messages=WEATHER, response_format=City, max_tokens=256, **options)
    return str(City.model_validate_json(answer.choices[0].message.content))


def responses():
    answer = litellm.responses(input="Say hello to Ada.", max_output_tokens=16, **PROVIDERS["openai"])
    expect(answer.output[0].content[0].text, f"{answer}")


def register(provider, options):
    row(f"{provider}: chat")(lambda: chat(options))
    row(f"{provider}: streamed")(lambda: streamed(options))
    row(f"{provider}: tools")(lambda: tools(options))
    row(f"{provider}: tools, streamed")(lambda: tools_streamed(options))
    row(f"{provider}: response_format")(lambda: structured(options))


for provider, options in PROVIDERS.items():
    register(provider, options)
row("openai: Responses")(responses)
main()
