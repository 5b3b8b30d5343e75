"""anthropic: the library of Anthropic, over /v1/messages."""

import asyncio
import json
import re

import anthropic
from pydantic import BaseModel
from rows import MODEL, URL, expect, expect_text, main, row

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    }
]


def tool_use(message):
    uses = [block for block in message.content if block.type == "tool_use"]
    expect_text(uses, f"no call: {message.content}")
    expect(message.stop_reason == "tool_use", f"stop_reason is {message.stop_reason}")
    expect(uses[0].name == "get_weather" and "city" in uses[0].input, f"the call is {uses[0]}")
    return uses[0]


@row("messages")
def messages():
    message = client.messages.create(model=MODEL, max_tokens=16, system="Be kind.", messages=HELLO)
    expect(message.content and message.content[0].type == "text", f"content is {message.content}")
    expect(message.content[0].text, "the text is empty")
    expect(message.stop_reason in ("end_turn", "max_tokens"), f"stop_reason is {message.stop_reason}")
    expect(message.usage.input_tokens and message.usage.output_tokens, f"usage is {message.usage}")


@row("messages, streamed")
def messages_streamed():
    events = list(client.messages.create(model=MODEL, max_tokens=16, messages=HELLO, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    expect(kinds[:2] == ["message_start", "content_block_start"], f"the events begin with {kinds[:2]}")
    end = ["content_block_stop", "message_delta", "message_stop"]
    expect(kinds[-3:] == end, f"the events end with {kinds[-3:]}")


@row("stream helper")
def stream_helper():
    with client.messages.stream(model=MODEL, max_tokens=16, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text and text == final.content[0].text, f"{text!r} is not {final.content}")
    expect(final.usage.output_tokens > 0, "no usage")


@row("stream helper, async")
def stream_async():
    async def ask():
        async with (
            anthropic.AsyncAnthropic(base_url=URL, api_key="none") as client,
            client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO) as stream,
        ):
            return await stream.get_final_text()

    expect(asyncio.run(ask()), "the text is empty")


@row("content blocks, stop sequence")
def blocks():
    message = client.messages.create(
        model=MODEL,
        max_tokens=32,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Say hello to Ada Lovelace."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "user", "content": [{"type": "text", "text": "Say hello to Ada Lovelace again."}]},
        ],
        stop_sequences=["Ada"],
        extra_body={"temperature": 0, "top_k": 5},
        metadata={"user_id": "u"},
    )
    expect_text(message.stop_reason == "stop_sequence", f"stop_reason is {message.stop_reason}")
    expect(message.stop_sequence == "Ada", f"stop_sequence is {message.stop_sequence!r}")


@row("tools, auto")
def tools_auto():
    tool_use(client.messages.create(model=MODEL, max_tokens=128, messages=WEATHER, tools=TOOLS))


@row("tools, any")
def tools_any():
    message = client.messages.create(
        model=MODEL, max_tokens=256, messages=WEATHER, tools=TOOLS, tool_choice={"type": "any"}
    )
    return json.dumps(tool_use(message).input)


@row("tools, named")
def tools_named():
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    message = client.messages.create(
        model=MODEL, max_tokens=256, messages=HELLO, tools=TOOLS, tool_choice=choice
    )
    return json.dumps(tool_use(message).input)


@row("tools, stream helper")
def tools_streamed():
    with client.messages.stream(
        model=MODEL, max_tokens=256, messages=WEATHER, tools=TOOLS, tool_choice={"type": "any"}
    ) as stream:
        kinds = {event.type for event in stream}
        use = tool_use(stream.get_final_message())
    expect("input_json" in kinds, f"the events are {kinds}")
    return json.dumps(use.input)


@row("tools, round trip")
def tools_round_trip():
    asked = client.messages.create(
        model=MODEL, max_tokens=256, messages=WEATHER, tools=TOOLS, tool_choice={"type": "any"}
    )
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees and sunny"}
        for block in asked.content
        if block.type == "tool_use"
    ]
    turns = [*WEATHER, {"role": "assistant", "content": asked.content}, {"role": "user", "content": results}]
    answer = client.messages.create(model=MODEL, max_tokens=64, messages=turns, tools=TOOLS)
    text = "".join(block.text for block in answer.content if block.type == "text")
    expect_text("18 degrees" in text, f"the answer is {answer.content}")


