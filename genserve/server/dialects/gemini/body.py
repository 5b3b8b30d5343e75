"""Gemini body: the fields of `generateContent` and `countTokens`, and the chat that they describe.

Google's JSON has names in camelCase and takes them in snake_case, too, also for one item in place of a list
of it. Its errors have the names in snake_case, and so have ours.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from genserve.errors import InvalidRequest, require
from genserve.prompt import (
    MAX_CHAT_MESSAGES,
    MAX_TOOLS,
    Chat,
    Message,
    Reasoning,
    Tool,
    ToolCall,
    ToolMode,
    inside,
)
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, sampling_params
from genserve.server.dialects.content_parts import placeholder, unreadable_part
from genserve.server.dialects.decoding_fields import COMMON, DecodingFields, Texts, parameter
from genserve.server.dialects.reasoning_fields import ReasoningEffort, joined_reasoning
from genserve.server.dialects.tool_offers import left_out_tool, require_some_tool
from genserve.server.http.request_body import Items, TolerantBody

_T = TypeVar("_T")
_MAX_CANDIDATES = 8
_SEEDS = Range(-(2**63), 2**64 - 1)     # Google's are signed
_CONFIG = "generation_config"
# Fields that would change what an answer is, with the remedies.
_UNSUPPORTED = {"cached_content": "send the whole contents: prefixes of prompts are cached by themselves"}
_UNSUPPORTED_IN_CONFIG = dict.fromkeys(("speech_config", "image_config"), "the server writes text only")
# Parts with data, which are text for no model here.
_DATA = ("inline_data", "file_data", "inlineData", "fileData")
# Keywords of schemas with numbers that Google's clients may write as texts.
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_MAX_DIGITS = 19    # an int64 has at most
_NO_SCHEMA_KEYWORDS = frozenset({"example", "nullable", "propertyOrdering"})
_MODES: Mapping[str, ToolMode] = {"ANY": "required", "NONE": "none"}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    """Return an integer that is written as a float, as Google's client writes `topK`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_OneOrMore: TypeAlias = Annotated[Items[_T], BeforeValidator(_listed)]


class GeminiObject(TolerantBody):
    """Base of all objects."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, loc_by_alias=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    def reject_spelled(self, remedies: Mapping[str, str], *, place: str = "") -> None:
        """Reject fields as `reject` does, in both spellings of their names."""
        self.reject(remedies, place=place)
        self.reject({to_camel(name): remedy for name, remedy in remedies.items()}, place=place)


class FunctionCall(GeminiObject):
    """A call in an earlier turn of the model."""

    id: str | None = Field(default=None, description="The id that the answer gave to the call.")
    name: str = Field(description="The name of the function.")
    args: dict[str, Any] | None = Field(default=None, description="The arguments.")


class FunctionResponse(GeminiObject):
    """The result of a call."""

    id: str | None = Field(
        default=None, description="The id of the call; without it, the first open call of the function."
    )
    name: str = Field(description="The name of the function.")
    response: dict[str, Any] | None = Field(default=None, description="What the function has returned.")
    parts: _OneOrMore[GeminiObject] | None = Field(
        default=None, description="Images and files of the result; a placeholder takes the place of each."
    )

    def text(self) -> str:
        """Return what the model reads."""
        written = json.dumps(self.response or {}, ensure_ascii=False)
        return "\n".join((written, *(placeholder(_data_kind(part)) for part in self.parts or ())))


def _data_kind(part: GeminiObject) -> str:
    """Return the media type of a part with data, or else the name of its field."""
    for name, value in (part.model_extra or {}).items():
        kind = (value.get("mimeType") or value.get("mime_type")) if isinstance(value, dict) else None
        return kind if isinstance(kind, str) else name
    return "part"


class Part(GeminiObject):
    """A part of a turn: text, a call, or the result of a call."""

    text: str | None = Field(default=None, description="Text.")
    thought: bool | None = Field(default=None, description="Whether the text of the model is reasoning.")
    function_call: FunctionCall | None = Field(default=None, description="A call, in a turn of the model.")
    function_response: FunctionResponse | None = Field(default=None, description="The result of a call.")

    def check(self, place: str, *, allowed: str) -> None:
        """Raise InvalidRequest unless the part is text, or `allowed`, which is the name of a field."""
        given = [name for name in _PARTS if getattr(self, name) is not None]
        if given == ["text"] or given == [allowed]:
            return
        unknown = next(iter(self.model_extra or {}), None)
        problem = given[-1] if given else unknown
        if problem in _DATA:
            raise unreadable_part(_data_kind(self), field=f"{place}.{problem}")
        message = f"{place} is empty" if problem is None else f"{place}.{problem[:64]} is not supported here"
        raise InvalidRequest(message, field=place, remedy=f"a part here is either text or {allowed}")

    def left_out(self) -> str | None:
        """Return the kind of a part that only Google's servers write, such as `executableCode`, or None."""
        is_known = any(getattr(self, name) is not None for name in _PARTS)
        return None if is_known else next(iter(self.model_extra or {}), None)


