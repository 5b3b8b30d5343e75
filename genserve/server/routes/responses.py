"""OpenAI's Responses dialect: `/v1/responses`, with earlier responses from the server's store."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from genserve.completion import Delta
from genserve.errors import InvalidRequest
from genserve.server.error_responses import OPENAI_ERRORS, ErrorFormats
from genserve.server.generation_handler import SubmittedRequest, handle_generation
from genserve.server.request_body import StrictRoute
from genserve.server.routes.response_frames import ResponseFrames
from genserve.server.routes.response_request import ResponseRequest
from genserve.server.routes.responses_body import ResponsesBody
from genserve.server.services import SharedServices

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["OpenAI Responses"])
ERRORS: ErrorFormats = {"/v1/": OPENAI_ERRORS}


@router.post("/responses")
async def create_response(body: ResponsesBody, services: SharedServices, request: Request) -> Response:
    """Answer the items of a conversation, whole or as server-sent events."""
    max_bytes = services.settings.max_body_bytes
    generation = ResponseRequest(body=body, store=services.responses, max_bytes=max_bytes)
    return await handle_generation(generation, services, request, frames=ResponseFrames, answer=_answer)


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
    """Reject to cancel a response: this is for responses in the background, which are not supported."""
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


def _answer(submitted: SubmittedRequest, generation: ResponseRequest, deltas: list[Delta]) -> Response:
    frames = ResponseFrames(submitted, generation)
    for delta in deltas:
        frames.delta(delta)
    return _json(json.dumps(frames.response).encode())


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
