"""OpenAI answer: what the answers of its dialect have in common, whole or streamed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from genserve.errors import GenserveError, InvalidRequest
from genserve.request import Completion, Delta, FinishReason, Usage, likeliest
from genserve.sampling.idle import idle_parameters
from genserve.server.faults import openai_error, renamed
from genserve.server.ignored import name_ignored
from genserve.server.routes.openai_fields import OpenAIBody
from genserve.server.services import Open, Services
from genserve.server.sse import EventStream, Frames, event, read_all

__all__ = ["FINISH", "Chunks", "best_choices", "head", "respond", "usage"]

_Asked = TypeVar("_Asked", bound=OpenAIBody)

FINISH = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
}


def head(opened: Open, kind: str, *, id_prefix: str) -> dict[str, Any]:
    """Return the fields that every answer, and every chunk of one, begins with."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": opened.model.name,
        "system_fingerprint": f"genserve-{opened.model.precision}",
    }


def usage(usages: Sequence[Usage], *, n: int) -> dict[str, Any]:
    """Return the usage of a request whose choices, `n` to each prompt, had these; a prompt counts once."""
    prompt_tokens = sum(one.prompt_tokens for one in usages[::n])
    completion_tokens = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in usages[::n])},
    }


def best_choices(completions: Sequence[Completion], *, n: int, num_drawn: int) -> list[Completion]:
    """Return, of so many answers to each prompt, the `n` likeliest, the best first; if `n`, all in order."""
    if num_drawn == n:
        return list(completions)
    blocks = [completions[start : start + num_drawn] for start in range(0, len(completions), num_drawn)]
    return [block[place] for block in blocks for place in likeliest(block)[:n]]


async def respond(
    body: _Asked,
    services: Services,
    request: Request,
    *,
    frames: Callable[[Open, _Asked], Frames],
    answer: Callable[[Open, _Asked, list[Delta]], dict[str, Any]],
) -> Response:
    """Answer in the way that was asked for: in `frames` as they come, or with one `answer` of all deltas.

    Raises:
        InvalidRequest: in the words of the body; see `OpenAIBody.check`, `Services.open`.
        ClientLeft, GenserveError: see `Services.open`, `read_all`; a stream that has begun carries what
            goes wrong as an event.
    """
    body.check()
    try:
        opened = await services.open(body.model_name, body.prompts(), body.params(), n=body.num_choices)
    except InvalidRequest as error:
        raise renamed(error, body.names()) from None
    response: Response
    if body.stream:
        response = EventStream(opened.stream, frames(opened, body))
    else:
        response = JSONResponse(answer(opened, body, await read_all(opened.stream, request)))
    name_ignored(response, [*body.unknown(), *idle_parameters(opened.params)])
    return response


class Chunks:
    """The events of one streamed answer, but its deltas: `Frames` of both routes are made of it.

    All that does not change is written once.
    """

    def __init__(self, opened: Open, body: OpenAIBody, *, kind: str, id_prefix: str) -> None:
        """Begin an answer; see `head`."""
        self._head = json.dumps(head(opened, kind, id_prefix=id_prefix))[:-1]
        # Where the last chunk is the usage, the others say that it comes.
        self._with_usage = body.wants_usage
        self._after = '}], "usage": null}\n\n' if self._with_usage else "}]}\n\n"
        self._n = body.num_choices
        self._usages: list[Usage | None] = [None] * len(opened.seeds)

    def chunk(self, choice: int, fields: str, *, beside: str = "") -> bytes:
        """Return a chunk of one choice; its fields behind `index`, and those `beside` it, are JSON."""
        return f'data: {self._head}{beside}, "choices": [{{"index": {choice}, {fields}{self._after}'.encode()

    def ending(self, delta: Delta) -> bytes:
        """Return what follows the last delta of a choice: nothing, or behind the last of all the usage."""
        self._usages[delta.choice] = delta.usage
        usages = [one for one in self._usages if one is not None]
        if not self._with_usage or len(usages) < len(self._usages):
            return b""
        return event(f'{self._head}, "choices": [], "usage": {json.dumps(usage(usages, n=self._n))}}}')

    def start(self) -> bytes:
        """See `Frames`: nothing."""
        return b""

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        return event(json.dumps(openai_error(error)))

    def end(self) -> bytes:
        """See `Frames`."""
        return event("[DONE]")
