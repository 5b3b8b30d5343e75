"""Tool calling: how one text model reads the tools of a chat, and how its answers call them."""

from __future__ import annotations

from collections.abc import Collection

from genserve.errors import InvalidRequest
from genserve.prompt import Chat, Prompt
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import SMOLLM2, ToolFormat, format_of_template
from genserve.text.tool_grammar import ToolGrammar
from genserve.text.tool_prompt import calls_as_text, tools_as_text


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
