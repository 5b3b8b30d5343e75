"""JSON response: the JSON of whole answers, which may be large."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.responses import JSONResponse


class AnswerResponse(JSONResponse):
    """A response with a JSON document, which is a tenth of the work of `JSONResponse`."""

    def render(self, content: Any) -> bytes:
        """Return the JSON text; takes time in proportion to it."""
        return json_bytes(content)


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON, written part by part: orjson keeps other threads waiting while it writes.

    The parts are the objects in the lists of the document, such as the choices of an answer.
    """
    if not isinstance(document, dict):
        return _written(document)
    members = (orjson.dumps(name) + b":" + _written(value) for name, value in document.items())
    return b"{" + b",".join(members) + b"}"


def _written(value: Any) -> bytes:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return b"[" + b",".join(map(orjson.dumps, value)) + b"]"
    return orjson.dumps(value)
