"""Google's dialect: `generateContent`, `streamGenerateContent`, `countTokens` and the models of `/v1beta`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from fastapi import Request
from fastapi.responses import Response

from genserve.completion import (
    Completion,
    Delta,
    FinishReason,
    MessageDelta,
    PromptProgress,
    ToolCallDelta,
    Usage,
    join_choices,
    joined_calls,
)
from genserve.errors import ContextLengthExceeded, GenserveError
from genserve.prompt import Chat
from genserve.redaction import redacted_error
from genserve.repository.served_models import ListedModel
from genserve.sampling.sampling_params import SamplingParams, unused_parameters
from genserve.server.access.access_control import INFERENCE, METADATA
from genserve.server.dialects.gemini.body import CountTokensBody, GenerateContentBody
from genserve.server.dialects.generation_handler import (
    AnswerResponse,
    SubmittedRequest,
    answer_when_loaded,
    handle_generation,
)
from genserve.server.dialects.logprob_formats import NamedToken, content_scores
from genserve.server.dialects.timings import prompt_progress, requested_fields, timings_fields
from genserve.server.error_formats import ErrorFormat, full_message, named_as
from genserve.server.error_statuses import http_status
from genserve.server.http.sse_response import PING, EventStream, Frames, documented
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices
from genserve.text.message_parser import arguments_so_far
from genserve.textmodel.text_model import TextModel

# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# There is no word for a passed deadline, nor for a text that repeats itself: `finishMessage` has ours.
_FINISH_REASONS = {
    FinishReason.STOP: "STOP",
    FinishReason.LENGTH: "MAX_TOKENS",
    FinishReason.REPETITION: "MAX_TOKENS",
}


def gemini_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of Google's dialect, with our remedy; its clients show only the message."""
    error = redacted_error(error)
    code, message = http_status(error), full_message(error)
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        message = (
            f"The input token count ({error.num_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.max_length}); {error.remedy}"
        )
    return {"error": {"code": code, "message": message, "status": _STATUSES.get(code, "INVALID_ARGUMENT")}}


router = Router(prefix="/v1beta", tag="Gemini", errors=ErrorFormat(gemini_error, http_status))


@router.post("/models/{model}:generateContent")
@rules(INFERENCE)
async def generate_content(
    model: str, body: GenerateContentBody, services: SharedServices, request: Request
) -> Response:
    """Answer a chat, whole."""
    return await _handle(model, body, services, request, streams=None)


@router.post(
    "/models/{model}:streamGenerateContent", responses=documented("text/event-stream", "application/json")
)
@rules(INFERENCE)
async def stream_generate_content(
    model: str,
    body: GenerateContentBody,
    services: SharedServices,
    request: Request,
    alt: Literal["json", "sse"] = "json",
) -> Response:
    """Answer a chat as a JSON array that grows, or as server-sent events."""
    streams = EventStream if alt == "sse" else _ArrayStream
    return await _handle(model, body, services, request, streams=streams)


async def _handle(
    name: str,
    body: GenerateContentBody,
    services: Services,
    request: Request,
    *,
    streams: type[EventStream] | None,
) -> Response:
    async def answer(model: TextModel) -> Response:
        return await handle_generation(
            _GeminiRequest(body=body, model=model, stream=streams is not None),
            services,
            request,
            frames=_ArrayItems if streams is _ArrayStream else _Events,
            answer=_answer,
            stream_response=streams or EventStream,
        )

    if services.repository.on_demand is not None:  # an invalid request loads nothing
        body.check()
        with named_as(body.names):
            body.generation_config.params()
    ping = b"\n" if streams is _ArrayStream else PING
    return await answer_when_loaded(services, name, answer, streams=streams, ping=lambda: ping)


@router.post("/models/{model}:countTokens")
@rules(INFERENCE)
async def count_tokens(model: str, body: CountTokensBody, services: SharedServices) -> dict[str, int]:
    """Count the tokens of a prompt."""
    found = await services.text_model(model)
    counting = found.run_soon(lambda: len(found.encode(body.prompt().chat())), compiles=False)
    return {"totalTokens": await asyncio.wrap_future(counting)}