@row("tool runner")
def tool_runner():
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return f"18 degrees in {city}"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=128, messages=WEATHER, tools=[get_weather], max_iterations=3
    )
    final = runner.until_done()
    text = "".join(getattr(block, "text", "") for block in final.content)
    expect_text("18 degrees" in text, f"{final.content}")


@row("thinking")
def thinking():
    asked = [{"role": "user", "content": "Please think, and say hello to Ada."}]
    options = {"model": MODEL, "max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    try:
        with client.messages.stream(messages=asked, **options) as stream:
            events = {event.type for event in stream}
            message = stream.get_final_message()
    except anthropic.BadRequestError as error:
        expect_text(condition=False, detail=error.message)
    kinds = [block.type for block in message.content]
    expect_text(kinds[0] == "thinking", f"the blocks are {kinds}")
    expect("thinking" in events and kinds[-1] == "text", f"the events are {events}, the blocks {kinds}")
    turns = [*asked, {"role": "assistant", "content": message.content}, *asked]
    expect(client.messages.create(messages=turns, **options).content, "the thought cannot be sent back")


@row("structured output, parsed")
def parsed():
    class City(BaseModel):
        city: str
        country: str

    message = client.messages.parse(
        model=MODEL, max_tokens=256, messages=WEATHER, output_format=City
    )
    expect_text(message.stop_reason == "end_turn", "the text is cut off")
    expect(isinstance(message.parsed_output, City), f"{message.content}")


@row("count_tokens")
def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be kind.", tools=TOOLS)
    expect(counted.input_tokens > 10, f"{counted}")
    used = client.messages.create(
        model=MODEL, max_tokens=4, messages=HELLO, system="Be kind.", tools=TOOLS
    ).usage
    total = used.input_tokens + used.cache_read_input_tokens
    expect(counted.input_tokens == total, f"{counted.input_tokens} counted, {total} used")


@row("what Claude Code sends")
def claude_code():
    billing = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=cli; cch=1f2e3;"
    ephemeral = {"type": "ephemeral", "ttl": "1h"}
    asked = {
        "model": MODEL,
        "max_tokens": 16,
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are kind. " * 40, "cache_control": ephemeral},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello.", "cache_control": ephemeral}]}
        ],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "extra_body": {"output_config": {"effort": "high"}},
    }
    first = client.beta.messages.create(**asked)
    asked["system"][0]["text"] = billing.replace("1f2e3", "4a5b6")
    usage = client.beta.messages.create(**asked).usage
    expect(first.stop_reason, f"{first}")
    total = usage.input_tokens + usage.cache_read_input_tokens
    expect(usage.cache_read_input_tokens > 0.5 * total, f"the prompt is not cached: {usage}")


@row("more tokens than there is room")
def long_answer():
    # Read up to its first part.
    with client.messages.stream(model=MODEL, max_tokens=10_000_000, messages=HELLO) as stream:
        expect(next(iter(stream)).type == "message_start", "no message begins")
        clamped = stream.response.headers.get("x-genserve-clamped", "")
        expect(re.fullmatch(r"max_tokens=\d+", clamped), f"the answer does not say its length: {clamped!r}")


@row("a prompt that is too long")
def too_long():
    try:
        client.messages.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 200_000}], max_tokens=4
        )
    except anthropic.BadRequestError as error:
        words = error.body["error"]["message"]
        # In words by which Claude Code compacts the conversation.
        expect(re.match(r"prompt is too long: \d+ tokens > \d+ maximum", words), words)
    else:
        expect(condition=False, detail="it is accepted")


@row("models")
def models():
    [model] = [model for model in client.models.list(limit=1000) if model.id == MODEL]
    expect(model.max_input_tokens > 0, f"{model}")


@row("errors")
def errors():
    for expected, change in (
        (anthropic.NotFoundError, {"model": "no-such-model"}),
        (anthropic.BadRequestError, {"extra_body": {"temperature": -1}}),
        (anthropic.BadRequestError, {"messages": []}),
    ):
        try:
            client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 4, **change})
        except expected as error:
            expect(error.body.get("type") == "error" and error.body["error"]["message"], f"{error.body}")
        else:
            expect(condition=False, detail=f"{change} is accepted")


main()
