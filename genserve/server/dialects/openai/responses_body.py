"""Responses body: the fields of `POST /v1/responses`, and the conversation that a request continues."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from genserve.errors import ResponseNotFound, require
from genserve.prompt import MAX_CHAT_MESSAGES, MAX_TOOLS, Chat, Reasoning, only_tool
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from genserve.server.dialects.decoding_fields import COMMON, parameter
from genserve.server.dialects.generation_handler import SubmittedRequest
from genserve.server.dialects.openai.protocol import (
    ChatTemplateKwargs,
    OpenAIFields,
    ParallelToolCalls,
)
from genserve.server.dialects.openai.response_items import (
    InputItem,
    InputItems,
    Item,
    called_names,
    is_unfinished,
    loaded_tools,
    messages_of,
    read_items,
    unused_kinds,
)
from genserve.server.dialects.openai.response_store import PreviousResponseNotFound, ResponseStore
from genserve.server.dialects.openai.response_tools import CLIENT_TOOLS, ResponseTools, ToolOffer
from genserve.server.dialects.reasoning_fields import ReasoningEffort
from genserve.server.dialects.tool_offers import MAX_KIND
from genserve.server.http.connection_errors import BodyTooLarge
from genserve.server.http.request_body import Items, TolerantBody

_WITHOUT_EFFECT = (
    "max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "user",
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


def _choice(choice: Any) -> Any:
    """Validate a choice among the tools."""
    match choice:
        case "any":     # Mistral's word
            return "required"
        case None | "none" | "auto" | "required" | {"type": "function" | "custom", "name": str()}:
            return choice
        case {"type": str(kind)} if kind in CLIENT_TOOLS:
            return choice
        case {"type": "allowed_tools", "mode": "auto" | "required", "tools": [*tools]}:
            if len(tools) > MAX_TOOLS:
                raise ValueError(f"names {len(tools)} tools; the limit is {MAX_TOOLS}")
            if all(isinstance(tool, Mapping) and isinstance(tool.get("type"), str) for tool in tools):
                return choice
            raise ValueError("has an entry that does not name a tool")
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise ValueError(f"the type {kind[:MAX_KIND]!r} is not supported: the server runs no tools")
    raise ValueError("must be none, auto, required, or an object that names a tool or allowed_tools")


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
    verbosity: Any = Field(default=None, description="Without effect.")

    def form(self) -> dict[str, Any] | None:
        """Return the format as a chat's `response_format` has it; raises InvalidRequest."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        require(isinstance(self.format.get("name"), str), "text.format.name", "must be text")
        require("schema" in self.format, "text.format.schema", "is missing")
        return {"type": "json_object", "schema": self.format["schema"]}


class ReasoningOptions(TolerantBody):
    """How the model reasons before it answers."""

    effort: ReasoningEffort = None
    summary: Any = Field(default=None, description="Without effect: reasoning is returned whole.")


