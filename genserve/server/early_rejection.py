"""Early rejection: a full model rejects generations before FastAPI handles them, which costs more."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genserve.errors import Closed, ModelNotFound, ModelNotReady, Overloaded
from genserve.log import CURRENT_REQUEST
from genserve.server.error_responses import ErrorResponses
from genserve.server.services import Services

_PATHS = frozenset(
    (
        "/",
        "/generate",
        "/generate_stream",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    )
)
_MAX_BYTES = 16_384     # a longer body takes too long to parse twice


class EarlyRejection:
    """ASGI middleware that rejects a generation if the model would reject any of the default priority now.

    The body is parsed, but not validated. One that is long or in parts, that is not a JSON object, states its
    priority, or does not name a model is left to `submit`.
    """

    def __init__(self, app: ASGIApp, services: Services, errors: ErrorResponses) -> None:
        self._app = app
        self._services = services
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on; the ASGI protocol."""
        app = self._app
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _PATHS:
            message = await receive()
            receive = _replayed(message, receive)
            if error := self._rejection(message):
                app = self._errors.response(error, path=scope["path"])
        await app(scope, receive, send)

    def _rejection(self, message: Message) -> Overloaded | None:
        """Return the error of a request whose body is the message; None: it is not rejected here."""
        fields = _parsed(message)
        name, parameters = fields.get("model"), fields.get("parameters")    # the latter is TGI's
        has_priority = "priority" in fields or (isinstance(parameters, dict) and "priority" in parameters)
        if not fields or self._services.draining or has_priority or not isinstance(name, str | None):
            return None
        with suppress(Closed, ModelNotFound, ModelNotReady):    # the rest of the request may be wrong, too
            model = self._services.repository.text_model(name)
            try:
                model.engine.reserve(1).release()
            except Overloaded as error:
                if logged := CURRENT_REQUEST.get():
                    logged.model = model.name
                    logged.operation = "text_completion" if fields.keys() & {"prompt", "inputs"} else "chat"
                return error
        return None


def _parsed(message: Message) -> dict[str, Any]:
    """Return the fields of a whole body; empty if it is in parts, long or no JSON object."""
    body = message.get("body", b"")
    if message.get("more_body") or len(body) > _MAX_BYTES:
        return {}
    with suppress(ValueError, RecursionError):
        fields = json.loads(body)
        if isinstance(fields, dict):
            return fields
    return {}


def _replayed(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that returns a message again first."""
    first: Message | None = message

    async def replay() -> Message:
        nonlocal first
        again, first = first, None
        return await receive() if again is None else again

    return replay
