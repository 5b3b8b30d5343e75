"""Bundled pages: the chat page at `/`, the dashboard at `/dashboard`, and their files below `/page`.

`make page` bundles them from the folder `web`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from genserve.request_context import VERBOSE
from genserve.server.access.access_control import PAGE
from genserve.server.route import Route, Router, rules

FOLDER = Path(__file__).parent / "bundle"

# The pages show what models write. Script and style come from files only, and no text can become markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",    # asks again with the ETag
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}

router = Router(route_class=Route, include_in_schema=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of a page."""

    content: bytes
    media_type: str
    etag: str


@router.get("/")
@rules(PAGE, levels=VERBOSE)
async def chat_page(request: Request) -> Response:
    """Return the chat page."""
    return _response("index.html", request)


@router.get("/dashboard")
@rules(PAGE, levels=VERBOSE)
async def dashboard(request: Request) -> Response:
    """Return the dashboard."""
    return _response("dashboard.html", request)


@router.get("/page/{name:path}")
@rules(PAGE, levels=VERBOSE)
async def page_file(name: str, request: Request) -> Response:
    """Return a file that a page loads."""
    return _response(name, request)


def _response(name: str, request: Request) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@cache
def _files() -> Mapping[str, _File]:
    """Return the files by name: a request reads no path of a client."""
    return {path.name: _read(path) for path in FOLDER.iterdir()}


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content=content, media_type=_TYPES[path.suffix], etag=etag)
