"""ollama: the library of Ollama, over /api."""

import asyncio

import ollama
from pydantic import BaseModel
from rows import ENCODER, MODEL, URL, expect, expect_near, expect_text, main, row

client = ollama.Client(host=URL)
HELLO = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SHORT = {"num_predict": 16}


class City(BaseModel):
    name: str
    country: str


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"18 degrees in {city}"


@row("list")
def list_models():
    models = client.list().models
    expect(any(model.model.split(":")[0] == MODEL for model in models), f"{models}")
    expect(all(model.modified_at and model.digest and model.size for model in models), f"{models}")


@row("show")
def show():
    shown = client.show(MODEL)
    expect("completion" in shown.capabilities and "tools" in shown.capabilities, f"{shown.capabilities}")
    expect(shown.modelinfo and shown.details, "no model_info or details")
    expect(any(key.endswith(".context_length") for key in shown.modelinfo), f"{shown.modelinfo}")


@row("ps")
def ps():
    expect(isinstance(client.ps().models, list), "no list of models")


@row("chat")
def chat():
    answer = client.chat(model=MODEL, messages=HELLO, options=SHORT)
    expect(answer.message.content and answer.message.role == "assistant", f"{answer.message}")
    expect(answer.done and answer.done_reason in ("stop", "length"), f"done_reason is {answer.done_reason}")
    expect(answer.eval_count and answer.prompt_eval_count and answer.total_duration, f"{answer}")


@row("chat, streamed")
def chat_streamed():
    parts = list(client.chat(model=MODEL, messages=HELLO, options=SHORT, stream=True))
    expect("".join(part.message.content or "" for part in parts), "the text is empty")
    expect([part.done for part in parts] == [False] * (len(parts) - 1) + [True], "done is not only the last")
    expect(parts[-1].eval_count, "the last part has no eval_count")


@row("chat, the latest tag")
def chat_tag():
    expect(client.chat(model=f"{MODEL}:latest", messages=HELLO, options=SHORT).message.content, "no text")


@row("chat, async")
def chat_async():
    async def ask():
        stream = await ollama.AsyncClient(host=URL).chat(
            model=MODEL, messages=HELLO, options=SHORT, stream=True
        )
        return "".join([part.message.content or "" async for part in stream])

    expect(asyncio.run(ask()), "the text is empty")


@row("chat, options")
def chat_options():
    options = {
        "num_predict": 8, "temperature": 0.5, "top_k": 20, "top_p": 0.9, "seed": 7, "num_ctx": 2048,
        "repeat_penalty": 1.1, "repeat_last_n": 64, "stop": ["\n"], "num_gpu": 0, "num_thread": 2,
    }  # fmt: skip
    first = client.chat(model=MODEL, messages=HELLO, options=options, keep_alive="5m").message.content
    second = client.chat(model=MODEL, messages=HELLO, options=options, keep_alive=0).message.content
    expect(first == second, f"one seed, two texts: {first!r} and {second!r}")


@row("chat, log-probabilities")
def chat_logprobs():
    answer = client.chat(model=MODEL, messages=HELLO, options=SHORT, logprobs=True, top_logprobs=2)
    expect(answer.logprobs and len(answer.logprobs[0].top_logprobs) == 2, f"{answer.logprobs}")


@row("generate")
def generate():
    answer = client.generate(model=MODEL, prompt="Say hello to Ada.", system="Be kind.", options=SHORT)
    expect(answer.response and answer.done, f"{answer}")


@row("generate, streamed")
def generate_streamed():
    parts = list(client.generate(model=MODEL, prompt="Say hello to Ada.", options=SHORT, stream=True))
    expect("".join(part.response for part in parts) and parts[-1].done, f"{parts[-1]}")


@row("generate, raw")
def generate_raw():
    expect(client.generate(model=MODEL, prompt="The sea is", raw=True, options=SHORT).response, "no text")


@row("generate, load only")
def generate_load():
    answer = client.generate(model=MODEL)
    expect(answer.done and answer.done_reason == "load", f"{answer}")


@row("tools")
def tools():
    options = {"num_predict": 128}
    asked = client.chat(model=MODEL, messages=WEATHER, tools=[get_weather], options=options).message
    expect_text(asked.tool_calls, f"no call: {asked.content}")
    [call, *_] = asked.tool_calls
    expect(call.function.name == "get_weather", f"{call}")
    expect_text(isinstance(call.function.arguments.get("city"), str), f"{call}")
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    turns = [*WEATHER, asked, result]
    answer = client.chat(model=MODEL, messages=turns, tools=[get_weather], options=options)
    expect_text("18 degrees" in answer.message.content, f"{answer.message}")


@row("tools, streamed")
def tools_streamed():
    parts = list(
        client.chat(
            model=MODEL, messages=WEATHER, tools=[get_weather], options={"num_predict": 128}, stream=True
        )
    )
    calls = [call for part in parts for call in part.message.tool_calls or []]
    expect_text(calls, f"no call: {''.join(part.message.content or '' for part in parts)}")
    expect(calls[0].function.name == "get_weather", f"{calls}")


@row("thinking")
def thinking():
    messages = [{"role": "user", "content": "Please think, and say hello to Ada."}]
    try:
        message = client.chat(model=MODEL, messages=messages, think=True, options=SHORT).message
    except ollama.ResponseError as error:
        expect("does not support thinking" in error.error, error.error)
        expect_text(condition=False, detail=error.error)
    expect(message.thinking and "<think>" not in (message.content or ""), f"{message}")


@row("format, schema")
def format_schema():
    answer = client.chat(
        model=MODEL, messages=WEATHER, format=City.model_json_schema(), options={"temperature": 0}
    )
    return str(City.model_validate_json(answer.message.content))


@row("format, json")
def format_json():
    answer = client.generate(
        model=MODEL, prompt="Describe Paris as JSON.", format="json", options={"temperature": 0}
    )
    expect_text(answer.done_reason == "stop", f"cut off: {answer.response[:100]}")
    return answer.response[:100]


@row("errors")
def errors():
    try:
        client.chat(model="no-such-model", messages=HELLO)
    except ollama.ResponseError as error:
        expect(error.status_code == 404 and "not found" in error.error, f"{error.status_code}: {error.error}")
    else:
        expect(condition=False, detail="an unknown model is accepted")


@row("embed")
def embed():
    texts = ["How deep is the ocean?", "The sea has a depth of 4,000 metres.", "My cat sleeps."]
    answer = client.embed(ENCODER, texts)
    expect_near(*answer.embeddings)
    expect(answer.prompt_eval_count and answer.total_duration, f"{answer}")
    expect_near(client.embeddings(ENCODER, texts[0]).embedding, *answer.embeddings[1:])
    expect(client.show(ENCODER).capabilities == ["embedding"], f"{client.show(ENCODER).capabilities}")


main()
