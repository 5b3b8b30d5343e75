"""OpenAI's dialect: `/v1/chat/completions` and `/v1/models`, and beside them what an API key has used."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from genserve.completion import Completion, Delta, FinishReason
from genserve.errors import InvalidRequest
from genserve.prompt import Message
from genserve.repository.on_demand import LoadedModel
from genserve.repository.served_encoders import ListedEncoder
from genserve.repository.served_models import ListedModel
from genserve.request_context import current_request
from genserve.sampling.defaults import chat_sampling_params
from genserve.server.access.access_control import INFERENCE, METADATA
from genserve.server.access.key_usage import KeyTotals
from genserve.server.dialects.generation_handler import AnswerResponse, SubmittedRequest, handle_generation
from genserve.server.dialects.logprob_formats import (
    ContentScores,
    TokenScores,
    content_scores,
    prompt_logprobs,
)
from genserve.server.dialects.openai.chat_body import ChatBody
from genserve.server.dialects.openai.chat_tools import CallChunks, written_call
from genserve.server.dialects.openai.protocol import (
    OpenAIFrames,
    choose,
    head,
    usage_fields,
)
from genserve.server.error_formats import OPENAI_ERRORS
from genserve.server.http.request_body import TolerantBody
from genserve.server.http.sse_response import documented
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices
from genserve.text.message_parser import MessageParser, parsed_message
from genserve.textmodel.text_model import TextModel

router = Router(prefix="/v1", tag="OpenAI", errors=OPENAI_ERRORS)


@router.post("/chat/completions", responses=documented("text/event-stream"))
@rules(INFERENCE, rejects_early=True)
async def chat_completions(body: ChatBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    return await handle_generation(body, services, request, frames=_ChatFrames, answer=_answer)


class ControlBody(TolerantBody):
    """What is to happen to an answer that runs, as llama-server's clients write it."""

    id: str = Field(description="The id of the answer, in any dialect, or the `X-Request-Id` of its request.")
    action: Literal["reasoning_end"] = Field(description="`reasoning_end`: the model answers now.")


@router.post("/chat/completions/control")
@rules(INFERENCE)
async def control_answer(body: ControlBody, services: SharedServices) -> dict[str, Any]:
    """End the reasoning of an answer that runs: the content follows.

    Reasoning that has not begun ends as soon as it does. An answer without reasoning goes on as it is.
    """
    stream = services.answers.find(body.id, key=current_request().key.name)
    request = stream.requests[0]
    if not services.repository.text_model(request.model).builder.reasoning.can_end(request.params):
        return {"success": False, "message": "the answer has no reasoning that can be ended"}
    stream.end_reasoning()
    return {"success": True}


@router.get("/models")
@rules(METADATA)
async def models(services: SharedServices) -> dict[str, Any]:
    """List the models that generate text, their adapters, and models of vectors, with Anthropic's fields."""
    repository = services.repository
    listed = [_listed(model) for model in repository.listed_models]
    listed += [_encoder(model) for model in repository.encoders.listed()]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
    return {"object": "list", "data": listed, "has_more": False, **ends}


@router.get("/models/{name:path}")
@rules(METADATA)
async def model(name: str, services: SharedServices) -> dict[str, Any]:
    """Describe one model."""
    repository = services.repository
    for listed in repository.listed_models:
        if listed.name == name:
            return _listed(listed)
    for encoder in repository.encoders.listed():
        if encoder.model.name == name:
            return _encoder(encoder)
    return _model(repository.text_model(name))


@router.get("/usage")
@rules(METADATA)
async def usage(services: SharedServices) -> dict[str, Any]:
    """Say what the API key of the request has used since the server started."""
    key = current_request().key
    if not key.name:
        raise InvalidRequest(
            "the request has no API key whose usage is counted", remedy="GET /metrics counts all requests"
        )
    used = services.keys.usages.get(key.name)
    totals = KeyTotals() if used is None else used.totals()
    return {"object": "usage", "key": key.name, "weight": key.weight, **totals._asdict()}


