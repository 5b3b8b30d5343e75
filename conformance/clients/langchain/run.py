"""LangChain: chat models, agents and structured output, over chat completions, Messages and Ollama's API."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel, Field, ValidationError
from rows import ENCODER, MODEL, URL, TextFailure, expect, expect_near, expect_text, main, row

V1 = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**V1, max_tokens=256, stream_usage=True)
responses = ChatOpenAI(**V1, max_tokens=256, use_responses_api=True)
claude = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=256, max_retries=0)
ollama = ChatOllama(model=MODEL, base_url=URL, num_predict=256)
QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str = Field(description="its name", max_length=30)
    country: str = Field(description="where it lies", max_length=30)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def call_and_answer(model):
    """Bind a tool, let the model call it, and give it the result."""
    bound = model.bind_tools([get_weather])
    asked = bound.invoke(QUESTION)
    expect_text(asked.tool_calls, f"no call: {asked.content}")
    expect(asked.tool_calls[0]["name"] == "get_weather", f"{asked.tool_calls}")
    expect_text("city" in asked.tool_calls[0]["args"], f"{asked.tool_calls}")
    results = [ToolMessage("18 degrees", tool_call_id=call["id"]) for call in asked.tool_calls]
    answer = bound.invoke([HumanMessage(QUESTION), asked, *results])
    expect_text("18 degrees" in answer.text, f"{answer}")


def run_agent(model):
    agent = create_agent(model, tools=[get_weather], system_prompt="Be brief.")
    try:
        state = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 6})
    except GraphRecursionError as error:
        raise TextFailure(str(error)) from error
    kinds = [message.type for message in state["messages"]]
    expect_text("tool" in kinds, f"the messages are {kinds}")
    expect_text("18 degrees" in state["messages"][-1].text, f"{state['messages'][-1]}")


def structured(model, method, question="Describe the city Paris."):
    try:
        city = model.with_structured_output(City, method=method).invoke(question)
    except (OutputParserException, ValidationError) as error:
        raise TextFailure(str(error)) from error
    expect_text(city is not None, "no call")
    expect(isinstance(city, City), f"{city}")
    return str(city)


@row("openai: invoke, stream")
def invoke():
    answer = chat.invoke("Say hello to Ada.")
    expect(answer.text and answer.usage_metadata["total_tokens"], f"{answer}")
    parts = list(chat.stream("Say hello to Ada."))
    expect("".join(part.text for part in parts), "the stream has no text")
    expect(any(part.usage_metadata for part in parts), "the stream has no usage")


@row("openai: bind_tools")
def bind_tools():
    call_and_answer(chat)


@row("openai: bind_tools, any, streamed")
def bind_tools_streamed():
    whole = None
    for part in chat.bind_tools([get_weather], tool_choice="any").stream(QUESTION):
        whole = part if whole is None else whole + part
    expect(whole.tool_calls and whole.tool_calls[0]["name"] == "get_weather", f"{whole}")
    expect("city" in whole.tool_calls[0]["args"], f"{whole.tool_calls}")


@row("openai: agent")
def agent():
    run_agent(chat)


@row("openai: agent, streamed")
def agent_streamed():
    agent = create_agent(chat, tools=[get_weather])
    try:
        parts = list(
            agent.stream(
                {"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 6}, stream_mode="messages"
            )
        )
    except GraphRecursionError as error:
        raise TextFailure(str(error)) from error
    expect_text(any(part.type == "tool" for part, _ in parts), "no call")


@row("openai: agent, response_format")
def agent_response_format():
    agent = create_agent(chat, tools=[get_weather], response_format=ToolStrategy(City))
    try:
        state = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 8})
    except GraphRecursionError as error:
        raise TextFailure(str(error)) from error
    expect_text(isinstance(state.get("structured_response"), City), f"{state['messages'][-1]}")


@row("openai: structured, function_calling")
def function_calling():
    return structured(chat, "function_calling")


@row("openai: structured, json_mode")
def json_mode():
    return structured(chat, "json_mode", "Describe Paris as JSON with the keys name and country.")


@row("openai: structured, json_schema")
def json_schema():
    return structured(chat, "json_schema")


@row("openai: structured, json_schema, strict, streamed")
def json_schema_streamed():
    strict = chat.with_structured_output(City, method="json_schema", strict=True)
    parts = list(strict.stream("Describe Paris."))
    expect_text(parts and isinstance(parts[-1], City), f"{parts}")


@row("openai: Responses, invoke, stream")
def responses_invoke():
    expect(responses.invoke("Say hello to Ada.").text, "the text is empty")
    expect("".join(part.text for part in responses.stream("Say hello to Ada.")), "the stream has no text")


@row("openai: Responses, bind_tools")
def responses_tools():
    call_and_answer(responses)


@row("openai: Responses, previous response")
def responses_previous():
    model = responses.model_copy(update={"use_previous_response_id": True})
    asked = HumanMessage("My name is Ada.")
    first = model.invoke([asked])
    second = model.invoke([asked, first, HumanMessage("Say hello to me.")])
    expect(second.text, "the text is empty")
    tokens = [answer.usage_metadata["input_tokens"] for answer in (first, second)]
    expect(tokens[0] < tokens[1], f"the prompts have {tokens} tokens")


@row("openai: Responses, json_schema")
def responses_schema():
    return structured(responses, "json_schema")


@row("anthropic: invoke, stream")
def claude_invoke():
    answer = claude.invoke("Say hello to Ada.")
    expect(answer.text and answer.usage_metadata["total_tokens"], f"{answer}")
    expect("".join(part.text for part in claude.stream("Say hello to Ada.")), "the stream has no text")


@row("anthropic: bind_tools")
def claude_tools():
    call_and_answer(claude)


@row("anthropic: structured, function_calling")
def claude_function_calling():
    return structured(claude, "function_calling")


@row("anthropic: structured, json_schema")
def claude_json_schema():
    return structured(claude, "json_schema")


@row("ollama: invoke, stream")
def ollama_invoke():
    expect(ollama.invoke("Say hello to Ada.").text, "the text is empty")
    expect("".join(part.text for part in ollama.stream("Say hello to Ada.")), "the stream has no text")


@row("ollama: bind_tools")
def ollama_tools():
    call_and_answer(ollama)


@row("ollama: agent")
def ollama_agent():
    run_agent(ollama)


@row("ollama: structured, json_schema")
def ollama_json_schema():
    return structured(ollama, "json_schema")


SEA = ["The sea has a depth of 4,000 metres.", "My cat sleeps."]


def embeds(embeddings):
    expect_near(embeddings.embed_query("How deep is the ocean?"), *embeddings.embed_documents(SEA))
    store = InMemoryVectorStore.from_texts(SEA, embeddings)
    [found] = store.similarity_search("How deep is the ocean?", k=1)
    expect(found.page_content == SEA[0], f"{found}")


@row("OpenAIEmbeddings")
def openai_embeddings():
    # Without the flag it sends the token ids of OpenAI's own tokenizer.
    embeds(
        OpenAIEmbeddings(
            model=ENCODER, base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False
        )
    )


@row("OllamaEmbeddings")
def ollama_embeddings():
    embeds(OllamaEmbeddings(model=ENCODER, base_url=URL))


main()