class ResponsesBody(OpenAIFields):
    """Body of `POST /v1/responses`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
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
                    "input": "What is the capital of Japan?",
                    "max_output_tokens": 32,
                    "temperature": 0,
                    "stream": True,
                }
            ]
        }
    )

    input: Annotated[
        InputItems | None, BeforeValidator(_items, json_schema_input_type=str | list[InputItem] | None)
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
    tools: ResponseTools | None = Field(
        default=None, max_length=MAX_TOOLS, description="The tools that the model may call."
    )
    tool_choice: _ToolChoice = Field(
        default=None,
        description="Whether the answer may or must call tools: `none`, `auto`, `required`, or an object "
        "that names one tool or the allowed ones.",
        json_schema_extra={"default": "auto"},
    )
    parallel_tool_calls: ParallelToolCalls = None
    max_tool_calls: int | None = Field(
        default=None, ge=1, description="Without effect: it counts calls of tools that the server runs."
    )
    text: TextOptions | None = Field(default=None, description="The form of the text.")
    reasoning: ReasoningOptions | None = Field(default=None, description="How the model reasons.")
    include: Items[str] | None = Field(
        default=None,
        description=f"Additional output: `{_INCLUDED_LOGPROBS}`; other values are without effect.",
    )
    top_logprobs: int | None = parameter("top_logprobs", ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None,
        description="`auto`: of an input that is too long, the oldest turns are left out; otherwise it is "
        "rejected.",
        json_schema_extra={"default": "disabled"},
    )
    metadata: dict[str, Any] | None = Field(default=None, description="The response repeats it.")
    service_tier: Any = Field(default=None, description="Without effect.")
    user: Any = Field(default=None, description="Without effect.")
    safety_identifier: Any = Field(default=None, description="Without effect.")
    prompt_cache_key: Any = Field(
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
        names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        return form | names | {".function.parameters": ".parameters", ".custom.format.grammar": ".format"}

    def params(self) -> SamplingParams:
        """See `GenerationBody`."""
        return self.sampling(
            max_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs or 0,
            structured_outputs=self.format_or(self.text and self.text.form(), field="text.format"),
        )

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        """See `GenerationBody`."""
        given = [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]
        included = enumerate(self.include or ())
        given += [f"include[{index}]" for index, name in included if name != _INCLUDED_LOGPROBS]
        verbosity = ["text.verbosity"] if self.text is not None and self.text.verbosity else []
        summary = ["reasoning.summary"] if self.reasoning is not None and self.reasoning.summary else []
        reasoning = submitted.unused_reasoning({"reasoning.effort": self.asked_reasoning})
        return [*super().ignored(submitted), *given, *verbosity, *summary, *reasoning]

    @property
    def asked_reasoning(self) -> Reasoning:
        """How the model is to reason."""
        return Reasoning(effort=self.reasoning.effort if self.reasoning else None)

    def tool_fields(self, offer: ToolOffer) -> dict[str, Any]:
        """Return the fields of `Chat` for the tools and the choice among them; raises InvalidRequest."""
        fields: dict[str, Any] = {
            "tools": tuple(tool.function for tool in offer.tools.values()),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }
        match self.tool_choice:
            case {"type": "allowed_tools", "mode": mode, "tools": tools}:
                names = [*dict.fromkeys(name for tool in tools for name in offer.meant(tool))]
                if mode == "auto" and not names:
                    return fields | {"tool_choice": "none"}
                require(bool(names), "tool_choice", "names no tool that is in tools")
                return fields | {"tool_choice": mode, "allowed_tools": tuple(names)}
            case {"type": _} as choice:
                names = offer.meant(choice)
                require(bool(names), "tool_choice", "names a tool that is not in tools")
                return fields | only_tool(names[0])
            case mode:
                return fields | {"tool_choice": mode or "auto"}


@dataclass(slots=True, kw_only=True)
class ResponseRequest:
    """One request, as `GenerationBody`: the body, and the conversation that it continues."""

    body: ResponsesBody
    store: ResponseStore
    max_bytes: int              # the conversation may have
    key: str = ""               # the name of its API key, to which the response belongs
    created_s: int = field(default_factory=lambda: int(time.time()))
    inputs: list[Item] = field(default_factory=list)    # set by `prompts`
    num_earlier: int = 0                                # how many of them are of earlier responses
    offer: ToolOffer = field(default_factory=lambda: ToolOffer(()))     # set by `prompts`
    num_choices: int = 1

    @property
    def model_name(self) -> str | None:
        """See `GenerationBody`."""
        return self.body.model_name

    @property
    def stream(self) -> bool | None:
        """See `GenerationBody`."""
        return self.body.stream

    @property
    def return_progress(self) -> bool | None:
        """See `GenerationBody`."""
        return self.body.return_progress

    def check(self) -> None:
        """See `GenerationBody`."""
        self.body.check()

    def prompts(self) -> list[Chat]:
        """See `GenerationBody`; there is one prompt."""
        body = self.body
        earlier = self._earlier()
        self.inputs = [*earlier, *read_items(body.input or (), find=partial(self.store.item, key=self.key))]
        self.num_earlier = len(earlier)
        self.offer = ToolOffer(
            body.tools or (),
            loaded=loaded_tools(self.inputs, num_earlier=self.num_earlier),
            called=called_names(self.inputs),
            choice=body.tool_choice,
        )
        if body.tool_choice != "none":
            self.offer.require_some()
        chat = Chat(
            messages=messages_of(
                self.inputs, instructions=body.instructions, described=self.offer.described
            ),
            **body.tool_fields(self.offer),
            continue_final_message=is_unfinished(self.inputs),
            template_kwargs=body.chat_template_kwargs or {},
            reasoning=body.asked_reasoning,
            drops_oldest_turns=body.truncation == "auto",
        )
        return [chat]

    def _earlier(self) -> list[Item]:
        """Return the conversation that the request continues."""
        previous_id, field = self.body.previous_response_id, "previous_response_id"
        if previous_id is None:
            return []
        try:
            previous = self.store.get(previous_id, key=self.key)
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
        places = {f"tools[{index}]": tool.place for index, tool in enumerate(self.offer.tools.values())}
        return self.body.names() | places

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        """See `GenerationBody`."""
        unused = (f"input={kind}" for kind in unused_kinds(self.inputs[self.num_earlier :]))
        return [*self.body.ignored(submitted), *self.offer.left_out, *unused]

    def response(self, submitted: SubmittedRequest) -> dict[str, Any]:
        """Return the response object at its beginning."""
        body, params = self.body, submitted.params
        return {
            "id": f"resp_{submitted.id}",
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
            "tools": self.offer.written,
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
            self.store.add(response, inputs=self.inputs, num_earlier=self.num_earlier, key=self.key)


def _given(options: BaseModel | None) -> dict[str, Any]:
    return options.model_dump(exclude_none=True) if options else {}