@router.get("/models")
@rules(METADATA)
async def models(services: SharedServices) -> dict[str, Any]:
    """List the models."""
    return {"models": [_listed(model) for model in services.repository.listed_models]}


@router.get("/models/{model}")
@rules(METADATA)
async def describe_model(model: str, services: SharedServices) -> dict[str, Any]:
    """Describe one model."""
    for listed in services.repository.listed_models:
        if listed.name == model:
            return _listed(listed)
    return _described(services.repository.text_model(model))


def _listed(listed: ListedModel) -> dict[str, Any]:
    if listed.model is not None:
        return _described(listed.model)
    return {
        "name": f"models/{listed.name}",
        "displayName": listed.name,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _described(model: TextModel) -> dict[str, Any]:
    names = {"temperature": "temperature", "top_p": "topP", "top_k": "topK"}
    defaults = model.default_sampling_params
    return {
        "name": f"models/{model.name}",
        "displayName": model.name,
        "inputTokenLimit": model.max_length,
        "outputTokenLimit": model.max_length,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
        "thinking": model.reasons,
        **{written: defaults[name] for name, written in names.items() if name in defaults},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _GeminiRequest:
    """One request, as `GenerationBody`: the body, and the model that it is for."""

    body: GenerateContentBody
    model: TextModel
    stream: bool = False

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def return_progress(self) -> bool | None:
        return self.body.generation_config.return_progress

    @property
    def num_choices(self) -> int:
        return self.body.generation_config.candidate_count or 1

    def check(self) -> None:
        self.body.check()

    def prompts(self) -> list[Chat]:
        return [self.body.chat()]

    def params(self) -> SamplingParams:
        return self.body.generation_config.params()

    def names(self) -> Mapping[str, str]:
        return self.body.names()

    def ignored(self, submitted: SubmittedRequest) -> list[str]:
        names = self.names()
        reasoning = submitted.unused_reasoning(self.body.generation_config.asked_reasoning())
        unused = (names.get(name, name) for name in unused_parameters(submitted.params))
        return [*self.body.unused(), *reasoning, *unused]


class _CandidateReader:
    """Reads one candidate, part by part, and writes what each part adds to it.

    Attributes:
        usage: the tokens of the candidate; None: it has not ended.
    """

    def __init__(self, submitted: SubmittedRequest, generation: _GeminiRequest, *, index: int) -> None:
        config = generation.body.generation_config
        self._index = index
        self._parser = submitted.message_parser()
        self._scores = None
        if config.response_logprobs:
            self._scores = content_scores(submitted, submitted.message_parser())
        self._shows_thoughts = bool(config.thinking_config.include_thoughts)
        self._calls: list[ToolCallDelta] = []  # clients expect whole calls
        self.usage: Usage | None = None

    def read(self, part: Delta | Completion) -> dict[str, Any]:
        """Return the fields of the candidate that a delta, or a whole completion, adds; {}: none."""
        read = self._parser.read(part) if self._parser else MessageDelta(content=part.text)
        self._calls += read.tool_calls
        parts: list[dict[str, Any]] = []
        if read.reasoning and self._shows_thoughts:
            parts.append({"text": read.reasoning, "thought": True})
        if read.content:
            parts.append({"text": read.content})
        candidate: dict[str, Any] = {}
        if part.finish_reason is not None:
            self.usage = part.usage
            parts += self._called()
            candidate = self._ending(part, part.finish_reason)
        if self._scores is not None and (tokens := self._scores.answer(part)):
            candidate["logprobsResult"] = {
                "chosenCandidates": [_token(token.own) for token in tokens],
                "topCandidates": [{"candidates": [*map(_token, token.top)]} for token in tokens],
            }
        if parts or candidate:
            candidate |= {"content": {"parts": parts, "role": "model"}, "index": self._index}
        return candidate

    @property
    def num_thought_tokens(self) -> int:
        """How many tokens of the candidate are reasoning."""
        return self._parser.num_reasoning_tokens if self._parser else 0

    def _called(self) -> list[dict[str, Any]]:
        """Return the parts of the calls, without one whose arguments are not complete."""
        calls = joined_calls(self._calls)
        if self._parser is not None and self._parser.within_call:
            calls = calls[:-1]
        return [
            {"functionCall": {"id": call.id, "name": call.name, "args": arguments_so_far(call.arguments)}}
            for call in calls
        ]

    def _ending(self, part: Delta | Completion, reason: FinishReason) -> dict[str, Any]:
        written = _FINISH_REASONS[reason]
        if written == "STOP" and self._parser is not None and self._parser.within_call:
            return {"finishReason": "MALFORMED_FUNCTION_CALL"}
        if written == "MAX_TOKENS" and part.stop_reason is not None:
            return {"finishReason": written, "finishMessage": str(part.stop_reason)}
        return {"finishReason": written}


def _token(token: NamedToken) -> dict[str, Any]:
    return {"token": token.name, "logProbability": token.logprob}


def _readers(submitted: SubmittedRequest, generation: _GeminiRequest) -> list[_CandidateReader]:
    return [_CandidateReader(submitted, generation, index=index) for index in range(generation.num_choices)]


def _head(submitted: SubmittedRequest) -> dict[str, Any]:
    """Return the fields of an answer, and of each of its parts, that name the model and the answer."""
    return {"modelVersion": submitted.model.name, "responseId": submitted.id}


def _usage(submitted: SubmittedRequest, readers: Sequence[_CandidateReader]) -> dict[str, Any]:
    """Return the usage and timings of an answer whose candidates have all ended; {}: one of them has not."""
    usages = [reader.usage for reader in readers if reader.usage is not None]
    if len(usages) < len(readers):
        return {}
    num_answer = sum(usage.completion_tokens for usage in usages)
    num_thoughts = sum(reader.num_thought_tokens for reader in readers)
    counts = {"thoughtsTokenCount": num_thoughts, "cachedContentTokenCount": usages[0].cached_tokens}
    return {
        "usageMetadata": {
            "promptTokenCount": usages[0].prompt_tokens,
            "candidatesTokenCount": num_answer - num_thoughts,
            "totalTokenCount": usages[0].prompt_tokens + num_answer,
            **{name: count for name, count in counts.items() if count},
        },
        **timings_fields(usages, num_drawn=len(readers)),
        **requested_fields(submitted, usages),
    }


def _answer(submitted: SubmittedRequest, generation: _GeminiRequest, deltas: list[Delta]) -> Response:
    readers = _readers(submitted, generation)
    completions = join_choices(deltas)
    candidates = [reader.read(part) for reader, part in zip(readers, completions, strict=True)]
    return AnswerResponse({"candidates": candidates, **_usage(submitted, readers), **_head(submitted)})


class _Events(Frames):
    """The server-sent events of a streamed answer."""

    def __init__(self, submitted: SubmittedRequest, generation: _GeminiRequest) -> None:
        self._submitted = submitted
        self._readers = _readers(submitted, generation)
        self._head = _head(submitted)

    def delta(self, delta: Delta) -> bytes:
        candidate = self._readers[delta.choice].read(delta)
        if not candidate:
            return b""
        usage = _usage(self._submitted, self._readers) if delta.finish_reason is not None else {}
        return self._written({"candidates": [candidate], **usage, **self._head})

    def progress(self, progress: PromptProgress) -> bytes:
        return self._written({"promptProgress": prompt_progress(progress), **self._head})

    def error(self, error: GenserveError) -> bytes:
        return self._written(gemini_error(error))

    def _written(self, part: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(part)


class _ArrayItems(_Events):
    """The items of an answer that is streamed as a JSON array."""

    _separator = b"["

    def end(self) -> bytes:
        return b"]"

    def ping(self) -> bytes:
        return b"\n"

    def _written(self, part: dict[str, Any]) -> bytes:
        separator, self._separator = self._separator, b",\n"
        return separator + orjson.dumps(part)


class _ArrayStream(EventStream):
    """An answer that is streamed as a JSON array."""

    content_type = "application/json"

    @staticmethod
    def framed_error(document: bytes) -> bytes:
        return b"[%b]" % document
