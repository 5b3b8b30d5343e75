"""Tool prompt: chats with tools for models whose chat template knows none.

The tools become part of the system message, in the words in which SmolLM2 was trained to read them. Earlier
calls and their results become text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from genserve.prompt import Chat, Message, Tool
from genserve.text.tool_formats import ToolFormat

# After https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct, instructions_function_calling.md. Its
# answer without a call is an empty list, in which a user reads nothing.
_INSTRUCTIONS = """\
You are an expert in composing functions. You are given a question and a set of possible functions. \

Based on the question, you will need to make one or more function/tool calls to achieve the purpose. \

If none of the functions can be used, point it out and refuse to answer. \

If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is \
needed, answer the question instead.
{example}"""
_EXAMPLES = (
    ("func_name1", '{"argument1": "value1", "argument2": "value2"}'),
    ("func_name2", '{"argument1": "value1"}'),
)


def tools_as_text(chat: Chat, tool_format: ToolFormat) -> Chat:
    """Return a chat whose system message describes the tools, which it has no more.

    Args:
        chat: with tools or without.
        tool_format: of the calls.
    """
    if not chat.tools:
        return chat
    instructions = _instructions(chat.tools, tool_format)
    first, *others = chat.messages
    if first.role == "system":
        instructions = f"{first.content}\n\n{instructions}"
    else:
        others = [first, *others]
    system = Message(role="system", content=instructions)
    return replace(chat, messages=(system, *others), tools=(), allowed_tools=(), tool_choice="auto")


def calls_as_text(chat: Chat, tool_format: ToolFormat) -> Chat:
    """Return a chat with text instead of tool calls; their results are messages of the user."""
    return replace(chat, messages=tuple(_as_text(message, tool_format) for message in chat.messages))


def _instructions(tools: Sequence[Tool], tool_format: ToolFormat) -> str:
    written = json.dumps([tool.as_dict() for tool in tools], ensure_ascii=False)
    examples = _EXAMPLES if tool_format.separator is not None else _EXAMPLES[:1]
    return _INSTRUCTIONS.format(tools=written, example=tool_format.written(examples))


def _as_text(message: Message, tool_format: ToolFormat) -> Message:
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = tool_format.written([(call.name, call.arguments) for call in message.tool_calls])
    content = f"{message.content}\n{calls}" if message.content else calls
    return replace(message, content=content, tool_calls=())
