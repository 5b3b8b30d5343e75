"""OpenAI's Responses dialect: `/v1/responses`, with earlier responses from the server's store."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from genserve.completion import Delta, FinishReason, Usage
from genserve.errors import GenserveError, InvalidRequest, Overloaded
from genserve.server.error_responses import OPENAI_ERRORS, ErrorFormats, openai_error
from genserve.server.generation_handler import SubmittedRequest, handle_generation
from genserve.server.request_body import StrictRoute
from genserve.server.routes.logprob_formats import ScoredToken, TokenScores
from genserve.server.routes.response_items import ItemStatus, OutputItems
from genserve.server.routes.responses_body import ResponseRequest, ResponsesBody
from genserve.server.services import SharedServices
from genserve.server.sse_response import Frames, documented

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI Responses"])
ERRORS: ErrorFormats = {"/v1/": OPENAI_ERRORS}

_COMPLETE = (FinishReason.END_OF_SEQUENCE, FinishReason.STOP_STRING)


@router.post("/responses", responses=documented("text/event-stream"))
async def create_response(body: ResponsesBody, services: SharedServices, request: Request) -> Response:
    """Answer the items of a conversation, whole or as server-sent events."""
    max_bytes = services.settings.max_body_bytes
    generation = ResponseRequest(body=body, store=services.responses, max_bytes=max_bytes)
    return await handle_generation(generation, services, request, frames=_ResponseFrames, answer=_answer)


@router.get("/responses/{response_id}")
async def retrieve_response(
    response_id: str,
    services: SharedServices,
    *,
    stream: Annotated[bool, Query(description="Not supported.")] = False,
) -> Response:
    """Return a stored response."""
    if stream:
        message = "stream is not supported for a stored response"
        raise InvalidRequest(message, field="stream", remedy="leave it out")
    return _json(services.responses.get(response_id).body)


@router.delete("/responses/{response_id}")
async def delete_response(response_id: str, services: SharedServices) -> dict[str, Any]:
    """Delete a stored response."""
    services.responses.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/responses/{response_id}/cancel")
async def cancel_response(response_id: str, services: SharedServices) -> Response:
    """Reject the request: only a response in the background can be cancelled, and none runs there."""
    services.responses.get(response_id)
    message = f"the response {response_id!r} does not run in the background"
    raise InvalidRequest(message, remedy="close the connection of a running response to cancel it")


@router.get("/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    services: SharedServices,
    after: Annotated[str | None, Query(description="The id of the item before the first one.")] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="The number of items.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the newest item first.")] = "desc",
) -> dict[str, Any]:
    """List the input items of a stored response, with those of the responses before it."""
    items = json.loads(services.responses.get(response_id).inputs)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after {after[:64]!r} is not the id of an input item", field="after")
        items = items[places[0] + 1 :]
    listed = items[:limit]
    return {
        "object": "list",
        "data": listed,
        "first_id": listed[0]["id"] if listed else "",
        "last_id": listed[-1]["id"] if listed else "",
        "has_more": len(items) > limit,
    }


class _ResponseFrames(Frames):
    """The events of a streamed response; a whole response is what they add up to.

    Attributes:
        response: the response object as it is.
    """

    def __init__(self, submitted: SubmittedRequest, request: ResponseRequest) -> None:
        self.response = request.response(submitted)
        self._request = request
        self._items = OutputItems()
        self._parser = submitted.message_parser()
        self._scores: TokenScores | None = None
        if request.body.has_logprobs:
            self._scores = TokenScores(request.body.detokenizer(submitted.model.tokenizer))
        self._scored: list[ScoredToken] = []    # tokens whose text is not in the message yet

    def start(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._items.event(kind, {"response": self.response}) for kind in kinds)

    def delta(self, delta: Delta) -> bytes:
        if self._scores is not None:
            self._scored += self._scores.answer(delta)
        if self._parser is None:
            text = delta.text
            events = self._items.add_content(text, scores=self._scores_of(text)) if text else b""
        else:
            read = self._parser.read(delta)
            events = self._items.add(read, scores=self._scores_of(read.content))
        if delta.finish_reason is None:
            return events
        assert delta.usage is not None
        return events + self._ending(delta.finish_reason, delta.usage)

    def error(self, error: GenserveError) -> bytes:
        fields = openai_error(error)["error"]
        code = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        elif isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        shown = {name: fields[name] for name in ("code", "message", "param")}
        events = self._items.event("error", shown)
        return events + self._end("failed", error={"code": code, "message": fields["message"]})

    def _scores_of(self, content: str) -> list[ScoredToken]:
        """Return the tokens of new content; those before it were reasoning, calls, or had no text."""
        if not content:
            return []
        scored, self._scored = self._scored, []
        num_chars, first = 0, len(scored)
        while first and num_chars < len(content):
            first -= 1
            num_chars += len(scored[first].text)
        return scored[first:]

    def _ending(self, reason: FinishReason, usage: Usage) -> bytes:
        status: ItemStatus = "completed" if reason in _COMPLETE else "incomplete"
        is_cut = self._parser is not None and self._parser.within_call      # by a stop string, too
        events = self._items.close("incomplete" if is_cut else status)
        num_reasoning = self._parser.num_reasoning_tokens if self._parser else 0
        self.response["usage"] = _usage(usage, num_reasoning=num_reasoning)
        if status == "completed":
            return events + self._end(status, completed_at=int(time.time()))
        return events + self._end(status, incomplete_details={"reason": "max_output_tokens"})

    def _end(self, status: str, **fields: Any) -> bytes:
        self.response |= {"status": status, "output": self._items.items, **fields}
        if status != "failed":
            self._request.save(self.response)
        return self._items.event(f"response.{status}", {"response": self.response})


def _usage(usage: Usage, *, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _answer(submitted: SubmittedRequest, generation: ResponseRequest, deltas: list[Delta]) -> Response:
    frames = _ResponseFrames(submitted, generation)
    for delta in deltas:
        frames.delta(delta)
    return _json(json.dumps(frames.response).encode())


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
