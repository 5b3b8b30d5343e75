"""openai-agents: agents over Responses, its default, and over chat completions."""

import asyncio

from agents import (
    Agent,
    AsyncOpenAI,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field
from rows import MODEL, URL, expect, expect_text, main, row

set_tracing_disabled(True)  # traces go to OpenAI
BEHAVIOUR = (MaxTurnsExceeded, ModelBehaviorError)
QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def agent(api, **options):
    # Each row has an event loop of its own, and so needs a new client.
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    set_default_openai_client(client)
    model = MODEL if api == "Responses" else OpenAIChatCompletionsModel(MODEL, openai_client=client)
    settings = ModelSettings(max_tokens=256)
    return Agent(name="Helper", instructions="Be brief.", model=model, model_settings=settings, **options)


def text(api):
    expect(Runner.run_sync(agent(api), "Say hello to Ada.").final_output, "the text is empty")


def tool(api):
    result = Runner.run_sync(agent(api, tools=[get_weather]), QUESTION, max_turns=3)
    kinds = [item.type for item in result.new_items]
    expect_text("tool_call_output_item" in kinds, f"the items are {kinds}: {result.final_output}")
    expect_text("18 degrees" in result.final_output, result.final_output)


def streamed(api):
    async def run():
        result = Runner.run_streamed(agent(api, tools=[get_weather]), QUESTION, max_turns=3)
        events = [event.type async for event in result.stream_events()]
        return events, str(result.final_output)

    events, output = asyncio.run(run())
    expect("raw_response_event" in events, f"the events are {set(events)}")
    expect_text("18 degrees" in output, output)


def typed(api):
    typed_agent = agent(api, output_type=City)
    output = Runner.run_sync(typed_agent, "Describe the city Paris.", max_turns=2).final_output
    expect(isinstance(output, City), f"{output}")
    return str(output)


def handoff(api):
    weather = Agent(
        name="Weather agent", instructions="Tell the weather.", tools=[get_weather], model=agent(api).model
    )
    result = Runner.run_sync(agent(api, handoffs=[weather]), QUESTION, max_turns=4)
    expect_text(result.last_agent.name == "Weather agent", f"the last agent is {result.last_agent.name}")


def register(api):
    row(f"{api}: text", text_errors=BEHAVIOUR)(lambda: text(api))   # the text may not end within its limit
    row(f"{api}: tool", text_errors=BEHAVIOUR)(lambda: tool(api))
    row(f"{api}: tool, streamed", text_errors=BEHAVIOUR)(lambda: streamed(api))
    row(f"{api}: output type", text_errors=BEHAVIOUR)(lambda: typed(api))
    row(f"{api}: handoff", text_errors=BEHAVIOUR)(lambda: handoff(api))


register("Responses")
register("chat")
main()
