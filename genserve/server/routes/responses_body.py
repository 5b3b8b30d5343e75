"""Responses body: the fields of `POST /v1/responses`, and the conversation that a request continues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from genserve.errors import require
from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat, Tool, inside, only_tool
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from genserve.server.connection_errors import BodyTooLarge
from genserve.server.decoding_fields import COMMON, parameter
from genserve.server.generation_handler import SubmittedRequest
from genserve.server.request_body import Items, TolerantBody
from genserve.server.response_store import PreviousResponseNotFound, ResponseNotFound, ResponseStore
from genserve.server.routes.openai_protocol import ChatTemplateKwargs, OpenAIFields, ParallelToolCalls
from genserve.server.routes.response_items import InputItem, Item, is_unfinished, messages_of, read_items

_WITHOUT_EFFECT = (
    "max_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "user",
)  # fmt: skip
_INCLUDED_LOGPROBS = "message.output_text.logprobs"
# Fields of OpenAI's for features that this server does not have.
_NOTHING: Mapping[str, None] = dict.fromkeys(
    (
        "access_programs",
        "conversation",
        "image",
        "input_transformations",
        "moderation",
        "prompt",
        "prompt_cache_diagnostics",
        "prompt_cache_options",
        "prompt_cache_retention",
        "tool_usage",
    )
)


def _items(items: Any) -> Any:
    return [{"type": "message", "role": "user", "content": items}] if isinstance(items, str) else items


def _function(kind: Any) -> Any:
    if kind != "function":
        raise ValueError(f"{str(kind)[:64]!r} is not supported; tools are of the type 'function'")
    return kind


class ResponseTool(TolerantBody):
    """A function that the model may call."""

    type: Annotated[Literal["function"], BeforeValidator(_function)] = Field(
        description="The kind of the tool."
    )
    name: str = Field(description="Its name: letters, digits, `_`, `-` and `.`.")
    description: str | None = Field(default=None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of its arguments; none: it takes no arguments."
    )
    strict: bool | None = Field(
        default=None, description="Without effect: arguments are held to the schema in any case."
    )

    def read(self, place: str) -> Tool:
        """Return the tool; raises InvalidRequest."""
        with inside(place):
            return Tool(name=self.name, description=self.description or "", parameters=self.parameters or {})

    def as_dict(self) -> dict[str, Any]:
        """Return the tool as the response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict is not False,
        }


def _choice(choice: Any) -> Any:
    """Validate a choice among the tools."""
    match choice:
        case None | "none" | "auto" | "required" | {"type": "function", "name": str()}:
            return choice
        case {"type": "allowed_tools", "mode": "auto" | "required", "tools": [*tools]}:
            if all(isinstance(tool, Mapping) and isinstance(tool.get("name"), str) for tool in tools):
                return choice
            raise ValueError("has an entry that does not name a function")
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise ValueError(f"the type {kind[:64]!r} is not supported; tools are of the type 'function'")
    raise ValueError("must be none, auto, required, or an object that names a function or allowed_tools")


_ToolChoice = Annotated[
    Any,
    BeforeValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}),
]


class TextOptions(TolerantBody):
    """The form of the text."""

    format: dict[str, Any] | None = Field(
        default=None,
        description='`{"type": "json_schema", "name": ..., "schema": ...}`, `{"type": "json_object"}` or '
        '`{"type": "text"}`. `structured_outputs` has other forms.',
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Without effect.")

    def form(self) -> dict[str, Any] | None:
        """Return the format as a chat's `response_format` has it; raises InvalidRequest."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        require(isinstance(self.format.get("name"), str), "text.format.name", "must be text")
        require("schema" in self.format, "text.format.schema", "is missing")
        return {"type": "json_object", "schema": self.format["schema"]}


class ReasoningOptions(TolerantBody):
    """How the model reasons before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Without effect; `thinking_token_budget` limits reasoning."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Without effect: reasoning is returned whole."
    )


_Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesBody(OpenAIFields):
    """Body of `POST /v1/responses`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "response_format": (),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "background": "stream the response instead",
        "conversation": "use previous_response_id",
        "max_completion_tokens": "use max_output_tokens",
        "max_tokens": "use max_output_tokens",
        "messages": "use input",
        "prompt": "send the text of the prompt as instructions",
        "response_format": "use text.format",
    }

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input": "What is the capital of France?",
                    "max_output_tokens": 32,
                    "temperature": 0,
                    "stream": True,
                }
            ]
        }
    )

    input: Annotated[
        Items[InputItem] | None, BeforeValidator(_items, json_schema_input_type=str | list[InputItem] | None)
    ] = Field(
        default=None,
        max_length=MAX_CHAT_MESSAGES,
        description="What the model answers: the text of the user, or the items of a conversation.",
        json_schema_extra=COMMON,
    )
    instructions: str | None = Field(
        default=None, description="A system message for this response only.", json_schema_extra=COMMON
    )
    previous_response_id: str | None = Field(
        default=None, description="The stored response after which the conversation continues."
    )
    store: bool | None = Field(
        default=None,
        description="Whether the server keeps the response, for `previous_response_id` and `GET`.",
        json_schema_extra={"default": True},
    )
    max_output_tokens: int | None = parameter("max_tokens")
    tools: Items[ResponseTool] | None = Field(
        default=None, max_length=MAX_TOOLS, description="The functions that the model may call."
    )
    tool_choice: _ToolChoice = Field(
        default=None,
        description="Whether the answer may or must call tools: `none`, `auto`, `required`, or an object "
        "that names one function or the allowed ones.",
        json_schema_extra={"default": "auto"},
    )
    parallel_tool_calls: ParallelToolCalls = None
    max_tool_calls: int | None = Field(
        default=None, ge=1, description="Without effect: it counts calls of tools that the server runs."
    )
    text: TextOptions | None = Field(default=None, description="The form of the text.")
    reasoning: ReasoningOptions | None = Field(default=None, description="How the model reasons.")
    include: Items[_Include] | None = Field(
        default=None, description=f"Additional output; the server has `{_INCLUDED_LOGPROBS}`."
    )
    top_logprobs: int | None = parameter("top_logprobs", ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None,
        description="`auto`: of an input that is too long, the last tokens are used; otherwise it is "
        "rejected.",
        json_schema_extra={"default": "disabled"},
    )
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16, description="Texts that the response repeats."
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = Field(
        default=None, description="Without effect."
    )
    user: str | None = Field(default=None, description="Without effect.")
    safety_identifier: str | None = Field(default=None, description="Without effect.")
    prompt_cache_key: str | None = Field(
        default=None, description="Without effect: prefixes are cached in any case."
    )
    chat_template_kwargs: ChatTemplateKwargs = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the output has log-probabilities."""
        return bool(self.top_logprobs) or _INCLUDED_LOGPROBS in (self.include or ())

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        form = {"structured_outputs": "text.format"} if self.structured_outputs is None else {}
        return form | {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        limit = -1 if self.truncation == "auto" else None
        return self.sampling(
            max_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs or 0,
            structured_outputs=self.format_or(self.text and self.text.form(), field="text.format"),
            truncate_prompt_tokens=self.truncate_prompt_tokens or limit,
        )

    def ignored(self, params: SamplingParams) -> list[str]:
        """See `GenerationBody`."""
        given = [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]
        verbosity = ["text.verbosity"] if self.text is not None and self.text.verbosity else []
        return [*super().ignored(params), *given, *verbosity]

    def tool_fields(self) -> dict[str, Any]:
        """Return the fields of `Chat` for the tools and the choice among them; raises InvalidRequest."""
        fields: dict[str, Any] = {
            "tools": tuple(tool.read(f"tools[{i}]") for i, tool in enumerate(self.tools or ())),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }
        match self.tool_choice:
            case {"type": "function", "name": name}:
                return fields | only_tool(name)
            case {"type": "allowed_tools", "mode": mode, "tools": tools}:
                return fields | {"tool_choice": mode, "allowed_tools": tuple(tool["name"] for tool in tools)}
            case mode:
                return fields | {"tool_choice": mode or "auto"}


@dataclass(slots=True, kw_only=True)
class ResponseRequest:
    """One request, as `GenerationBody`: the body, and the conversation that it continues."""

    body: ResponsesBody
    store: ResponseStore
    max_bytes: int              # of the conversation
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_s: int = field(default_factory=lambda: int(time.time()))
    inputs: list[Item] = field(default_factory=list)    # set by `prompts`
    num_earlier: int = 0                                # how many of them are of earlier responses
    num_choices: int = 1

    @property
    def model_name(self) -> str | None:
        """See `GenerationBody`."""
        return self.body.model_name

    @property
    def stream(self) -> bool | None:
        """See `GenerationBody`."""
        return self.body.stream

    def check(self) -> None:
        """See `GenerationBody`."""
        self.body.check()

    def prompts(self) -> list[Chat]:
        """See `GenerationBody`; there is one prompt."""
        body = self.body
        earlier = self._earlier()
        self.inputs = [*earlier, *read_items(body.input or (), earlier=earlier, find=self.store.item)]
        self.num_earlier = len(earlier)
        chat = Chat(
            messages=messages_of(self.inputs, instructions=body.instructions),
            **body.tool_fields(),
            continue_final_message=is_unfinished(self.inputs),
            template_kwargs=body.chat_template_kwargs or {},
        )
        return [chat]

    def _earlier(self) -> list[Item]:
        """Return the conversation that the request continues."""
        previous_id, field = self.body.previous_response_id, "previous_response_id"
        if previous_id is None:
            return []
        try:
            previous = self.store.get(previous_id)
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(error.message, field=field, remedy=error.remedy) from None
        if previous.num_bytes > self.max_bytes:
            message = f"the conversation before it is larger than {self.max_bytes} bytes"
            raise BodyTooLarge(f"{field}: {message}", field=field, remedy="begin a new conversation")
        return previous.items()

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        return self.body.params()

    def names(self) -> Mapping[str, str]:
        """See `GenerationBody`."""
        return self.body.names()

    def ignored(self, params: SamplingParams) -> list[str]:
        """See `GenerationBody`."""
        return self.body.ignored(params)

    def response(self, submitted: SubmittedRequest) -> dict[str, Any]:
        """Return the response object at its beginning."""
        body, params = self.body, submitted.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": params.frequency_penalty,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": submitted.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None} | _given(body.reasoning),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.stores,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | _given(body.text),
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.as_dict() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **_NOTHING,
        }

    @property
    def stores(self) -> bool:
        """Whether the response is stored."""
        return self.body.store is not False and self.store.max_bytes > 0

    def save(self, response: Mapping[str, Any]) -> None:
        """Store the response at its end, if the request asks for it."""
        if self.stores:
            self.store.add(response, inputs=self.inputs, num_earlier=self.num_earlier)


def _given(options: BaseModel | None) -> dict[str, Any]:
    return options.model_dump(exclude_none=True) if options else {}
