"""Ollama body: the fields of `/api/chat` and `/api/generate`, and the prompts that they describe."""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from genserve.errors import InvalidRequest, require
from genserve.prompt import (
    MAX_CHAT_MESSAGES,
    MAX_TOOLS,
    Chat,
    Message,
    Prompt,
    Reasoning,
    ToolCall,
    read_tools,
)
from genserve.sampling.param_table import Range
from genserve.sampling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, sampling_params
from genserve.server.dialects.content_parts import placeholder
from genserve.server.dialects.decoding_fields import COMMON, DecodingFields, Texts, parameter
from genserve.server.http.request_body import Items, TolerantBody
from genserve.settings import read_keep_alive
from genserve.textmodel.text_model import TextModel

# Ollama's, in addition to the temperature.
_TOP_K, _TOP_P, _PENALTY_WINDOW = 40, 0.9, 64
_MANY = 2**31 - 1
_SEEDS = Range(-(2**63), 2**64 - 1)


class OptionsFields(DecodingFields):
    """Ollama's options, and the sampling parameters by vLLM's names; unknown ones are ignored."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = parameter(
        "max_tokens",
        bounds=Range(-2, _MANY),
        description="This number of tokens ends the answer; without it, or below 1, the end of the context.",
    )
    temperature: float | None = parameter("temperature", default=0.8)
    top_k: int | None = parameter("top_k", default=_TOP_K, bounds=Range(-1, _MANY))
    top_p: float | None = parameter("top_p", default=_TOP_P)
    seed: int | None = parameter("seed", bounds=_SEEDS, ge=_SEEDS.low, le=_SEEDS.high)
    stop: Texts = parameter("stop")
    repeat_penalty: float | None = parameter("repetition_penalty")
    repeat_last_n: int | None = parameter(
        "penalty_window",
        default=_PENALTY_WINDOW,
        bounds=Range(-1, _MANY),
        description="How many of the last tokens the penalties consider; -1: all, 0: no penalties.",
    )
    mirostat: int | None = parameter("mirostat_mode")

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, options: Any) -> Any:
        """Read integers that are written as floats (`10.0`), as Ollama does: not all languages have both."""
        if not isinstance(options, dict):
            return options
        return {
            name: int(value) if _is_whole(value) and _takes_integers(cls, name) else value
            for name, value in options.items()
        }

    def sampling(self) -> dict[str, Any]:
        """Return the parameters that are given, by our names."""
        values = self.given()
        own: dict[str, Any] = {
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty,
            "mirostat_mode": self.mirostat,
            "max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None,
            # Ollama's default is -1: a random one.
            "seed": None if self.seed is None or self.seed < 0 else self.seed,
        }
        values |= {name: value for name, value in own.items() if value is not None}
        if own["seed"] is None:
            values.pop("seed", None)
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        if any(name in values for name in penalties):
            window = _PENALTY_WINDOW if self.repeat_last_n is None else self.repeat_last_n
            values.setdefault("penalty_window", max(window, 0))
            if self.repeat_last_n == 0:
                values = {name: value for name, value in values.items() if name not in penalties}
                del values["penalty_window"]
                values["repetition_penalty"] = 1.0      # whatever the model recommends
        return values

    def names(self) -> dict[str, str]:
        """Return the names of the parameters in a request, by ours."""
        own = {
            "max_tokens": "num_predict",
            "repetition_penalty": "repeat_penalty",
            "penalty_window": "repeat_last_n",
            "mirostat_mode": "mirostat",
        }
        names = {name: name for name in type(self).model_fields} | own
        return {name: f"options.{written}" for name, written in names.items()}

    def unused(self) -> list[str]:
        """Return the options without effect here."""
        return [f"options.{name}" for name in self.model_extra or {}]

    def defaults(self) -> dict[str, Any]:
        """Return Ollama's defaults, for what neither the request nor the model gives."""
        if self.use_beam_search or self.temperature == 0:
            return {}
        given = self.given()
        if self.mirostat or given.get("mirostat_mode") or "samplers" in given:  # exclude the other two
            return {"temperature": 0.8}
        return {"temperature": 0.8, "top_k": _TOP_K, "top_p": _TOP_P}


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _takes_integers(body: type[BaseModel], name: str) -> bool:
    known = body.model_fields.get(name)
    kinds = get_args(known.annotation) if known else ()
    return int in kinds and float not in kinds


