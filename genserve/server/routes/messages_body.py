"""Messages body: the fields of Anthropic's `POST /v1/messages`, and the chat that they describe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from genserve.errors import InvalidRequest, require
from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat, Message, Role, Tool, ToolCall, only_tool
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import SamplingParams, sampling_params
from genserve.server.decoding_fields import COMMON, DecodingFields, Texts, parameter
from genserve.server.request_body import Items, TolerantBody, text_parts

# The first block of Claude Code's system prompt. It changes with each request, and would spoil the prefix
# cache for all that follows.
_BILLING_HEADER = "x-anthropic-billing-header:"


class TextBlock(TolerantBody):
    """Text."""

    type: Literal["text"] = Field(description="The kind of the block.")
    text: str = Field(description="Its text.")


class ThinkingBlock(TolerantBody):
    """The reasoning in an earlier answer."""

    type: Literal["thinking"] = Field(description="The kind of the block.")
    thinking: str = Field(description="The reasoning; the chat template decides what the model sees of it.")


class RedactedThinkingBlock(TolerantBody):
    """Reasoning that only its author can read; it is left out."""

    type: Literal["redacted_thinking"] = Field(description="The kind of the block.")


class ToolUseBlock(TolerantBody):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"] = Field(description="The kind of the block.")
    id: str = Field(description="The id that the answer gave to the call.")
    name: str = Field(description="The name of the tool.")
    input: dict[str, Any] = Field(description="The arguments.")


def _known(block: Any, *, kinds: frozenset[str]) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        known = ", ".join(sorted(kinds))
        raise ValueError(f"blocks of the type {kind[:64]!r} are not supported here; known are {known}")
    return block


def _known_text(block: Any) -> Any:
    return _known(block, kinds=frozenset({"text"}))


def _known_block(block: Any) -> Any:
    return _known(block, kinds=_BLOCKS)


_TextBlocks: TypeAlias = Annotated[
    Items[Annotated[TextBlock, BeforeValidator(_known_text)]],
    BeforeValidator(text_parts, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(TolerantBody):
    """The result of a tool call."""

    type: Literal["tool_result"] = Field(description="The kind of the block.")
    tool_use_id: str = Field(description="The id of the call.")
    content: _TextBlocks | None = Field(
        default=None, description="What the tool has returned: text, or blocks of it."
    )
    is_error: bool | None = Field(default=None, description="Whether the tool has failed.")


_Block: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


class MessageFields(TolerantBody):
    """One turn."""

    role: Literal["user", "assistant", "system"] = Field(description="Whose turn it is.")
    content: Annotated[
        Items[Annotated[_Block, BeforeValidator(_known_block)]],
        BeforeValidator(text_parts, json_schema_input_type=str | list[_Block]),
    ] = Field(description="Text, or blocks of text, reasoning, tool calls and their results.")


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("must be the schema of an object")
    return schema


class ToolFields(TolerantBody):
    """A tool that the client runs."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$", description="Its name.")
    description: str | None = Field(default=None, description="What it does.")
    input_schema: Annotated[dict[str, Any], AfterValidator(_of_object)] = Field(
        description="The JSON schema of its arguments."
    )


def _client_tool(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"tools of the type {kind[:64]!r} are not supported: describe a tool of your own")
    return tool


