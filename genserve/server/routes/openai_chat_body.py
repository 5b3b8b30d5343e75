"""OpenAI chat body: the fields of `POST /v1/chat/completions`, and the chat that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator

from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat, only_tool, read_messages, read_tools
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from genserve.server.decoding_fields import parameter
from genserve.server.request_body import Items, TolerantBody, text_parts
from genserve.server.routes.openai_protocol import ChatTemplateKwargs, OpenAIBody, ParallelToolCalls

_UNSUPPORTED_IN_MESSAGES = {
    "audio": "send its text as content",
    "function_call": "use tool_calls",
}


class TextPart(TolerantBody):
    """A part of a message's content."""

    type: Literal["text"] = Field(description="The kind of the part.")
    text: str = Field(description="Its text.")


class CalledFunction(TolerantBody):
    """The function of a tool call."""

    name: str = Field(description="Its name.")
    arguments: str = Field(description="The JSON text of its arguments.")


class ChatToolCall(TolerantBody):
    """A call in an earlier message of the assistant."""

    id: str = Field(description="The id that the answer gave to the call.")
    type: Literal["function"] = Field(default="function", description="The kind of the tool.")
    function: CalledFunction = Field(description="The called function.")


class ChatMessage(TolerantBody):
    """One message. Fields that answers of other servers have are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Whose message it is; `developer` is OpenAI's newer word for `system`."
    )
    content: Annotated[
        Items[TextPart] | None,
        BeforeValidator(text_parts, json_schema_input_type=str | list[TextPart] | None),
    ] = Field(default=None, description="Its text, whole or in parts; null if the message only calls tools.")
    name: str | None = Field(default=None, description="The name of the tool, or of the participant.")
    reasoning_content: str | None = Field(
        default=None, description="The reasoning before an answer of the assistant, for the template to show."
    )
    tool_calls: Items[ChatToolCall] | None = Field(
        default=None, description="The tool calls of an answer of the assistant."
    )
    tool_call_id: str | None = Field(
        default=None, description="Of a message of the role `tool`: the call that it answers."
    )

    def as_dict(self) -> dict[str, Any]:
        """Return the message as `read_messages` reads it."""
        calls = [call.model_dump() for call in self.tool_calls or ()]
        is_null = self.content is None and "content" in self.model_fields_set
        has_content = self.content is not None or (is_null and self.role == "assistant")
        content = "".join(part.text for part in self.content or ()) if has_content or calls else None
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
        }


class ToolFunction(TolerantBody):
    """What a tool is called, does and takes."""

    name: str = Field(description="Its name: letters, digits, `_`, `-` and `.`.")
    description: str | None = Field(default=None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of its arguments; none: it takes no arguments."
    )
    strict: bool | None = Field(
        default=None, description="Without effect: arguments are held to the schema in any case."
    )


class ChatTool(TolerantBody):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="The kind of the tool.")
    function: ToolFunction = Field(description="The function.")


class NamedFunction(TolerantBody):
    """The name of a function."""

    name: str = Field(description="Its name.")


class NamedTool(TolerantBody):
    """The one tool to call."""

    type: Literal["function"] = Field(default="function", description="The kind of the tool.")
    function: NamedFunction = Field(description="The function to call.")


class AllowedTools(TolerantBody):
    """Some of the tools, which may or must be called."""

    mode: Literal["auto", "required"] = Field(description="Whether they may or must be called.")
    tools: Items[NamedTool] = Field(description="The tools.")


class AllowedToolsChoice(TolerantBody):
    """The choice among some of the tools."""

    type: Literal["allowed_tools"] = Field(description="The kind of the choice.")
    allowed_tools: AllowedTools = Field(description="Some of the tools.")


def _one_choice(choice: Any, validate: Callable[[Any], Any]) -> Any:
    """Report one error for a bad choice, not one for each of the types."""
    try:
        return validate(choice)
    except ValidationError:
        raise ValueError("must be none, auto, required, or an object that names functions") from None


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None, WrapValidator(_one_choice)
]


class ChatBody(OpenAIBody):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "chat_template": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "chat_template": "templates are programs, which are not accepted from clients: "
        "put chat_template.jinja into the model's tokenizer stage",
    }
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                    "max_tokens": 32,
                    "temperature": 0,
                    "stream": True,
                }
            ]
        }
    )

    messages: Items[ChatMessage] = Field(
        min_length=1, max_length=MAX_CHAT_MESSAGES, description="The chat so far, the oldest message first."
    )
    tools: Items[ChatTool] | None = Field(
        default=None, max_length=MAX_TOOLS, description="The functions that the model may call."
    )
    tool_choice: ToolChoice = Field(
        default=None,
        description="Whether the answer may or must call tools: `none`, `auto`, `required`, or an object "
        "that names one function or the allowed ones.",
        json_schema_extra={"default": "auto"},
    )
    parallel_tool_calls: ParallelToolCalls = None
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Begin the assistant's turn; the default is to do so unless `continue_final_message`.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Leave the last message open, for the model to continue.",
        json_schema_extra={"default": False},
    )
    chat_template_kwargs: ChatTemplateKwargs = None
    max_completion_tokens: int | None = parameter(
        "max_tokens", description="OpenAI's newer name of `max_tokens`."
    )
    logprobs: bool | None = parameter("logprobs")
    top_logprobs: int | None = parameter("top_logprobs", ge=0, le=MAX_TOP_LOGPROBS)
    separate_reasoning: bool | None = Field(    # SGLang's
        default=None,
        description="Return reasoning as `reasoning_content`; false leaves it in the content.",
        json_schema_extra={"default": True},
    )

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        return super().names() | {
            "prompt": "messages",
            "max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
        }

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        newer = self.max_completion_tokens
        return self.sampling(
            max_tokens=self.max_tokens if newer is None else newer,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )

    def prompts(self) -> list[Chat]:
        """See `GenerationBody`; there is one prompt."""
        for index, message in enumerate(self.messages):
            message.reject(_UNSUPPORTED_IN_MESSAGES, place=f"messages[{index}].")
        chat = Chat(
            messages=read_messages([message.as_dict() for message in self.messages]),
            tools=read_tools([tool.model_dump() for tool in self.tools or ()]),
            **self._tool_choice(),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
        )
        return [chat]

    def _tool_choice(self) -> dict[str, Any]:
        """Return the fields of `Chat` for the choice among the tools."""
        several = self.parallel_tool_calls is not False
        match self.tool_choice:
            case None:
                return {"parallel_tool_calls": several}
            case NamedTool(function=function):
                return only_tool(function.name)
            case AllowedToolsChoice(allowed_tools=allowed):
                names = tuple(tool.function.name for tool in allowed.tools)
                return {"tool_choice": allowed.mode, "allowed_tools": names, "parallel_tool_calls": several}
            case mode:
                return {"tool_choice": mode, "parallel_tool_calls": several}
