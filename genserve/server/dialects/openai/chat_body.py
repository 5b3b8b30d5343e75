"""OpenAI chat body: the fields of `POST /v1/chat/completions`, and the chat that they describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from genserve.errors import require
from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat, Message, read_messages
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from genserve.server.dialects.content_parts import result_text, unreadable_part
from genserve.server.dialects.decoding_fields import parameter
from genserve.server.dialects.generation_handler import SubmittedRequest
from genserve.server.dialects.openai.chat_tools import ChatToolOffer, ChatTools, ToolChoice, choice_fields
from genserve.server.dialects.openai.custom_tools import custom_arguments
from genserve.server.dialects.openai.protocol import (
    ChatTemplateKwargs,
    OpenAIBody,
    ParallelToolCalls,
)
from genserve.server.dialects.reasoning_fields import ReasoningFields, joined_reasoning
from genserve.server.http.request_body import Items, TolerantBody, text_parts

_UNSUPPORTED_IN_MESSAGES = {
    "audio": "send its text as content",
    "function_call": "use tool_calls",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})     # those of Responses, as vLLM reads them
# Parts of answers of other servers that are reasoning, which are left out.
_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})


class ContentPart(TolerantBody):
    """A part of a message's content."""

    type: str = Field(
        description="`text`; of the assistant also `refusal`. Other parts, such as images, are errors in "
        "messages of the user, and become placeholders in those of tools."
    )
    text: str | None = Field(default=None, description="Its text.")
    refusal: str | None = Field(default=None, description="The text of a part of the type `refusal`.")


class CalledFunction(TolerantBody):
    """The function of a tool call."""

    name: str = Field(description="Its name.")
    arguments: str = Field(description="The JSON text of its arguments, which may be cut.")


class CalledCustomTool(TolerantBody):
    """The custom tool of a tool call."""

    name: str = Field(description="Its name.")
    input: str = Field(description="Its input.")


class ChatToolCall(TolerantBody):
    """A call in an earlier message of the assistant."""

    id: str = Field(description="The id that the answer gave to the call.")
    type: Literal["function", "custom"] = Field(default="function", description="The kind of the tool.")
    function: CalledFunction | None = Field(default=None, description="The called function.")
    custom: CalledCustomTool | None = Field(default=None, description="The called custom tool.")

    def as_dict(self, place: str) -> dict[str, Any]:
        """Return the call of a function, as `read_messages` reads it."""
        if self.type == "custom" and self.custom is not None:
            arguments = custom_arguments(self.custom.input)
            return {"id": self.id, "function": {"name": self.custom.name, "arguments": arguments}}
        require(self.type == "function" and self.function is not None, f"{place}.{self.type}", "is missing")
        return self.model_dump(include={"id", "function"})


class ChatMessage(TolerantBody):
    """One message. Fields that answers of other servers have are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Whose message it is; `developer` is OpenAI's newer word for `system`."
    )
    content: Annotated[
        Items[ContentPart] | None,
        BeforeValidator(text_parts, json_schema_input_type=str | list[ContentPart] | None),
    ] = Field(default=None, description="Its text, whole or in parts; null if the message only calls tools.")
    name: str | None = Field(default=None, description="The name of the tool, or of the participant.")
    reasoning_content: str | None = Field(
        default=None, description="The reasoning before an answer of the assistant, for the template to show."
    )
    reasoning: str | None = Field(default=None, description="vLLM's newer name of `reasoning_content`.")
    refusal: str | None = Field(
        default=None, description="The text of a refusal of the assistant, in place of `content`."
    )
    tool_calls: Items[ChatToolCall] | None = Field(
        default=None, description="The tool calls of an answer of the assistant."
    )
    tool_call_id: str | None = Field(
        default=None, description="The call that a message of the role `tool` answers."
    )

    def as_dict(self, place: str) -> dict[str, Any]:
        """Return the message as `read_messages` reads it; raises InvalidRequest for an unreadable part."""
        calls = [
            call.as_dict(f"{place}.tool_calls[{index}]") for index, call in enumerate(self.tool_calls or ())
        ]
        is_null = self.content is None and "content" in self.model_fields_set
        has_content = self.content is not None or (is_null and self.role == "assistant")
        content = self._text(f"{place}.content") if has_content or calls else None
        reasoning = self.reasoning_content
        if self.role == "assistant":
            content = content or self.refusal or content
            reasoning = reasoning or self.reasoning
        return {
            "role": self.role,
            "content": content,
            "name": self.name,
            "reasoning_content": reasoning,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
        }

    def left_out(self) -> Iterator[ContentPart]:
        """Yield the parts of the content that the model does not see."""
        if self.role in ("tool", "assistant"):
            yield from (part for part in self.content or () if part.type in _REASONING_PARTS)

    def _text(self, place: str) -> str:
        parts: list[tuple[str, str | None]] = []
        for index, part in enumerate(self.content or ()):
            field = f"{place}[{index}]"
            if part.type in _TEXT_PARTS or (part.type == "refusal" and self.role == "assistant"):
                name = "text" if part.type in _TEXT_PARTS else "refusal"
                text = getattr(part, name)
                require(text is not None, f"{field}.{name}", "is missing")
                parts.append((part.type, text))
            elif self.role not in ("tool", "assistant"):
                raise unreadable_part(part.type, field=field)
            elif part.type not in _REASONING_PARTS:
                parts.append((part.type, None))
        return result_text(parts)


def chat_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Return the messages of a chat; raises InvalidRequest."""
    return read_messages(
        [message.as_dict(f"messages[{index}]") for index, message in enumerate(messages)]
    )


class ChatBody(ReasoningFields, OpenAIBody):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "chat_template": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "function_call": "use tool_choice",
        "functions": "use tools",
        "chat_template": "templates are programs, which are not accepted from clients: "
        "put chat_template.jinja into the model's tokenizer stage",
    }
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
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
    tools: ChatTools | None = Field(
        default=None, max_length=MAX_TOOLS, description="The tools that the model may call."
    )
    tool_choice: ToolChoice = Field(
        default=None,
        description="Whether the answer may or must call tools: `none`, `auto`, `required`, or an object "
        "that names one tool or the allowed ones.",
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

    @cached_property
    def offer(self) -> ChatToolOffer:
        """The tools; raises InvalidRequest."""
        return ChatToolOffer(self.tools or ())

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        return super().names() | {
            **{f"tools[{index}]": place for index, place in enumerate(self.offer.places)},
            "prompt": "messages",
            "max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
        }

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        """See `GenerationBody`."""
        unused = submitted.unused_reasoning(self.asked_reasoning())
        kinds = (part.type for message in self.messages for part in message.left_out())
        parts = [f"messages={kind}" for kind in dict.fromkeys(kinds)]
        return [*super().ignored(submitted), *self.offer.left_out, *parts, *unused]

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
        if self.tool_choice != "none":
            self.offer.require_some()
        chat = Chat(
            messages=chat_messages(self.messages),
            tools=tuple(self.offer.tools),
            **choice_fields(self.tool_choice, parallel=self.parallel_tool_calls is not False),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
            reasoning=joined_reasoning(self.asked_reasoning(), has_form=False),
        )
        return [chat]
