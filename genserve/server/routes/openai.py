"""OpenAI's dialect: `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from genserve.completion import Completion, Delta, FinishReason, ToolCallDelta
from genserve.prompt import Message
from genserve.sampling.defaults import chat_sampling_params
from genserve.server.error_responses import OPENAI_ERRORS, ErrorFormats
from genserve.server.generation_handler import AnswerResponse, SubmittedRequest, handle_generation
from genserve.server.request_body import StrictRoute
from genserve.server.routes.logprob_formats import TokenScores, prompt_logprobs
from genserve.server.routes.openai_chat_body import ChatBody
from genserve.server.routes.openai_protocol import FINISH_REASONS, OpenAIFrames, choose, head, reasoning_usage
from genserve.server.services import SharedServices
from genserve.server.sse_response import documented
from genserve.text.message_parser import MessageParser, parsed_message
from genserve.textmodel.text_model import TextModel

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI"])
ERRORS: ErrorFormats = {"/v1/": OPENAI_ERRORS}


@router.post("/chat/completions", responses=documented("text/event-stream"))
async def chat_completions(body: ChatBody, services: SharedServices, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    return await handle_generation(body, services, request, frames=_ChatFrames, answer=_answer)


@router.get("/models")
async def models(services: SharedServices) -> dict[str, Any]:
    """List the models that generate text, with the fields of Anthropic's list, too."""
    listed = [_model(model) for model in services.repository.text_models]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
    return {"object": "list", "data": listed, "has_more": False, **ends}


@router.get("/models/{name:path}")
async def model(name: str, services: SharedServices) -> dict[str, Any]:
    """Describe one model."""
    return _model(services.repository.text_model(name))


class _ChatFrames(OpenAIFrames):
    """The chunks of a streamed chat."""

    def __init__(self, submitted: SubmittedRequest, body: ChatBody) -> None:
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids = _prompt_ids(submitted, body)
        self._scores = [_scores(submitted, body) for _ in range(body.num_choices)]
        self._parsers = [_message_parser(submitted, body) for _ in range(body.num_choices)]
        super().__init__(submitted, body, kind="chat.completion.chunk", id_prefix="chatcmpl")

    def start(self) -> bytes:
        role = '{"role": "assistant", "content": ""}'
        top_fields = "".join(f', "{name}": {ids}' for name, ids in self._prompt_ids.items())
        chunks = (self._chunk(choice, role, top_fields=top_fields) for choice in range(len(self._scores)))
        return b"".join(chunks)

    def delta(self, delta: Delta) -> bytes:
        extra = f', "token_ids": {list(delta.token_ids)}' if self._token_ids else ""
        scores, chunks, logprobs = self._scores[delta.choice], b"", "null"
        if scores is not None:
            logprobs = json.dumps(_logprobs(scores, delta))
        parser = self._parsers[delta.choice]
        self.count(delta)
        for added in _added(parser, delta) or (['{"content": ""}'] if extra or scores is not None else []):
            chunks += self._chunk(delta.choice, added, logprobs=logprobs, extra=extra)
            logprobs, extra = "null", ""    # only in the first chunk of a delta
        if delta.finish_reason is not None:
            reason = _finish_reason(parser, delta.finish_reason)
            ending = f'"{reason}", "stop_reason": {json.dumps(delta.stop_reason)}'
            chunks += self._chunk(delta.choice, "{}", finish_reason=ending)
            num_reasoning = parser.num_reasoning_tokens if parser else 0
            chunks += self.ending(delta, num_reasoning_tokens=num_reasoning)
        return chunks

    def _chunk(
        self,
        choice: int,
        delta: str,
        *,
        logprobs: str = "null",
        finish_reason: str = "null",
        extra: str = "",
        top_fields: str = "",
    ) -> bytes:
        fields = f'"delta": {delta}, "logprobs": {logprobs}, "finish_reason": {finish_reason}{extra}'
        return self.chunk(choice, fields, top_fields=top_fields)


def _answer(submitted: SubmittedRequest, body: ChatBody, deltas: list[Delta]) -> Response:
    completions, usage = choose(body, deltas)
    choices, num_reasoning = [], 0
    for index, completion in enumerate(completions):
        parser = _message_parser(submitted, body)
        choices.append(_choice(index, completion, submitted, body, parser=parser))
        num_reasoning += parser.num_reasoning_tokens if parser else 0
    usage |= reasoning_usage(num_reasoning)
    answer = head(submitted, "chat.completion", id_prefix="chatcmpl") | {"choices": choices, "usage": usage}
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
    return {
        "index": index,
        "message": _message(message),
        "logprobs": None if scores is None else _logprobs(scores, completion),
        "finish_reason": _finish_reason(parser, completion.finish_reason),
        "stop_reason": completion.stop_reason,
        **token_ids,
    }


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [call.as_dict() for call in message.tool_calls]
    return fields


def _message_parser(submitted: SubmittedRequest, body: ChatBody) -> MessageParser | None:
    parser = submitted.message_parser()
    if parser is None or body.separate_reasoning is not False:
        return parser
    return parser.without_reasoning()


def _finish_reason(parser: MessageParser | None, reason: FinishReason) -> str:
    calls = parser is not None and parser.ends_with_calls(reason)
    return "tool_calls" if calls else FINISH_REASONS[reason]


def _added(parser: MessageParser | None, delta: Delta) -> list[str]:
    """Return what a delta adds to the message: one JSON object for each of its chunks."""
    if parser is None:
        return [f'{{"content": {json.dumps(delta.text)}}}'] if delta.text else []
    read = parser.read(delta)
    fields = (("reasoning_content", read.reasoning), ("content", read.content))
    added = [f'{{"{field}": {json.dumps(text)}}}' for field, text in fields if text]
    return added + [f'{{"tool_calls": [{_tool_call(call)}]}}' for call in read.tool_calls]


def _tool_call(call: ToolCallDelta) -> str:
    arguments = f'"arguments": {json.dumps(call.arguments)}'
    if not call.name:
        return f'{{"index": {call.index}, "function": {{{arguments}}}}}'
    function = f'{{"name": {json.dumps(call.name)}, {arguments}}}'
    call_id = json.dumps(call.id)
    return f'{{"index": {call.index}, "id": {call_id}, "type": "function", "function": {function}}}'


def _scores(submitted: SubmittedRequest, body: ChatBody) -> TokenScores | None:
    by_id = bool(body.return_tokens_as_token_ids)
    return TokenScores(body.detokenizer(submitted.model.tokenizer), by_id=by_id) if body.logprobs else None


def _logprobs(scores: TokenScores, part: Delta | Completion) -> dict[str, Any]:
    return {"content": [token.as_dict() for token in scores.answer(part)], "refusal": None}


def _model(model: TextModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.loaded_s),
        "owned_by": "genserve",
        "max_model_len": model.max_length,
        "default_sampling_params": dict(model.default_sampling_params),
        "chat_sampling_params": chat_sampling_params(model.default_sampling_params),
        **model.plugins.described(),
        # Anthropic's
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(int(model.loaded_s), UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.max_length,
        "max_tokens": model.max_length,
    }