class ToolChoiceFields(TolerantBody):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="`auto`: the model decides. `any`: it calls a tool. `tool`: it calls the one named. "
        "`none`: it calls none."
    )
    name: str | None = Field(default=None, description="Of `tool`: the name of the tool.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="At most one call per answer.")


class ThinkingFields(TolerantBody):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="`disabled` turns reasoning off, if the model's chat template can do that."
    )
    budget_tokens: int | None = parameter("thinking_token_budget", ge=0, le=2**31 - 1)
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted`: the text of the reasoning is left out of the answer."
    )


class FormatFields(TolerantBody):
    """The form of the answer."""

    type: Literal["json_schema"] = Field(description="The kind of the form.")
    # An alias, as pydantic's models have a method of this name.
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema of the answer.")


class OutputFields(TolerantBody):
    """Options of the answer."""

    format: FormatFields | None = Field(default=None, description="The form of the answer.")


class PromptFields(TolerantBody):
    """The fields that the prompt consists of; `POST /v1/messages/count_tokens` has no others."""

    model: str | None = Field(
        default=None,
        description="The name of the model; may be left out if there is only one.",
        json_schema_extra=COMMON,
    )
    messages: Items[MessageFields] = Field(
        min_length=1,
        max_length=MAX_CHAT_MESSAGES,
        description="The chat so far, the oldest turn first. A last turn of the assistant is continued.",
    )
    system: _TextBlocks | None = Field(default=None, description="Instructions to the model.")
    tools: Items[Annotated[ToolFields, BeforeValidator(_client_tool)]] | None = Field(
        default=None, max_length=MAX_TOOLS, description="The tools that the model may call."
    )
    tool_choice: ToolChoiceFields | None = Field(
        default=None, description="Whether tools are called; by default the model decides."
    )
    thinking: ThinkingFields | None = Field(
        default=None, description="Whether the model reasons first; by default as its template has it."
    )
    output_config: OutputFields | None = Field(default=None, description="Options of the answer.")
    output_format: FormatFields | None = Field(
        default=None, description="The older name of `output_config.format`."
    )

    @property
    def form(self) -> FormatFields | None:
        """The form of the answer; None: any text."""
        newer = self.output_config.format if self.output_config else None
        return newer or self.output_format

    def chat(self, variables: Iterable[str]) -> Chat:
        """Return the chat.

        Args:
            variables: of the model's chat template.

        Raises:
            InvalidRequest: the last turn calls a tool, or what `Chat` raises.
        """
        system = [_turn("system", self.system)] if self.system else []
        turns = (turn for index, message in enumerate(self.messages) for turn in _turns(message, index))
        messages = _named_results([*system, *_joined(turns)])
        begun = messages[-1] if messages and messages[-1].role == "assistant" else None
        if begun is not None:
            require(not begun.tool_calls, "messages", "must end with the results of the tool calls")
            if not begun.content:
                messages.pop()
        thinks = self._thinks()
        known = thinks is not None and "enable_thinking" in variables
        return Chat(
            messages=tuple(messages),
            tools=tuple(
                Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
                for tool in self.tools or ()
            ),
            continue_final_message=begun is not None and begun.content != "",
            template_kwargs={"enable_thinking": thinks} if known else {},
            **self._choice(),
        )

    def _thinks(self) -> bool | None:
        """Whether the model is to reason; None: as its template has it."""
        if self.thinking is None:
            return None
        # The form of a structured output leaves no place for reasoning.
        return self.thinking.type != "disabled" and self.form is None

    def _choice(self) -> dict[str, Any]:
        """Return the fields of `Chat` for the choice among tools."""
        choice = self.tool_choice
        if choice is None:
            return {}
        parallel = not choice.disable_parallel_tool_use
        match choice.type:
            case "tool":
                if choice.name is None:
                    raise InvalidRequest("tool_choice.name is missing", field="tool_choice.name")
                return only_tool(choice.name)
            case "any":
                return {"tool_choice": "required", "parallel_tool_calls": parallel}
            case mode:
                return {"tool_choice": mode, "parallel_tool_calls": parallel}


def _turns(message: MessageFields, index: int) -> Iterator[Message]:
    """Yield the messages of one of the turns: results of tools are messages of their own."""
    texts: list[TextBlock] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock() if message.role == "assistant":
                reasoning.append(block.thinking)
            case ToolUseBlock() if message.role == "assistant":
                written = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(id=block.id, name=block.name, arguments=written))
            case RedactedThinkingBlock() if message.role == "assistant":
                pass
            case ToolResultBlock() if message.role == "user":
                if texts:
                    yield _turn("user", texts)
                    texts = []
                result = _turn("tool", block.content or ())
                prefix = "Error: " if block.is_error else ""
                yield replace(result, content=prefix + result.content, tool_call_id=block.tool_use_id)
            case _:
                problem = f"a turn of the {message.role} cannot have blocks of the type {block.type!r}"
                field = f"messages[{index}]"
                raise InvalidRequest(f"{field}: {problem}", field=field)
    if message.role == "assistant":
        text = "".join(block.text for block in texts)   # parts of one answer
        thinking = "".join(reasoning)
        yield Message(
            role="assistant", content=text, reasoning_content=thinking, tool_calls=tuple(calls)
        )
    elif texts:
        yield _turn(message.role, texts)


def _turn(role: Role, blocks: Iterable[TextBlock]) -> Message:
    texts = (block.text for block in blocks if not block.text.startswith(_BILLING_HEADER))
    return Message(role=role, content="\n".join(texts))


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages with successive ones of the user, or of the assistant, joined to one turn."""
    for role, group in groupby(messages, key=lambda message: message.role):
        turns = [*group]
        if role not in ("user", "assistant") or len(turns) == 1:
            yield from turns
            continue
        between = "\n" if role == "user" else ""
        yield Message(
            role=role,
            content=between.join(turn.content for turn in turns),
            reasoning_content="".join(turn.reasoning_content for turn in turns),
            tool_calls=tuple(call for turn in turns for call in turn.tool_calls),
        )


def _named_results(messages: list[Message]) -> list[Message]:
    """Return the messages with the names of the tools in their results, which some templates show."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [
        replace(message, name=names.get(message.tool_call_id, "")) if message.role == "tool" else message
        for message in messages
    ]


class MessagesBody(PromptFields, DecodingFields):
    """Body of `POST /v1/messages`; extras beyond Anthropic's have vLLM's names."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                    "max_tokens": 32,
                    "stream": True,
                }
            ]
        },
    )

    max_tokens: int = Field(
        ge=1, description="This number of tokens ends the answer.", json_schema_extra=COMMON
    )
    stop_sequences: Texts = parameter("stop")
    stream: bool | None = Field(
        default=None,
        description="Send the answer as server-sent events while it is generated.",
        json_schema_extra=COMMON | {"default": False},
    )
    temperature: float | None = parameter("temperature", default=1.0)
    top_k: int | None = parameter("top_k", bounds=Range(-1, 2**31 - 1))
    seed: int | None = parameter("seed")

    def params(self, *, max_tokens: int | None, can_think: bool) -> SamplingParams:
        """Return the sampling parameters.

        Args:
            max_tokens: of the answer; None: up to the end of the context.
            can_think: whether the model marks its reasoning.

        Raises:
            InvalidRequest: a value is out of range, or contradicts another.
        """
        form = None if self.form is None else {"json": self.form.schema_}
        own: dict[str, Any] = {
            "max_tokens": max_tokens,
            "stop": self.stop_sequences,
            "structured_outputs": self.form_or(form, field="output_config.format"),
        }
        if can_think and self._thinks() and self.thinking and self.thinking.budget_tokens is not None:
            own["thinking_token_budget"] = self.thinking.budget_tokens
        defaults = {} if self.use_beam_search else {"temperature": 1.0}
        return sampling_params(self.given() | own, defaults=defaults)

    def unused(self, *, can_think: bool) -> list[str]:
        """Return the fields without effect; see `params`."""
        names = [*(self.model_extra or {})]
        options = self.output_config.model_extra if self.output_config else None
        names += (f"output_config.{name}" for name in options or {})
        if self.thinking is not None and self._thinks() and not can_think:
            names.append("thinking")
        return names

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        budget = self.thinking is not None and self.thinking.budget_tokens is not None
        return {
            "prompt": "messages",
            "stop": "stop_sequences",
            **({"thinking_token_budget": "thinking.budget_tokens"} if budget else {}),
            **({} if self.form is None else {"structured_outputs": "output_config.format.schema"}),
        }
