"""Model names: what a server says it serves."""

from __future__ import annotations

from typing import Any

import httpx2

from genserve.errors import InvalidRequest, Unauthenticated, Unreachable


def served_models(http: httpx2.Client) -> list[str]:
    """Return the names of a server's models; none if it lists no models, as TGI, whose one has no name.

    Raises:
        Unreachable: the server does not answer.
        Unauthenticated: it rejects the key.
        InvalidRequest: what it answers is no list of models.
    """
    return _models(http, "GET", "/v1/models") or _models(http, "POST", "/v2/repository/index")


def _models(http: httpx2.Client, method: str, path: str) -> list[str]:
    """Return the names that one of the lists has; none if the server has no such list."""
    try:
        reply = http.request(method, path)
    except httpx2.HTTPError as error:
        raise Unreachable(
            f"no server answers at {http.base_url}: {error}",
            remedy="start one with `genserve serve`, or set --url",
        ) from error
    if reply.status_code in (401, 403):
        raise Unauthenticated(
            f"the server at {http.base_url} rejects the key", remedy="set GENSERVE_API_KEY, or --header"
        )
    if not reply.is_success:
        return []
    try:
        return _names(reply.json())
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest(f"{http.base_url}{path} does not list models", field="url") from None


def _names(document: Any) -> list[str]:
    entries = document["data"] if isinstance(document, dict) else document
    return [str(entry["id"] if "id" in entry else entry["name"]) for entry in entries]