def _json_or_schema(form: Any) -> Any:
    if isinstance(form, str) and form not in ("", "json"):
        raise ValueError('must be "json" or a JSON schema')
    return form


def _no_options(options: Any) -> Any:
    return {} if options is None else options


def _is_time(value: Any) -> Any:
    if value is not None:
        read_keep_alive(value)
    return value


# How long a model stays loaded.
KeepAlive: TypeAlias = Annotated[
    str | int | float | None,
    BeforeValidator(_is_time),
    Field(
        description="How long the model stays loaded after this request, if it is loaded on demand: `5m`, or "
        "seconds. 0: it leaves at once; negative: it stays until another model needs its memory."
    ),
]


def keep_alive_seconds(keep_alive: str | float | None) -> float | None:
    """Return the seconds of a `KeepAlive`; None: the request does not say."""
    return None if keep_alive is None else read_keep_alive(keep_alive)


class OllamaBody(TolerantBody):
    """Base of both bodies.

    Attributes:
        unsupported: the fields that are rejected unless they are empty, with the remedies.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "images": "this model reads text only: leave the images out, or describe them in words"
    }

    model: str | None = Field(
        default=None,
        description="The name of a model, with or without `:latest`; not needed if there is only one.",
        json_schema_extra=COMMON,
    )
    stream: bool | None = Field(
        default=None,
        description="Send the answer in parts while it is generated.",
        json_schema_extra=COMMON | {"default": True},
    )
    format: Annotated[str | dict[str, Any] | None, BeforeValidator(_json_or_schema)] = Field(
        default=None,
        description='The form of the answer: `"json"` for any JSON object, or a JSON schema.',
        json_schema_extra=COMMON,
    )
    options: Annotated[
        OptionsFields, BeforeValidator(_no_options, json_schema_input_type=OptionsFields | None)
    ] = Field(
        default=OptionsFields(), description="How tokens are drawn, and what ends the answer."
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        default=None, description="Whether the model reasons first; by default as its template has it."
    )
    keep_alive: KeepAlive = None
    logprobs: bool | None = parameter("logprobs")
    top_logprobs: int | None = parameter("top_logprobs", ge=0, le=MAX_TOP_LOGPROBS)

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the request only asks for the model to be loaded."""

    @abstractmethod
    def prompt(self, model: TextModel) -> Prompt:
        """Return the prompt for a model; raises InvalidRequest."""

    def check(self, model: TextModel) -> None:
        """Reject what is not supported; raises InvalidRequest."""
        self.reject(self.unsupported)
        if self.think and not (model.reasons or model.reads_reasoning(self.reasoning)):
            name = self.model or model.name
            raise InvalidRequest(f'"{name}" does not support thinking', field="think")

    def params(self) -> SamplingParams:
        """Return the sampling parameters; raises InvalidRequest."""
        values = self.options.sampling()
        if self.format:
            form = {"json_object": True} if self.format == "json" else {"json": self.format}
            values["structured_outputs"] = self.options.form_or(form, field="format")
        if self.logprobs:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return sampling_params(values, defaults=self.options.defaults())

    def names(self) -> dict[str, str]:
        """See `GenerationBody`."""
        form = {"structured_outputs": "format"} if self.format else {}
        return self.options.names() | {"logprobs": "logprobs", "top_logprobs": "top_logprobs"} | form

    def unused(self) -> list[str]:
        """Return the fields without effect."""
        extra = (name for name in self.model_extra or {} if name not in self.unsupported)
        return [*extra, *self.options.unused()]

    @property
    def reasoning(self) -> Reasoning:
        """How the model is to reason."""
        match self.think:
            case str() as effort:
                return Reasoning(effort=effort)
            case enabled:
                return Reasoning(enabled=enabled)


class OllamaFunction(TolerantBody):
    """The function of a call."""

    name: str = Field(description="Its name.")
    arguments: dict[str, Any] = Field(description="Its arguments.")


class OllamaToolCall(TolerantBody):
    """A call in an earlier message of the assistant."""

    id: str = Field(default="", description="The id that the answer gave to the call.")
    function: OllamaFunction = Field(description="The called function.")


