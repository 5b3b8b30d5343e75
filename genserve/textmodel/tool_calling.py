"""Tool calling: how one text model reads the tools of a chat, and how its answers call them.

For a chat template that knows no tools they become part of the system message, in the words in which SmolLM2
was trained to read them. Where a template knows no calls, earlier calls become text, and so do their results
if it knows no tools either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

from genserve.errors import InvalidRequest
from genserve.prompt import Chat, Message, Prompt, Tool, may_be_object
from genserve.sampling.sampling_params import SamplingParams
from genserve.structured_output.harmony_grammar import HarmonyGrammar
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import HARMONY, SMOLLM2, ToolFormat, format_of_template


class ToolCalling:
    """The tools in the requests to one text model. Safe from any thread.

    Attributes:
        tool_format: how the model writes calls.
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_format: ToolFormat | None) -> None:
        """Write calls in `tool_format`; None: in the format that the model's chat template shows."""
        template = tokenizer.tool_template
        self._knows_tools = template is not None and template.knows_tools
        source = "" if template is None else template.source
        self._knows_calls = "tool_calls" in source
        if tool_format is None:
            knows_either = self._knows_tools or self._knows_calls
            tool_format = format_of_template(source) if knows_either else SMOLLM2
        self.tool_format = tool_format
        parts = tokenizer.special_names.split(tool_format.marks)
        self._special_ids = {part for part in parts if isinstance(part, int)}

    def rendered(self, chat: Chat) -> Chat:
        """Return the chat as the chat template reads it."""
        if not self._knows_tools:
            chat = tools_as_text(chat, self.tool_format)
        if not self._knows_calls:
            chat = calls_as_text(chat, self.tool_format, with_results=not self._knows_tools)
        elif self.tool_format.separator is None:
            chat = calls_one_by_one(chat)
        if self.tool_format is HARMONY:
            chat = replace(chat, messages=tuple(map(_with_one_thought, chat.messages)))
        return chat

    def shown_ids(self, prompt: Prompt) -> Collection[int]:
        """Return the special tokens that the parser of an answer must see."""
        return self._special_ids if isinstance(prompt, Chat) and prompt.callable_tools else ()

    def new_parser(self, prompt: Prompt) -> Callable[[], ToolCallParser] | None:
        """Return a factory of parsers of the calls in one answer; None: the answer has no calls."""
        if not isinstance(prompt, Chat) or not prompt.callable_tools:
            return None
        # No grammar holds the calls in a thought, which could be several.
        one = self.tool_format if prompt.parallel_tool_calls else replace(self.tool_format, separator=None)
        return partial(ToolCallParser, one, tools={tool.name: tool for tool in prompt.callable_tools})

    def grammar(self, prompt: Prompt, params: SamplingParams, *, may_reason: bool) -> ToolGrammar | None:
        """Return the grammar of an answer; None: the request has no tools, nor a form within messages.

        Args:
            prompt: the prompt; a chat may have tools.
            params: the sampling parameters, some of which cannot be combined with tools.
            may_reason: whether reasoning may precede the answer.

        Raises:
            InvalidRequest: a parameter cannot be combined with tools, or a tool's parameters are no object.
        """
        if not isinstance(prompt, Chat) or not (prompt.tools or self._frames(params)):
            return None
        callable_tools = prompt.callable_tools
        if not callable_tools and params.structured_outputs is not None and not self._frames(params):
            return None
        for name in ("use_beam_search", "ignore_eos", "output_parser"):
            if getattr(params, name):
                raise InvalidRequest(f"{name} cannot be combined with tools", field=name)
        tools = {index: tool for index, tool in enumerate(prompt.tools) if tool in callable_tools}
        for index, tool in tools.items():
            if not may_be_object(tool.parameters):
                place = f"tools[{index}].function.parameters"
                raise InvalidRequest(f"{place} must be the schema of an object", field=place)
        kind = HarmonyGrammar if self.tool_format is HARMONY else ToolGrammar
        return kind(
            tool_format=self.tool_format,
            tools=tools,
            must_call=prompt.tool_choice == "required",
            parallel=prompt.parallel_tool_calls,
            after_reasoning=may_reason,
        )

    def _frames(self, params: SamplingParams) -> bool:
        """Whether an answer of a required form is a message with a head."""
        alone = not (params.use_beam_search or params.output_parser)
        return self.tool_format is HARMONY and params.structured_outputs is not None and alone


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
    """Return a chat without tools, which a system message describes.

    Args:
        chat: a chat with tools or without.
        tool_format: how the model writes calls.
    """
    if not chat.tools:
        return chat
    system = [*takewhile(lambda message: message.role == "system", chat.messages)]
    instructions = Message(role="system", content=_instructions(chat.template_tools, tool_format))
    messages = (*system, instructions, *chat.messages[len(system) :])
    return replace(chat, messages=messages, tools=(), allowed_tools=(), tool_choice="auto")


def calls_as_text(chat: Chat, tool_format: ToolFormat, *, with_results: bool) -> Chat:
    """Return a chat with text instead of tool calls.

    Args:
        chat: a chat with calls or without.
        tool_format: how the model writes calls.
        with_results: make the results of calls messages of the user.
    """
    messages = (_as_text(message, tool_format, with_results=with_results) for message in chat.messages)
    return replace(chat, messages=tuple(messages))


def calls_one_by_one(chat: Chat) -> Chat:
    """Return a chat in which each message has one call at most, and each call's result follows it.

    Templates of models that make one call at a time reject several, or leave out all but the first.
    """
    messages: list[Message] = []
    left = list(chat.messages)
    while left:
        message = left.pop(0)
        if len(message.tool_calls) < 2:
            messages.append(message)
            continue
        num_results = next((i for i, one in enumerate(left) if one.role != "tool"), len(left))
        results, left = left[:num_results], left[num_results:]
        for call in message.tool_calls:
            messages.append(replace(message, tool_calls=(call,)))
            message = Message(role="assistant")
            own = next((one for one in results if one.tool_call_id == call.id), None)
            if own is not None:
                results.remove(own)
                messages.append(own)
        messages += results
    return replace(chat, messages=tuple(messages))


def _with_one_thought(message: Message) -> Message:
    """Return a message whose text before a call is a part of its thought: gpt-oss's template takes one."""
    if not (message.tool_calls and message.content and message.reasoning_content):
        return message
    thought = f"{message.reasoning_content}\n\n{message.content}"
    return replace(message, content="", reasoning_content=thought)


def _instructions(tools: Sequence[Tool], tool_format: ToolFormat) -> str:
    written = json.dumps([tool.as_dict() for tool in tools], ensure_ascii=False)
    examples = _EXAMPLES if tool_format.separator is not None else _EXAMPLES[:1]
    return _INSTRUCTIONS.format(tools=written, example=tool_format.written(examples))


def _as_text(message: Message, tool_format: ToolFormat, *, with_results: bool) -> Message:
    if message.role == "tool" and with_results:
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = tool_format.written([(call.name, call.arguments) for call in message.tool_calls])
    content = f"{message.content}\n{calls}" if message.content else calls
    return replace(message, content=content, tool_calls=())