_PARTS = ("text", "function_call", "function_response")


class Content(GeminiObject):
    """One turn."""

    role: Literal["user", "model", "function"] | None = Field(
        default=None, description="Whose turn it is; by default the user's."
    )
    parts: _OneOrMore[Part] = Field(min_length=1, description="The parts of the turn.")


class FunctionDeclaration(GeminiObject):
    """A function that the model may call."""

    name: str = Field(description="Its name.")
    description: str | None = Field(default=None, description="What it does.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="Its arguments: a schema in Google's form, with types in capitals."
    )
    parameters_json_schema: dict[str, Any] | None = Field(
        default=None, description="Its arguments: a JSON schema, in place of `parameters`."
    )

    def tool(self) -> Tool:
        """Return the tool; raises InvalidRequest."""
        schema = self.parameters_json_schema or json_schema(self.parameters or {})
        return Tool(name=self.name, description=self.description or "", parameters=schema)


class ToolDeclaration(GeminiObject):
    """Some of the tools."""

    function_declarations: _OneOrMore[FunctionDeclaration] | None = Field(
        default=None, max_length=MAX_TOOLS, description="Functions that the client runs."
    )


class FunctionCallingConfig(GeminiObject):
    """Whether functions are called, and which."""

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "VALIDATED", "ANY", "NONE"] | None = Field(
        default=None,
        description="`AUTO` and `VALIDATED`: the model decides. `ANY`: it calls functions. `NONE`: none.",
    )
    allowed_function_names: Items[str] | None = Field(
        default=None, description="The functions that may be called; by default all."
    )


class ToolConfig(GeminiObject):
    """The choice among the tools."""

    function_calling_config: FunctionCallingConfig = Field(
        default=FunctionCallingConfig(), description="Whether functions may be called, and which."
    )


class ThinkingConfig(GeminiObject):
    """Whether the model reasons before it answers."""

    include_thoughts: bool | None = Field(
        default=None,
        description="Whether the answer has the reasoning, in parts with `thought`.",
        json_schema_extra={"default": False},
    )
    thinking_budget: int | None = parameter(
        "thinking_token_budget",
        ge=-1,
        le=2**31 - 1,
        description="This number of tokens ends the reasoning; 0: no reasoning, if the model's chat template "
        "can turn it off; -1: no limit.",
    )
    thinking_level: ReasoningEffort = None