class OllamaMessage(TolerantBody):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Whose message it is; `developer` is the same as `system`."
    )
    content: str | None = Field(default=None, description="Its text.")
    thinking: str | None = Field(
        default=None, description="The reasoning before an answer of the assistant, for the template to show."
    )
    tool_calls: Items[OllamaToolCall] | None = Field(
        default=None, description="The tool calls of an answer of the assistant."
    )
    tool_name: str | None = Field(default=None, description="The name of the tool, for a result.")
    tool_call_id: str | None = Field(default=None, description="The id of the call, for a result.")

    def text(self) -> str:
        """Return what the model reads: in the result of a tool, a placeholder takes the place of images."""
        images = (self.model_extra or {}).get("images") if self.role == "tool" else None
        left_out = [placeholder("image") for _ in images] if isinstance(images, list) else []
        return "\n".join(part for part in (self.content, *left_out) if part)


class OllamaChatBody(OllamaBody):
    """Body of `POST /api/chat`."""

    messages: Items[OllamaMessage] | None = Field(
        default=None,
        max_length=MAX_CHAT_MESSAGES,
        description="The chat so far, the oldest message first. A last one of the assistant is continued.",
    )
    tools: Items[dict[str, Any]] | None = Field(
        default=None,
        max_length=MAX_TOOLS,
        description='The functions that the model may call: `{"type": "function", "function": {"name": ..., '
        '"description": ..., "parameters": SCHEMA}}`.',
    )

    @property
    def is_empty(self) -> bool:
        """See `OllamaBody`."""
        return not self.messages

    def check(self, model: TextModel) -> None:
        """See `OllamaBody`."""
        super().check(model)
        for index, message in enumerate(self.messages or ()):
            if message.role != "tool":
                message.reject(OllamaBody.unsupported, place=f"messages[{index}].")

    def prompt(self, model: TextModel) -> Chat:
        """See `OllamaBody`."""
        messages = tuple(_read(self.messages or ()))
        last = messages[-1]
        return Chat(
            messages=messages,
            tools=read_tools(self.tools or ()),
            continue_final_message=last.role == "assistant" and not last.tool_calls,
            reasoning=self.reasoning,
        )


def _read(messages: Sequence[OllamaMessage]) -> Iterator[Message]:
    """Yield the messages. Ollama's client sends calls and results without ids; they receive some here."""
    open_calls: dict[str, str] = {}     # ids and names of the calls without a result
    number = itertools.count()
    for message in messages:
        calls = tuple(
            ToolCall(
                id=call.id or f"call{next(number):05}",     # Mistral's templates require nine characters
                name=call.function.name,
                arguments=json.dumps(call.function.arguments, ensure_ascii=False),
            )
            for call in message.tool_calls or ()
        )
        open_calls |= {call.id: call.name for call in calls}
        answered = ""
        if message.role == "tool":
            matching = (call_id for call_id, name in open_calls.items() if message.tool_name in (None, name))
            answered = message.tool_call_id or next(matching, "")
        yield Message(
            role="system" if message.role == "developer" else message.role,
            content=message.text(),
            reasoning_content=(message.thinking or "") if message.role == "assistant" else "",
            tool_calls=calls,
            tool_call_id=answered,
            name=message.tool_name or open_calls.pop(answered, ""),
        )
        open_calls.pop(answered, None)


class OllamaGenerateBody(OllamaBody):
    """Body of `POST /api/generate`."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **OllamaBody.unsupported,
        "suffix": "send the text before the gap alone: models do not fill in the middle here",
        "template": "templates are programs, which are not accepted from clients; send the text with raw",
        "context": "send the earlier turns to /api/chat",
    }

    prompt_: str | None = Field(default=None, alias="prompt", description="The text to answer.")
    system: str | None = Field(default=None, description="Instructions to the model.")
    raw: bool | None = Field(
        default=None,
        description="Complete the prompt as it is, without the model's chat template.",
        json_schema_extra={"default": False},
    )

    @property
    def is_empty(self) -> bool:
        """See `OllamaBody`."""
        return not self.prompt_

    def check(self, model: TextModel) -> None:
        """See `OllamaBody`."""
        super().check(model)
        require(not (self.raw and self.system), "system", "cannot be combined with raw")

    def prompt(self, model: TextModel) -> Prompt:
        """See `OllamaBody`. A model without a chat template completes the text."""
        text = self.prompt_ or ""
        if self.raw or (model.tokenizer.chat_template is None and not self.system):
            return text
        system = [Message(role="system", content=self.system)] if self.system else []
        messages = (*system, Message(role="user", content=text))
        return Chat(messages=messages, reasoning=self.reasoning)
