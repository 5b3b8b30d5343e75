"""Anthropic's dialect: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from genserve.completion import (
    Completion,
    Delta,
    FinishReason,
    PromptProgress,
    ToolCallDelta,
    Usage,
    ends_with_stop_string,
    join_deltas,
)
from genserve.errors import ContextLengthExceeded, GenserveError
from genserve.redaction import redacted_error
from genserve.request_context import current_request
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.anthropic.messages_body import MessagesBody, PromptFields
from genserve.server.dialects.generation_handler import (
    AnswerResponse,
    SubmittedRequest,
    handle_generation,
)
from genserve.server.dialects.timings import prompt_progress, requested_fields, timings_fields
from genserve.server.error_formats import ErrorFormat
from genserve.server.error_statuses import http_status
from genserve.server.http.sse_response import EventStream, Frames, documented, event
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices
from genserve.text.message_parser import MessageParser, arguments_so_far, parsed_message, read_delta

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# There is no word for a passed deadline, nor for a text that repeats itself: `stop_details` has ours.
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.REPETITION: "max_tokens",
}
_PING = event('{"type": "ping"}', name="ping")
# Reasoning is not signed; clients send back only reasoning that has a signature.
_SIGNATURE = "unsigned"


def anthropic_error(error: GenserveError) -> dict[str, Any]:
    """Return the error body of Anthropic's dialect, with our remedy."""
    error = redacted_error(error)
    message = error.message
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        # Exactly Anthropic's words: Claude Code reads the numbers out of them, and compacts its chat.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_length} maximum"
    kind = _ERROR_TYPES.get(http_status(error), "api_error")
    remedy = {"remedy": error.remedy} if error.remedy else {}
    return {
        "type": "error",
        "error": {"type": kind, "message": message, **remedy},
        "request_id": current_request().id or None,
    }


router = Router(prefix="/v1/messages", tag="Anthropic", errors=ErrorFormat(anthropic_error, http_status))


@router.post("", responses=documented("text/event-stream"))
@rules(INFERENCE, rejects_early=True)
async def messages(body: MessagesBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    response = await handle_generation(
        body,
        services,
        request,
        frames=_MessageFrames,
        answer=_answer,
        stream_response=_MessageStream,
        ping=_PING,
    )
    response.headers["request-id"] = current_request().id  # Anthropic's name of it
    return response


@router.post("/count_tokens")
@rules(INFERENCE)
async def count_tokens(body: PromptFields, services: SharedServices) -> dict[str, int]:
    """Count the tokens of a prompt."""
    model = await services.text_model(body.model)
    counting = model.run_soon(lambda: len(model.encode(body.chat())), compiles=False)
    return {"input_tokens": await asyncio.wrap_future(counting)}


def _head(submitted: SubmittedRequest) -> dict[str, Any]:
    """Return the first fields of an answer."""
    return {
        "id": f"msg_{submitted.id}",
        "type": "message",
        "role": "assistant",
        "model": submitted.model.name,
    }


def _usage(usage: Usage, parser: MessageParser | None = None) -> dict[str, Any]:
    """Return the usage; `parser` has read the answer."""
    num_thinking = parser.num_reasoning_tokens if parser is not None else 0
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **({"output_tokens_details": {"thinking_tokens": num_thinking}} if num_thinking else {}),
    }


def _ending(
    part: Delta | Completion, parser: MessageParser | None, body: MessagesBody
) -> dict[str, Any]:
    """Return the fields that say why an answer ended."""
    assert part.finish_reason is not None
    assert part.usage is not None
    reason = _STOP_REASONS[part.finish_reason]
    is_full = part.usage.completion_tokens >= body.max_tokens
    if parser is not None and parser.ends_with_calls(part.finish_reason):
        reason = "tool_use"
    elif ends_with_stop_string(part):
        reason = "stop_sequence"
    elif part.finish_reason is FinishReason.LENGTH and part.stop_reason is None and not is_full:
        reason = "model_context_window_exceeded"
    stop = str(part.stop_reason) if reason == "stop_sequence" else None
    ending: dict[str, Any] = {"stop_reason": reason, "stop_sequence": stop}
    if reason == "max_tokens" and part.stop_reason is not None:
        ending["stop_details"] = {"type": part.stop_reason}
    return ending


