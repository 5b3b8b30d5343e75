"""Request id: the header `X-Request-Id`, taken from the request or made up, in each answer."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestId"]

# What may stand in a log as it is; anything else is not given back.
_ID = re.compile(rb"[!-~]{1,128}")
_NAME = b"x-request-id"


class RequestId:
    """ASGI middleware that tells the caller by which id its request went."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, and write the header into its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _NAME), b"")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (_NAME, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
