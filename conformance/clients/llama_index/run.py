"""LlamaIndex: OpenAILike, with the agent that calls functions."""

import asyncio

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from rows import ENCODER, MODEL, URL, expect, expect_near, expect_text, main, row

llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    context_window=4096,
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=256,
    max_retries=0,
)
HELLO = [ChatMessage(role="user", content="Say hello to Ada.")]
QUESTION = "What is the weather in Paris?"


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


@row("chat")
def chat():
    expect(llm.chat(HELLO).message.content, "the text is empty")


@row("chat, streamed")
def chat_streamed():
    parts = list(llm.stream_chat(HELLO))
    expect(parts[-1].message.content == "".join(part.delta or "" for part in parts), "the deltas differ")
    expect(parts[-1].message.content, "the text is empty")


@row("complete")
def complete():
    plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=16)
    expect(plain.complete("The sea is").text, "the text is empty")
    expect("".join(part.delta or "" for part in plain.stream_complete("The sea is")), "the stream is empty")


@row("chat_with_tools")
def tools():
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    [call, *_] = llm.get_tool_calls_from_response(answer)
    expect(call.tool_name == "get_weather" and "city" in call.tool_kwargs, f"{call}")
    return str(call.tool_kwargs)


@row("predict_and_call")
def predict_and_call():
    try:
        answer = llm.predict_and_call([FunctionTool.from_defaults(get_weather)], user_msg=QUESTION)
    except ValueError as error:
        expect_text("at least one tool call" not in str(error), str(error))
        raise
    expect_text("18 degrees" in str(answer), f"{answer}")


@row("function agent")
def agent():
    agent = FunctionAgent(tools=[get_weather], llm=llm, system_prompt="Be brief.")

    async def run():
        return await agent.run(QUESTION, max_iterations=4)

    try:
        answer = str(asyncio.run(run()))
    except Exception as error:
        expect_text("Max iterations" not in str(error), str(error))
        raise
    expect_text("18 degrees" in answer, answer)


@row("structured prediction")
def structured():
    class City(BaseModel):
        """A city."""

        name: str = Field(max_length=30)
        country: str = Field(max_length=30)

    answer = llm.as_structured_llm(City).complete("Describe the city Paris.")
    expect(isinstance(answer.raw, City), f"{answer}")
    return str(answer.raw)


SEA = ["The sea has a depth of 4,000 metres.", "My cat sleeps."]


def embeds(embeddings):
    expect_near(
        embeddings.get_query_embedding("How deep is the ocean?"), *embeddings.get_text_embedding_batch(SEA)
    )
    index = VectorStoreIndex([Document(text=text) for text in SEA], embed_model=embeddings)
    [found] = index.as_retriever(similarity_top_k=1).retrieve("How deep is the ocean?")
    expect(found.node.get_content() == SEA[0], f"{found}")


@row("OpenAILikeEmbedding")
def openai_like_embedding():
    embeds(OpenAILikeEmbedding(model_name=ENCODER, api_base=f"{URL}/v1", api_key="none"))


@row("OllamaEmbedding")
def ollama_embedding():
    embeds(OllamaEmbedding(model_name=ENCODER, base_url=URL))


main()