class _ChatFrames(OpenAIFrames):
    """The chunks of a streamed chat."""

    no_fields = '"delta": {}, "logprobs": null, "finish_reason": null'

    def __init__(self, submitted: SubmittedRequest, body: ChatBody) -> None:
        self._hides_reasoning = body.hides_reasoning
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids = _prompt_ids(submitted, body)
        self._scores = [_scores(submitted, body) for _ in range(body.num_choices)]
        self._parsers = [_message_parser(submitted, body) for _ in range(body.num_choices)]
        self._calls = [CallChunks(body.offer.custom) for _ in range(body.num_choices)]
        super().__init__(submitted, body, kind="chat.completion.chunk", id_prefix="chatcmpl")

    def start(self, *, num_cached_tokens: int) -> bytes:
        super().start(num_cached_tokens=num_cached_tokens)
        role = '{"role": "assistant", "content": ""}'
        top_fields = "".join(f', "{name}": {ids}' for name, ids in self._prompt_ids.items())
        chunks = (self._chunk(choice, role, top_fields=top_fields) for choice in range(len(self._scores)))
        return b"".join(chunks)

    def delta(self, delta: Delta) -> bytes:
        extra = f', "token_ids": {list(delta.token_ids)}' if self._token_ids else ""
        scores, chunks, logprobs = self._scores[delta.choice], b"", "null"
        if scores is not None and (listed := _logprobs(scores, delta))["content"]:
            logprobs = json.dumps(listed)
        parser = self._parsers[delta.choice]
        self.count(delta)
        calls = self._calls[delta.choice]
        added = _added(parser, calls, delta, hides_reasoning=self._hides_reasoning)
        if not added and (extra or logprobs != "null"):
            added = [("content", '""')]
        for place, (field, value) in enumerate(added, start=1):
            written = f'{{"{field}": {value}}}'
            if field == "content" or place == len(added):
                chunks += self._chunk(delta.choice, written, logprobs=logprobs, extra=extra)
                logprobs, extra = "null", ""    # only in one chunk of a delta
            else:
                chunks += self._chunk(delta.choice, written)
        if delta.finish_reason is not None:
            reason = _finish_reason(parser, delta.finish_reason)
            ending = f'"{reason}", "stop_reason": {json.dumps(delta.stop_reason)}'
            fields = f'"delta": {{}}, "logprobs": null, "finish_reason": {ending}'
            num_reasoning = parser.num_reasoning_tokens if parser else 0
            chunks += self.last_chunk(delta, fields, num_reasoning_tokens=num_reasoning)
        return chunks

    def _chunk(
        self,
        choice: int,
        delta: str,
        *,
        logprobs: str = "null",
        extra: str = "",
        top_fields: str = "",
    ) -> bytes:
        fields = f'"delta": {delta}, "logprobs": {logprobs}, "finish_reason": null{extra}'
        return self.chunk(choice, fields, top_fields=top_fields)


def _answer(submitted: SubmittedRequest, body: ChatBody, deltas: list[Delta]) -> Response:
    completions, usages = choose(body, deltas)
    choices, num_reasoning = [], 0
    for index, completion in enumerate(completions):
        parser = _message_parser(submitted, body)
        choices.append(_choice(index, completion, submitted, body, parser=parser))
        num_reasoning += parser.num_reasoning_tokens if parser else 0
    usage = usage_fields(submitted, usages, num_drawn=body.num_drawn, num_reasoning_tokens=num_reasoning)
    answer = head(submitted, "chat.completion", id_prefix="chatcmpl") | {"choices": choices, **usage}
    if body.prompt_logprobs is not None:
        scores = completions[0].prompt_logprobs
        answer["prompt_logprobs"] = prompt_logprobs(submitted.model.tokenizer, submitted.prompts[0], scores)
    return AnswerResponse(answer | _prompt_ids(submitted, body))


def _prompt_ids(submitted: SubmittedRequest, body: ChatBody) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(submitted.prompts[0])} if body.return_token_ids else {}


def _choice(
    index: int,
    completion: Completion,
    submitted: SubmittedRequest,
    body: ChatBody,
    *,
    parser: MessageParser | None,
) -> dict[str, Any]:
    scores = _scores(submitted, body)
    message = parsed_message(parser, completion)
    token_ids = {"token_ids": list(completion.token_ids)} if body.return_token_ids else {}
    if body.hides_reasoning:
        message = replace(message, reasoning_content="")
    return {
        "index": index,
        "message": _message(message, body.offer.custom),
        "logprobs": None if scores is None else _logprobs(scores, completion),
        "finish_reason": _finish_reason(parser, completion.finish_reason),
        "stop_reason": completion.stop_reason,
        **token_ids,
    }