class GenerationConfig(DecodingFields, GeminiObject):
    """How tokens are drawn, what ends the answer, and its form; extras beyond Google's have vLLM's names."""

    candidate_count: int | None = Field(
        default=None,
        ge=1,
        le=_MAX_CANDIDATES,
        description="The number of answers.",
        json_schema_extra={"default": 1},
    )
    max_output_tokens: int | None = parameter("max_tokens")
    stop_sequences: Texts = parameter("stop")
    temperature: float | None = parameter("temperature", default=1.0)
    top_k: Annotated[int | None, BeforeValidator(_whole)] = parameter("top_k")
    seed: int | None = parameter("seed", bounds=_SEEDS, ge=_SEEDS.low, le=_SEEDS.high)
    response_logprobs: bool | None = parameter("logprobs")
    logprobs: int | None = parameter("top_logprobs", ge=0, le=MAX_TOP_LOGPROBS)
    response_mime_type: Literal["text/plain", "application/json", "text/x.enum"] | None = Field(
        default=None,
        description="The form of the answer: JSON, or one of the texts in a schema.",
        json_schema_extra={"default": "text/plain"},
    )
    response_schema: dict[str, Any] | None = Field(
        default=None, description="The schema of the answer in Google's form, with types in capitals."
    )
    response_json_schema: dict[str, Any] | None = Field(
        default=None, description="The JSON schema of the answer, in place of `responseSchema`."
    )
    response_modalities: Items[Literal["TEXT"]] | None = Field(
        default=None, description="What the answer consists of: text."
    )
    thinking_config: ThinkingConfig = Field(
        default=ThinkingConfig(), description="How long the model reasons, and whether that is shown."
    )

    def form(self) -> dict[str, Any] | None:
        """Return the form of the answer for `structured_outputs`; raises InvalidRequest."""
        schema = self.response_json_schema
        if schema is None and self.response_schema is not None:
            schema = json_schema(self.response_schema)
        match self.response_mime_type:
            case "application/json":
                return {"json_object": True} if schema is None else {"json": schema}
            case "text/x.enum":
                return {"choice": (schema or {}).get("enum")}
        rule = "needs the response_mime_type application/json"
        require(schema is None, f"{_CONFIG}.{self.schema_field}", rule)
        return None

    @property
    def schema_field(self) -> str:
        """The name of the field with the schema of the answer."""
        return "response_schema" if self.response_json_schema is None else "response_json_schema"

    def asked_reasoning(self) -> dict[str, Reasoning]:
        """Return what each field asks for about reasoning."""
        config, asked = self.thinking_config, {}
        if config.thinking_budget is not None:
            budget = None if config.thinking_budget < 0 else config.thinking_budget
            limited = Reasoning(enabled=budget != 0, budget=budget)
            asked[f"{_CONFIG}.thinking_config.thinking_budget"] = limited
        if config.thinking_level is not None:
            level = Reasoning(effort=config.thinking_level)
            asked[f"{_CONFIG}.thinking_config.thinking_level"] = level
        return asked

    @property
    def reasoning(self) -> Reasoning:
        """How the model is to reason."""
        has_form = self.response_mime_type not in (None, "text/plain")
        return joined_reasoning(self.asked_reasoning(), has_form=has_form)

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequest: a value is out of range, or contradicts another.
        """
        own = {
            "max_tokens": self.max_output_tokens,
            "stop": self.stop_sequences,
            "seed": None if self.seed is None else self.seed % 2**64,
            "logprobs": bool(self.response_logprobs),
            "top_logprobs": self.logprobs or 0,
            "structured_outputs": self.form_or(self.form(), field=f"{_CONFIG}.response_mime_type"),
        }
        defaults = {} if self.use_beam_search else {"temperature": 1.0}
        return sampling_params(self.given() | own, defaults=defaults)

    def names(self) -> dict[str, str]:
        """Return the names of the parameters in a request, by ours."""
        own = {
            "max_tokens": "max_output_tokens",
            "stop": "stop_sequences",
            "n": "candidate_count",
            "logprobs": "response_logprobs",
            "top_logprobs": "logprobs",
        }
        if self.structured_outputs is None:
            own["structured_outputs"] = self.schema_field
        names = {name: name for name in type(self).model_fields} | own
        return {name: f"{_CONFIG}.{written}" for name, written in names.items()}


class PromptBody(GeminiObject):
    """The fields that a prompt consists of."""

    contents: _OneOrMore[Content] = Field(
        max_length=MAX_CHAT_MESSAGES,
        description="The chat so far, the oldest turn first. A last turn of the model is continued.",
        json_schema_extra=COMMON,
    )
    system_instruction: Content | None = Field(default=None, description="Instructions to the model.")
    tools: _OneOrMore[ToolDeclaration] | None = Field(
        default=None, description="The functions that the model may call."
    )
    tool_config: ToolConfig = Field(default=ToolConfig(), description="Which tools may be called.")
    generation_config: GenerationConfig = Field(
        default=GenerationConfig(), description="How tokens are drawn, what ends the answer, and its form."
    )

    def check(self) -> None:
        """Reject what is not supported; raises InvalidRequest."""
        self.reject_spelled(_UNSUPPORTED)
        self.generation_config.reject_spelled(_UNSUPPORTED_IN_CONFIG, place=f"{_CONFIG}.")
        if self.tool_config.function_calling_config.mode != "NONE":
            functions = [tool for tool in self.tools or () if tool.function_declarations]
            require_some_tool(functions, self._tools_left_out(), types_are_fields=True)

    def _tools_left_out(self) -> list[str]:
        """Return the places and types of the tools that Google's servers run, such as `googleSearch`."""
        return [
            left_out_tool(f"tools[{index}]", name)
            for index, tool in enumerate(self.tools or ())
            for name in tool.model_extra or {}
        ]

    def chat(self) -> Chat:
        """Return the chat.

        Raises:
            InvalidRequest: a part or a tool is not supported, or what `Chat` raises.
        """
        messages = (*self._system(), *_turns(self.contents))
        last = messages[-1] if messages else None
        choice = self.tool_config.function_calling_config
        return Chat(
            messages=messages,
            tools=tuple(self._tools()),
            tool_choice=_MODES.get(choice.mode or "", "auto"),
            allowed_tools=tuple(choice.allowed_function_names or ()),
            continue_final_message=last is not None and last.role == "assistant" and not last.tool_calls,
            reasoning=self.generation_config.reasoning,
        )

    def _system(self) -> Iterator[Message]:
        for index, part in enumerate(self.system_instruction.parts if self.system_instruction else ()):
            part.check(f"system_instruction.parts[{index}]", allowed="text")
            yield Message(role="system", content=part.text or "")

    def _tools(self) -> Iterator[Tool]:
        declared = (function for tool in self.tools or () for function in tool.function_declarations or ())
        for index, function in enumerate(declared):
            with inside(f"tools[{index}]"):
                yield function.tool()

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        return self.generation_config.names() | {
            "prompt": "contents",
            "messages": "contents",
            "tools": "function_declarations",
            "tool_choice": "tool_config",
            ".function.parameters": ".parameters",
        }

    def unused(self) -> Iterator[str]:
        """Yield the fields without effect, whatever the model is."""
        yield from self.model_extra or {}
        yield from (f"{_CONFIG}.{name}" for name in self.generation_config.model_extra or {})
        yield from self._tools_left_out()
        parts = (part for turn in self.contents if turn.role == "model" for part in turn.parts)
        kinds = dict.fromkeys(kind for kind in (part.left_out() for part in parts) if kind)
        yield from (f"contents={kind[:64]}" for kind in kinds)


