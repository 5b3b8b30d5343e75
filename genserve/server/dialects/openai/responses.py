"""OpenAI's Responses dialect: `/v1/responses`, with earlier responses from the server's store."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request
from fastapi.responses import Response

from genserve.completion import Delta, FinishReason, PromptProgress, Usage
from genserve.errors import GenserveError, InvalidRequest, Overloaded
from genserve.request_context import current_request
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.generation_handler import SubmittedRequest, handle_generation
from genserve.server.dialects.logprob_formats import content_scores
from genserve.server.dialects.openai.response_output import ItemStatus, OutputItems
from genserve.server.dialects.openai.response_store import ResponseStore
from genserve.server.dialects.openai.responses_body import ResponseRequest, ResponsesBody
from genserve.server.dialects.timings import prompt_progress, requested_fields, timings_fields
from genserve.server.error_formats import OPENAI_ERRORS, openai_error
from genserve.server.http.sse_response import Frames, documented
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices

router = Router(prefix="/v1", tag="OpenAI Responses", errors=OPENAI_ERRORS)


async def _store(request: Request) -> ResponseStore:
    """Return the store of the application, created by the first request."""
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore(max_bytes=state.services.settings.response_store_byte_size)
    store: ResponseStore = state.responses
    return store


StoredResponses = Annotated[ResponseStore, Depends(_store)]


@router.post("/responses", responses=documented("text/event-stream"))
@rules(INFERENCE, rejects_early=True)
async def create_response(
    body: ResponsesBody, services: SharedServices, store: StoredResponses, request: Request
) -> Response:
    """Answer the items of a conversation, whole or as server-sent events."""
    max_bytes = services.settings.max_body_bytes
    generation = ResponseRequest(body=body, store=store, max_bytes=max_bytes, key=current_request().key.name)
    return await handle_generation(generation, services, request, frames=_ResponseFrames, answer=_answer)


@router.get("/responses/{response_id}")
@rules(INFERENCE)
async def retrieve_response(
    response_id: str,
    store: StoredResponses,
    *,
    stream: Annotated[bool, Query(description="Not supported.")] = False,
) -> Response:
    """Return a stored response."""
    if stream:
        message = "stream is not supported for a stored response"
        raise InvalidRequest(message, field="stream", remedy="leave it out")
    return _json(store.get(response_id, key=current_request().key.name).body)


@router.delete("/responses/{response_id}")
@rules(INFERENCE)
async def delete_response(response_id: str, store: StoredResponses) -> dict[str, Any]:
    """Delete a stored response."""
    store.delete(response_id, key=current_request().key.name)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/responses/{response_id}/cancel")
@rules(INFERENCE)
async def cancel_response(response_id: str, store: StoredResponses) -> Response:
    """Reject the request: only a response in the background can be cancelled, and none runs there."""
    store.get(response_id, key=current_request().key.name)
    message = f"the response {response_id!r} does not run in the background"
    raise InvalidRequest(message, remedy="close the connection of a running response to cancel it")


@router.get("/responses/{response_id}/input_items")
@rules(INFERENCE)
async def list_input_items(
    response_id: str,
    store: StoredResponses,
    after: Annotated[str | None, Query(description="The id of the item before the first one.")] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="The number of items.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the newest item first.")] = "desc",
) -> dict[str, Any]:
    """List the input items of a stored response, with those of the responses before it."""
    items = json.loads(store.get(response_id, key=current_request().key.name).inputs)
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
        self._submitted = submitted
        self._items = OutputItems(request.offer.tools)
        self._parser = submitted.message_parser()
        self._scores = None
        self._begun = False
        if request.body.has_logprobs:
            self._scores = content_scores(submitted, submitted.message_parser())

    def start(self, *, num_cached_tokens: int) -> bytes:
        if self._begun:     # by a ping
            return b""
        self._begun = True
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._items.event(kind, {"response": self.response}) for kind in kinds)

    def ping(self) -> bytes:
        """Return the first events, and then OpenAI's own sign of life: some clients do not count comments."""
        return self.start(num_cached_tokens=0) or self._items.event("keepalive", {})

    def progress(self, progress: PromptProgress) -> bytes:
        return self._items.event("keepalive", {"prompt_progress": prompt_progress(progress)})

    def delta(self, delta: Delta) -> bytes:
        scores = [] if self._scores is None else self._scores.answer(delta)
        if self._parser is None:
            text = delta.text
            events = self._items.add_content(text, scores=scores) if text else b""
        else:
            events = self._items.add(self._parser.read(delta), scores=scores)
        if delta.finish_reason is None:
            return events
        return events + self._ending(delta)

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

    def _ending(self, last: Delta) -> bytes:
        assert last.usage is not None
        status: ItemStatus = "completed" if last.finish_reason is FinishReason.STOP else "incomplete"
        is_cut = self._parser is not None and self._parser.within_call      # by a stop string, too
        events = self._items.close("incomplete" if is_cut else status)
        num_reasoning = self._parser.num_reasoning_tokens if self._parser else 0
        self.response["usage"] = _usage(last.usage, num_reasoning=num_reasoning)
        self.response |= timings_fields([last.usage]) | requested_fields(self._submitted, [last.usage])
        if status == "completed":
            return events + self._end(status, completed_at=int(time.time()))
        # OpenAI has no word for a passed deadline, nor for a text that repeats itself.
        stop = {} if last.stop_reason is None else {"stop_reason": last.stop_reason}
        return events + self._end(status, incomplete_details={"reason": "max_output_tokens", **stop})

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