def _answer(submitted: SubmittedRequest, body: MessagesBody, deltas: list[Delta]) -> Response:
    completion, parser = join_deltas(deltas), submitted.message_parser()
    message = parsed_message(parser, completion)
    content: list[dict[str, Any]] = []
    if thinking := message.reasoning_content:
        shown = "" if body.hides_thinking else thinking
        content.append({"type": "thinking", "thinking": shown, "signature": _SIGNATURE})
    if message.content:
        content.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        called = {"id": call.id, "name": call.name, "input": arguments_so_far(call.arguments)}
        content.append({"type": "tool_use", **called})
    ending = _ending(completion, parser, body)
    usage = _usage(completion.usage, parser)
    timings = timings_fields([completion.usage]) | requested_fields(submitted, [completion.usage])
    return AnswerResponse(_head(submitted) | {"content": content, **ending, "usage": usage, **timings})


# What a block begins with, by its type; its deltas; and what comes before its end.
_EMPTY_BLOCKS = {
    "thinking": '{"type": "thinking", "thinking": "", "signature": ""}',
    "text": '{"type": "text", "text": ""}',
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class _MessageStream(EventStream):
    """A streamed answer, whose errors have a name."""

    @staticmethod
    def framed_error(document: bytes) -> bytes:
        return event(document.decode(), name="error")


class _MessageFrames(Frames):
    """The events of a streamed answer."""

    def __init__(self, submitted: SubmittedRequest, body: MessagesBody) -> None:
        self._submitted = submitted
        self._body = body
        self._parser = submitted.message_parser()
        self._head = _head(submitted)
        self._num_prompt_tokens = len(submitted.prompts[0])
        self._kind = ""  # the kind of the block that is being written; empty: none
        self._index = -1  # the index of that block
        self._call = -1  # the index of the tool call that is being written
        self._before = self._after = ""  # what surrounds the text of a delta

    def start(self, *, num_cached_tokens: int) -> bytes:
        usage = _usage(
            Usage(prompt_tokens=self._num_prompt_tokens, completion_tokens=0, cached_tokens=num_cached_tokens)
        )
        ending = {"stop_reason": None, "stop_sequence": None}
        message = self._head | {"content": [], **ending, "usage": usage}
        return _event("message_start", f'"message": {json.dumps(message)}')

    def delta(self, delta: Delta) -> bytes:
        read = read_delta(self._parser, delta)
        written = b""
        if read.reasoning:
            written += self._begin("thinking")
            if not self._body.hides_thinking:
                written += self._added(read.reasoning)
        if read.content:
            written += self._begin("text") + self._added(read.content)
        for call in read.tool_calls:
            written += self._called(call)
        return written if delta.finish_reason is None else written + self._finish(delta)

    def error(self, error: GenserveError) -> bytes:
        return event(json.dumps(anthropic_error(error)), name="error")

    def progress(self, progress: PromptProgress) -> bytes:
        return _event("ping", f'"prompt_progress": {json.dumps(prompt_progress(progress))}')

    def ping(self) -> bytes:
        return _PING

    def _called(self, call: ToolCallDelta) -> bytes:
        written = b""
        if call.index != self._call:
            self._call = call.index
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            written = self._begin("tool_use", block=json.dumps(block))
        return written + self._added(call.arguments) if call.arguments else written

    def _begin(self, kind: str, *, block: str = "") -> bytes:
        """Return the events that begin a block, unless one of its kind is being written."""
        if kind == self._kind and not block:
            return b""
        written = self._close()
        self._kind = kind
        self._index += 1
        name, field = _DELTAS[kind]
        self._before = (
            'event: content_block_delta\ndata: {"type": "content_block_delta", '
            f'"index": {self._index}, "delta": {{"type": "{name}", "{field}": '
        )
        block = block or _EMPTY_BLOCKS[kind]
        return written + _event("content_block_start", f'"index": {self._index}, "content_block": {block}')

    def _added(self, text: str) -> bytes:
        return f"{self._before}{json.dumps(text)}}}}}\n\n".encode()

    def _close(self) -> bytes:
        """Return the events that end the block that is being written."""
        if not self._kind:
            return b""
        kind, self._kind = self._kind, ""
        stop = _event("content_block_stop", f'"index": {self._index}')
        if kind != "thinking":
            return stop
        signature = f'{{"type": "signature_delta", "signature": "{_SIGNATURE}"}}'
        return _event("content_block_delta", f'"index": {self._index}, "delta": {signature}') + stop

    def _finish(self, delta: Delta) -> bytes:
        assert delta.usage is not None
        ending = json.dumps(_ending(delta, self._parser, self._body))
        rest = {"usage": _usage(delta.usage, self._parser), **timings_fields([delta.usage])}
        rest |= requested_fields(self._submitted, [delta.usage])
        return (
            self._close()
            + _event("message_delta", f'"delta": {ending}, {json.dumps(rest)[1:-1]}')
            + event('{"type": "message_stop"}', name="message_stop")
        )


def _event(name: str, fields: str) -> bytes:
    return event(f'{{"type": "{name}", {fields}}}', name=name)