class GenerateContentBody(PromptBody):
    """Body of `generateContent` and `streamGenerateContent`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "contents": [{"role": "user", "parts": [{"text": "What is the capital of Japan?"}]}],
                    "generationConfig": {"maxOutputTokens": 32, "temperature": 0},
                }
            ]
        }
    )


class CountTokensBody(GeminiObject):
    """Body of `countTokens`: the contents, or a request with them."""

    contents: _OneOrMore[Content] | None = Field(default=None, description="The chat to count.")
    generate_content_request: PromptBody | None = Field(
        default=None, description="A request of `generateContent`, in place of `contents`."
    )

    def prompt(self) -> PromptBody:
        """Return the fields of the prompt; raises InvalidRequest."""
        if self.generate_content_request is not None:
            return self.generate_content_request
        require(bool(self.contents), "contents", "must not be empty")
        return PromptBody(contents=self.contents or [])


def _turns(contents: Iterable[Content]) -> Iterator[Message]:
    """Yield the messages: successive contents of one role are one turn, each result of a call is a message.

    Calls and results may lack ids; they receive some here.
    """
    open_calls: dict[str, str] = {}     # ids and names of the calls without a result
    numbers = itertools.count()
    turns = itertools.groupby(enumerate(contents), key=lambda item: item[1].role == "model")
    for is_model, turn in turns:
        allowed = "function_call" if is_model else "function_response"
        parts: list[Part] = []
        for index, content in turn:
            for number, part in enumerate(content.parts):
                if is_model and part.left_out():
                    continue
                part.check(f"contents[{index}].parts[{number}]", allowed=allowed)
                parts.append(part)
        if not is_model:
            yield from _asked(parts, open_calls)
        if not is_model or not parts:
            continue
        calls = tuple(
            ToolCall(
                id=call.id or f"call{next(numbers):05}",     # Mistral's templates require nine characters
                name=call.name,
                arguments=json.dumps(call.args or {}, ensure_ascii=False),
            )
            for call in (part.function_call for part in parts)
            if call is not None
        )
        open_calls |= {call.id: call.name for call in calls}
        yield Message(
            role="assistant",
            content="".join(part.text or "" for part in parts if not part.thought),
            reasoning_content="".join(part.text or "" for part in parts if part.thought),
            tool_calls=calls,
        )


def _asked(parts: Iterable[Part], open_calls: dict[str, str]) -> Iterator[Message]:
    """Yield the messages of a turn of the user; `open_calls` loses the calls whose results are in it."""
    for is_text, group in itertools.groupby(parts, key=lambda part: part.function_response is None):
        if is_text:
            yield Message(role="user", content="\n".join(part.text or "" for part in group))
            continue
        for result in (part.function_response for part in group):
            assert result is not None
            matching = (call_id for call_id, name in open_calls.items() if name == result.name)
            answered = result.id or next(matching, "")
            open_calls.pop(answered, None)
            yield Message(role="tool", content=result.text(), tool_call_id=answered, name=result.name)


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema for one in Google's form: https://ai.google.dev/api/caching#Schema.

    That form has types in capitals, `nullable`, the order of properties, and formats of numbers.
    """
    given = {to_camel(name) if "_" in name else name: value for name, value in schema.items()}
    read = {name: _keyword(name, value) for name, value in given.items() if name not in _NO_SCHEMA_KEYWORDS}
    if read.get("type") != "string" or read.get("format") == "enum":
        read.pop("format", None)
    order, properties = given.get("propertyOrdering"), read.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
        read["properties"] = first | properties
    return {"anyOf": [read, {"type": "null"}]} if given.get("nullable") else read


def _keyword(name: str, value: Any) -> Any:
    match value:
        case str() if name == "type":
            return value.lower()
        case str() if name in _COUNTS and value.isdecimal() and len(value) <= _MAX_DIGITS:
            return int(value)
        case dict() if name == "items":
            return json_schema(value)
        case dict() if name == "properties":
            return {key: json_schema(of) if isinstance(of, dict) else of for key, of in value.items()}
        case list() if name == "anyOf":
            return [json_schema(of) if isinstance(of, dict) else of for of in value]
    return value
