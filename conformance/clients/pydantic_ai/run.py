"""pydantic-ai: tools and structured output, over chat completions, Responses and Messages."""

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, UnexpectedModelBehavior
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from rows import MODEL, URL, expect, expect_text, main, row

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
chat = OpenAIChatModel(MODEL, provider=openai)
responses = OpenAIResponsesModel(MODEL, provider=openai)
claude = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
SETTINGS = {"max_tokens": 256}
LIMITS = UsageLimits(request_limit=4)
BEHAVIOUR = (UnexpectedModelBehavior, UsageLimitExceeded)
QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=30)
    country: str = Field(max_length=30)


def text(model):
    agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 16})
    result = agent.run_sync("Say hello to Ada.")
    expect(result.output and result.usage.output_tokens, f"{result}")


def with_tool(model):
    agent = Agent(model, model_settings=SETTINGS)
    called = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return f"18 degrees in {city}"

    output = agent.run_sync(QUESTION, usage_limits=LIMITS).output
    expect_text(called, f"no call: {output}")
    expect_text("18 degrees" in output, output)


def structured(model, output_type):
    agent = Agent(model, output_type=output_type, model_settings=SETTINGS)
    output = agent.run_sync("Describe the city Paris.", usage_limits=LIMITS).output
    expect(isinstance(output, City), f"{output}")
    return str(output)


@row("chat: text")
def chat_text():
    text(chat)


@row("chat: streamed")
def chat_streamed():
    async def run():
        async with Agent(chat, model_settings={"max_tokens": 16}).run_stream("Say hello to Ada.") as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    expect(asyncio.run(run()), "the text is empty")


@row("chat: tool", text_errors=BEHAVIOUR)
def chat_tool():
    with_tool(chat)


@row("chat: output tool", text_errors=BEHAVIOUR)
def chat_output_tool():
    return structured(chat, City)


@row("chat: native output", text_errors=BEHAVIOUR)
def chat_native():
    return structured(chat, NativeOutput(City))


@row("chat: prompted output", text_errors=BEHAVIOUR)
def chat_prompted():
    return structured(chat, PromptedOutput(City))


@row("chat: output tool, streamed", text_errors=BEHAVIOUR)
def chat_output_streamed():
    async def run():
        agent = Agent(chat, output_type=City, model_settings=SETTINGS)
        async with agent.run_stream("Describe the city Paris.") as result:
            return await result.get_output()

    expect(isinstance(asyncio.run(run()), City), "not a city")


@row("Responses: text")
def responses_text():
    text(responses)


@row("Responses: tool", text_errors=BEHAVIOUR)
def responses_tool():
    with_tool(responses)


@row("Responses: output tool", text_errors=BEHAVIOUR)
def responses_output():
    return structured(responses, City)


@row("Responses: native output", text_errors=BEHAVIOUR)
def responses_native():
    return structured(responses, NativeOutput(City))


@row("Messages: text")
def claude_text():
    text(claude)


@row("Messages: tool", text_errors=BEHAVIOUR)
def claude_tool():
    with_tool(claude)


@row("Messages: output tool", text_errors=BEHAVIOUR)
def claude_output():
    return structured(claude, City)


main()
