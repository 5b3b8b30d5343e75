"""Haystack: its generator and embedders of OpenAI, alone and in a pipeline that retrieves documents."""

from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from rows import ENCODER, MODEL, URL, expect, expect_near, main, row

V1 = {"api_base_url": f"{URL}/v1", "api_key": Secret.from_token("none")}
HELLO = [ChatMessage.from_user("Say hello to Ada.")]
DOCUMENTS = [Document(content="The sea has a depth of 4,000 metres."), Document(content="My cat sleeps.")]


@row("chat")
def chat():
    generator = OpenAIChatGenerator(model=MODEL, generation_kwargs={"max_tokens": 16}, **V1)
    [reply] = generator.run(messages=HELLO)["replies"]
    expect(reply.text, "the text is empty")
    expect(reply.meta["usage"]["completion_tokens"], f"{reply.meta}")


@row("chat, streamed")
def chat_streamed():
    parts = []
    generator = OpenAIChatGenerator(
        model=MODEL, generation_kwargs={"max_tokens": 16}, streaming_callback=parts.append, **V1
    )
    [reply] = generator.run(messages=HELLO)["replies"]
    expect(reply.text == "".join(part.content for part in parts) != "", "the chunks differ from the reply")


@row("embedders")
def embedders():
    question = OpenAITextEmbedder(model=ENCODER, **V1).run(text="How deep is the ocean?")
    embedded = OpenAIDocumentEmbedder(model=ENCODER, **V1).run(documents=DOCUMENTS)["documents"]
    expect_near(question["embedding"], *[document.embedding for document in embedded])
    expect(question["meta"]["usage"]["total_tokens"] > 4, f"{question['meta']}")


@row("pipeline with a retriever")
def retrieval():
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents(OpenAIDocumentEmbedder(model=ENCODER, **V1).run(documents=DOCUMENTS)["documents"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(model=ENCODER, **V1))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    [found] = pipeline.run({"embedder": {"text": "How deep is the ocean?"}})["retriever"]["documents"]
    expect(found.content == DOCUMENTS[0].content, f"{found}")


main()
