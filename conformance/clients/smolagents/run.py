"""smolagents: the agent that calls tools."""

import json

from rows import MODEL, URL, TextFailure, expect, expect_text, main, row
from smolagents import AgentError, ChatMessage, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=256)


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"18 degrees in {city}"


def run(**options):
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=4, verbosity_level=0, **options)
    try:
        answer = str(agent.run("What is the weather in Paris?"))
    except AgentError as error:
        raise TextFailure(str(error)) from error
    errors = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
    wire = [error for error in errors if type(error).__name__ == "AgentGenerationError"]
    expect(not wire, f"{wire}")
    expect_text("18 degrees" in answer, f"{answer}; {errors}")
    return answer


@row("ToolCallingAgent")
def agent():
    return run()


@row("ToolCallingAgent, streamed")
def agent_streamed():
    return run(stream_outputs=True)


@row("model, tools")
def model_tools():
    message = ChatMessage(role="user", content=[{"type": "text", "text": "What is the weather in Paris?"}])
    answer = model.generate([message], tools_to_call_from=[get_weather])
    [call, *_] = answer.tool_calls
    arguments = call.function.arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(call.function.name == "get_weather" and "city" in arguments, f"{call}")


main()
