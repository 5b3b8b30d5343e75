"""Gate: the API key that every route needs, but the health checks."""

from __future__ import annotations

import hmac

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from genserve.api_key import bearer

__all__ = ["Gate"]

_OPEN_PATHS = frozenset({"/health", "/v2/health/live", "/v2/health/ready"})


class Gate:
    """ASGI middleware that asks for `Authorization: Bearer KEY`, compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        """Raises what `bearer` raises."""
        self._app = app
        self._expected = bearer(api_key).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        text = "the API key is missing or wrong"
        # KServe's clients read a text there, OpenAI's an object.
        is_kserve = scope["path"].startswith("/v2")
        error = text if is_kserve else {"message": text, "type": "authentication_error", "code": None}
        response = JSONResponse({"error": error}, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode(), self._expected)