def _message(message: Message, custom: set[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [written_call(call, custom) for call in message.tool_calls]
    return fields


def _message_parser(submitted: SubmittedRequest, body: ChatBody) -> MessageParser | None:
    parser = submitted.message_parser()
    if parser is None or body.separate_reasoning is not False:
        return parser
    return parser.without_reasoning()


def _finish_reason(parser: MessageParser | None, reason: FinishReason) -> str:
    calls = parser is not None and parser.ends_with_calls(reason)
    return "tool_calls" if calls else reason


def _added(
    parser: MessageParser | None, calls: CallChunks, delta: Delta, *, hides_reasoning: bool
) -> list[tuple[str, str]]:
    """Return what a delta adds to the message: one field and its JSON for each of its chunks."""
    if parser is None:
        return [("content", json.dumps(delta.text))] if delta.text else []
    read = parser.read(delta)
    reasoning = "" if hides_reasoning else read.reasoning
    fields = (("reasoning_content", reasoning), ("content", read.content))
    added = [(field, json.dumps(text)) for field, text in fields if text]
    entries = [entry for call in read.tool_calls for entry in calls.add(call)]
    if delta.finish_reason is not None:
        entries += calls.close()
    return added + [("tool_calls", f"[{entry}]") for entry in entries]


def _scores(submitted: SubmittedRequest, body: ChatBody) -> ContentScores | TokenScores | None:
    """Return a reader of the log-probabilities of one answer; None: the request wants none.

    They are those of the content, as OpenAI defines the field; with vLLM's `return_token_ids` they are
    those of the returned ids.
    """
    if not body.logprobs:
        return None
    by_id = bool(body.return_tokens_as_token_ids)
    if body.return_token_ids:
        return TokenScores(submitted.detokenizer(), by_id=by_id)
    return content_scores(submitted, _message_parser(submitted, body), by_id=by_id)


def _logprobs(scores: ContentScores | TokenScores, part: Delta | Completion) -> dict[str, Any]:
    return {"content": [token.as_dict() for token in scores.answer(part)], "refusal": None}


def _listed(listed: ListedModel) -> dict[str, Any]:
    """Return a model that generates text, with its state."""
    if listed.model is None:
        parent = {} if listed.base is None else {"parent": listed.base}
        return _named(listed.name, _written_s(listed.weights)) | parent | _status(listed.loaded)
    if listed.loaded is None:
        status = {"status": {"value": "loaded", "memory_bytes": listed.memory_bytes}}
    else:
        status = _status(listed.loaded)
    return _model(listed.model) | status


def _encoder(listed: ListedEncoder) -> dict[str, Any]:
    model = listed.model
    fields = _named(model.name, _written_s(listed.weights), capability=model.capability)
    fields |= {} if model.max_length is None else {"max_model_len": model.max_length}
    is_resident = listed.is_ready and listed.loaded is None     # as a step of another model, or of all
    return fields if is_resident else fields | _status(listed.loaded)


def _written_s(weights: Path) -> int:
    return int(weights.stat().st_mtime) if weights.exists() else 0


def _status(loaded: LoadedModel | None) -> dict[str, Any]:
    """Return the state of a model that is loaded on demand, as llama-server writes it."""
    if loaded is None:
        status: dict[str, Any] = {"value": "unloaded"}
    else:
        status = {"value": "loaded" if loaded.is_ready else "loading", "memory_bytes": loaded.size_bytes}
        if loaded.remaining_s < math.inf:
            status["remaining_s"] = round(loaded.remaining_s)
    return {"status": status}


def _model(model: TextModel) -> dict[str, Any]:
    return {
        **_named(model.name, int(model.loaded_s)),
        **({} if model.base is None else {"parent": model.base.name}),      # vLLM's
        "max_model_len": model.max_length,
        "default_sampling_params": dict(model.default_sampling_params),
        "chat_sampling_params": chat_sampling_params(model.default_sampling_params),
        **model.plugins.described(),
        # Anthropic's
        "max_input_tokens": model.max_length,
        "max_tokens": model.max_length,
    }


def _named(name: str, created_s: int, *, capability: str = "completion") -> dict[str, Any]:
    """Return the fields of any model; `created_s`: seconds since 1970."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "genserve",
        "capabilities": [capability],   # llama-server's
        # Anthropic's
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat(),
        "lifecycle": "active",
    }
