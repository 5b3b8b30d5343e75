"""Tool calling: how one text model reads the tools of a chat, and how its answers call them.

For a chat template that knows no tools they become part of the system message, in the words in which SmolLM2
was trained to read them; earlier calls and their results become text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

from genserve.errors import InvalidRequest
from genserve.prompt import Chat, Message, Prompt, Tool
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import SMOLLM2, ToolFormat, format_of_template
from genserve.text.tool_grammar import ToolGrammar


class ToolCalling:
    """The tools in the requests to one text model. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, *, tool_format: ToolFormat | None) -> None:
        """Calls are in this format; None: in the one that the model's chat template shows."""
        template = tokenizer.tool_template
        self._knows_tools = template is not None and template.tools_variable is not None
        source = "" if template is None else template.source
        self._knows_calls = "tool_calls" in source
        if tool_format is None:
            knows_either = self._knows_tools or self._knows_calls
            tool_format = format_of_template(source) if knows_either else SMOLLM2
        self._format = tool_format
        parts = tokenizer.special_names.split(tool_format.marks)
        self._special_ids = {part for part in parts if isinstance(part, int)}

    def rendered(self, chat: Chat) -> Chat:
        """Return the chat as the chat template reads it."""
        if not self._knows_tools:
            chat = tools_as_text(chat, self._format)
        if not (self._knows_tools or self._knows_calls):
            chat = calls_as_text(chat, self._format)
        return chat

    def shown_ids(self, prompt: Prompt) -> Collection[int]:
        """Return the special tokens that the parser of an answer must see."""
        return self._special_ids if isinstance(prompt, Chat) and prompt.callable_tools else ()

    def parser(self, prompt: Prompt) -> ToolCallParser | None:
        """Return a parser of the calls in one answer; None: there are none."""
        if not isinstance(prompt, Chat) or not prompt.callable_tools:
            return None
        return ToolCallParser(self._format, names={tool.name for tool in prompt.callable_tools})

    def grammar(self, prompt: Prompt, params: SamplingParams, *, may_reason: bool) -> ToolGrammar | None:
        """Return the grammar of an answer; None: the request has no tools.

        Args:
            prompt: of the request.
            params: of the request.
            may_reason: whether reasoning may precede the answer.

        Raises:
            InvalidRequest: a parameter cannot be combined with tools, or a tool's parameters are no object.
        """
        if not isinstance(prompt, Chat) or not prompt.tools:
            return None
        callable_tools = prompt.callable_tools
        if not callable_tools and params.structured_outputs is not None:
            return None
        for name in ("use_beam_search", "ignore_eos", "output_parser"):
            if getattr(params, name):
                raise InvalidRequest(f"{name} cannot be combined with tools", field=name)
        tools = {index: tool for index, tool in enumerate(prompt.tools) if tool in callable_tools}
        for index, tool in tools.items():
            if tool.parameters.get("type", "object") != "object":
                place = f"tools[{index}].function.parameters"
                raise InvalidRequest(f"{place} must be the schema of an object", field=place)
        return ToolGrammar(
            tool_format=self._format,
            tools=tools,
            must_call=prompt.tool_choice == "required",
            parallel=prompt.parallel_tool_calls,
            after_reasoning=may_reason,
        )


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
