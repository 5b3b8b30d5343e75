"""OpenAI's dialect: `/v1/chat/completions` and `/v1/models`.

A field that OpenAI knows and we do not honour is refused by name, unless its value asks for nothing;
a field that nobody knows is passed over, and named in the header `x-genserve-ignored`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, ConfigDict, Field

from genserve.backends.generation_ensemble import GenerationEnsemble
from genserve.errors import GenserveError, InvalidRequest
from genserve.request import Delta, FinishReason, Message, SamplingParams, Usage, join_deltas, read_messages
from genserve.server.body import Body, StrictRoute
from genserve.server.faults import openai_error, renamed
from genserve.server.services import Open, SharedServices
from genserve.server.sse import EventStream, event, read_all

__all__ = ["router"]

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI"])

_FINISH = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}
# What huggingface_hub's InferenceClient writes for "the model at this URL".
_ANY_MODEL = frozenset({"dummy", "tgi"})
# Labels for OpenAI's own bookkeeping; they change nothing in an answer.
_INERT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Known and not honoured: the values with which a client asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


def _text_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise ValueError("must be text, or a list of text parts")  # noqa: TRY004  # pydantic takes this one
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ChatMessage(Body):
    """One turn; what an answer of ours or of OpenAI's also holds may stand there empty."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts)]

    def text(self) -> str:
        """The content as one text."""
        return "".join(part.text for part in self.content)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None     # padding against traffic analysis: never added


class ChatBody(Body):
    """Body of `POST /v1/chat/completions`; extras beyond OpenAI's have vLLM's names."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = None
    stop: Annotated[list[str] | None, BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(default=None, ge=-1)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    def names(self) -> dict[str, str]:
        """Our names of what can be wrong, and this request's."""
        return {
            "prompt": "messages",
            "max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
        }

    def params(self) -> SamplingParams:
        """The sampling parameters; raises InvalidRequest."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            # OpenAI's seeds are signed.
            seed=None if self.seed is None else self.seed % 2**64,
            cache_salt=self.cache_salt,
        )

    def chat(self) -> tuple[Message, ...]:
        """The messages in our words; raises InvalidRequest."""
        for index, message in enumerate(self.messages):
            for name, value in (message.model_extra or {}).items():
                if value not in (None, [], {}):
                    field = f"messages[{index}].{name}"
                    raise InvalidRequest(f"{field} is not supported", field=field)
        roles = {"developer": "system"}
        return read_messages(
            [{"role": roles.get(m.role, m.role), "content": m.text()} for m in self.messages]
        )

    def ignored(self) -> list[str]:
        """The fields that nobody knows.

        Raises:
            InvalidRequest: a field asks for something that OpenAI has and we do not.
        """
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise InvalidRequest(f"{name} is not supported", field=name, remedy="leave it out")
            if name not in _NEUTRAL and name not in _INERT:
                unknown.append(name)
        return unknown


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    ignored = body.ignored()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", field="stream_options")
    model_name = None if body.model in _ANY_MODEL else body.model
    try:
        opened = await services.open(model_name, body.chat(), body.params())
    except InvalidRequest as error:
        raise renamed(error, body.names()) from None
    response: Response
    if body.stream:
        response = EventStream(opened.stream, ChatFrames(opened, body))
    else:
        deltas = await read_all(opened.stream, request)
        response = JSONResponse(_completion(opened, deltas, token_ids=bool(body.return_token_ids)))
    if ignored:
        names = ",".join(name for name in ignored if name.isascii() and name.isprintable())
        response.headers["x-genserve-ignored"] = names[:1024]
    return response


@router.get("/models")
async def models(services: SharedServices) -> dict[str, Any]:
    """List the models that answer."""
    return {"object": "list", "data": [_model(m) for m in services.repository.generation_models]}


@router.get("/models/{name:path}")
async def model(name: str, services: SharedServices) -> dict[str, Any]:
    """Describe one model."""
    return _model(services.repository.get(name))


class ChatFrames:
    """The chunks of a streamed chat; all that does not change is written once."""

    def __init__(self, opened: Open, body: ChatBody) -> None:
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._token_ids = bool(body.return_token_ids)
        head = json.dumps(_head(opened, "chat.completion.chunk"))
        self._head = head[:-1]
        usage = ', "usage": null' if self._include_usage else ""
        self._before = f'data: {self._head}, "choices": [{{"index": 0, "delta": '
        self._after = f"}}]{usage}}}\n\n"

    def start(self) -> bytes:
        """See `Frames`."""
        return self._chunk('{"role": "assistant", "content": ""}')

    def delta(self, delta: Delta) -> bytes:
        """See `Frames`."""
        extra = f', "token_ids": {list(delta.token_ids)}' if self._token_ids else ""
        chunks = self._chunk(_content(delta.text), extra=extra) if delta.text or extra else b""
        if delta.finish_reason is None:
            return chunks
        chunks += self._chunk("{}", finish_reason=f'"{_FINISH[delta.finish_reason]}"')
        if self._include_usage and delta.usage is not None:
            chunks += event(f'{self._head}, "choices": [], "usage": {json.dumps(_usage(delta.usage))}}}')
        return chunks

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(openai_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return event("[DONE]")

    def _chunk(self, delta: str, *, finish_reason: str = "null", extra: str = "") -> bytes:
        ending = f'"logprobs": null, "finish_reason": {finish_reason}{extra}'
        return f"{self._before}{delta}, {ending}{self._after}".encode()


def _content(text: str) -> str:
    return f'{{"content": {json.dumps(text)}}}'


def _head(opened: Open, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": opened.model.name,
        "system_fingerprint": f"genserve-{opened.model.precision}",
    }


def _completion(opened: Open, deltas: list[Delta], *, token_ids: bool) -> dict[str, Any]:
    completion = join_deltas(deltas)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": completion.text},
        "logprobs": None,
        "finish_reason": _FINISH[completion.finish_reason],
    }
    if token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return _head(opened, "chat.completion") | {"choices": [choice], "usage": _usage(completion.usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _model(model: GenerationEnsemble) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.loaded_s),
        "owned_by": "genserve",
        "max_model_len": model.max_length,
    }
