"""Request body: bodies read under a size limit and parsed strictly.

A key given twice, NaN, half a surrogate pair and a nesting that exhausts the stack, which the usual JSON
parser accepts, are rejected here. The number of values is limited before they become Python objects: to
parse, validate and free values holds the interpreter's lock for a time that depends on their number, not on
their bytes; for 8 MiB of empty lists it is a second.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from genserve.errors import InvalidRequest, UnsupportedMediaType
from genserve.server.http.connection_errors import BodyTooLarge, raise_connection_error
from genserve.server.http.offload import offload_if_large

T = TypeVar("T")
# A list that may be long; one error is enough for it.
Items = Annotated[list[T], Field(fail_fast=True)]

# The token ids of a batch of prompts are the most that a request has need of; these take 20 ms to validate.
MAX_VALUES = 2**18
MAX_CONTAINERS = 2**17      # lists and objects: eight for each message of the longest chat
MAX_KEYS = 2**13            # one object may have
MAX_DEPTH = 64

_CHARSET = re.compile(rb";\s*charset\s*=\s*\"?([^\";\s]+)", re.IGNORECASE)
_MAX_INT_DIGITS = 20
# A byte of a list of numbers takes as long to parse as this many bytes of other JSON.
_COST_PER_BYTE = 4
_JSON_OBJECT = "send a JSON object in UTF-8; GET /docs has examples"


class Body(BaseModel):
    """Base of all request bodies: no coercion, no NaN, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TolerantBody(Body):
    """An object to which clients add fields of their own, such as `cache_control`."""

    model_config = ConfigDict(extra="allow")

    def reject(self, remedies: Mapping[str, str], *, place: str = "") -> None:
        """Reject fields that are not supported, unless they are empty.

        Args:
            remedies: what to do instead, by field.
            place: where this object is in the body, in front of its fields.

        Raises:
            InvalidRequest: one of the fields has a value.
        """
        for name, remedy in remedies.items():
            if (self.model_extra or {}).get(name):
                field = f"{place}{name}"
                raise InvalidRequest(f"{field} is not supported", field=field, remedy=remedy)


def text_parts(content: Any) -> Any:
    """Return content that is one text as a list of one part, for a `BeforeValidator` of a list of parts."""
    if not isinstance(content, str | list | None):
        raise ValueError("must be text, or a list of text parts")  # noqa: TRY004  # pydantic expects a ValueError
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def of_known_types(is_known: Callable[[str], bool], **kept: str) -> BeforeValidator:
    """Return a validator that cuts objects of other types, whose fields may be anything, to their `type`.

    Args:
        is_known: whether the fields of objects of a type are read.
        kept: the fields that stay beside `type` if they are text that fits these patterns.
    """

    def cut(given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str) or is_known(kind):
            return given
        texts = {name: given[name] for name in kept if isinstance(given.get(name), str)}
        return {"type": kind} | {name: text for name, text in texts.items() if re.fullmatch(kept[name], text)}

    return BeforeValidator(cut)


def check_coding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise UnsupportedMediaType for a body that is not plain UTF-8, by its headers."""
    for name, value in headers:
        if name == b"content-encoding":
            check_content_encoding(value.decode("latin-1"))
        elif name == b"content-type" and (charset := _CHARSET.search(value)) is not None:
            named = charset[1].decode("latin-1")
            if named.lower() not in ("utf-8", "utf8", "us-ascii"):
                raise UnsupportedMediaType(
                    f"the charset {named[:64]!a} is not supported", remedy=_JSON_OBJECT
                )


def check_content_encoding(coding: str) -> None:
    """Raise UnsupportedMediaType if a body that is not decompressed is declared as compressed."""
    if coding.lower() != "identity":
        raise UnsupportedMediaType(
            f"the content encoding {coding[:64]!a} is not supported", remedy="send the body uncompressed"
        )


class StrictRequest(Request):
    """A request with a size limit for its body and strict parsing of its JSON."""

    def __init__(self, scope: Scope, receive: Receive, *, max_bytes: int) -> None:
        async def receive_checked() -> Message:
            message = await receive()
            raise_connection_error(scope)   # which the connection finds in the body
            return message

        super().__init__(scope, receive_checked)
        self._max_bytes = max_bytes

    async def body(self) -> bytes:
        """Return the body.

        Raises:
            BodyTooLarge: before more than the limit is in memory.
            ClientDisconnect: before the whole body has arrived.
        """
        if not hasattr(self, "_body"):
            limit = self._max_bytes
            for name, value in self.scope["headers"]:   # without a `Headers` for each body
                if name == b"content-length" and int(value) > limit:
                    raise _too_large(limit)
            body, is_complete = bytearray(), False
            while not is_complete:  # `stream`, an asynchronous generator, costs more than a short body
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                is_complete = not message.get("more_body", False)
                if len(body) > limit:
                    raise _too_large(limit)
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        """Return the parsed body; raises InvalidRequest, which never quotes the body."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = await offload_if_large(json_cost(self), parse_json, body)
        return self._json


def json_cost(request: Request) -> int:
    """Return the cost of a request's JSON body, which has been read, for `offload_if_large`."""
    return _COST_PER_BYTE * len(request._body)


def empty_body() -> InvalidRequest:
    """Return the error of a request without a body where one is needed."""
    return InvalidRequest("the body is empty", remedy="send a JSON object")


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a strict JSON object.

    Raises:
        InvalidRequest: not UTF-8, not JSON (with the character's index), not an object, or with a repeated
            key, NaN, Infinity, a number that is too long, a lone surrogate, too deep a nesting, or too many
            values.
    """
    check_num_values(body)
    try:
        text = body.decode("utf-8")
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8, at byte {error.start}", remedy=_JSON_OBJECT) from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error.msg} at character {error.pos}", remedy=_JSON_OBJECT
        ) from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", remedy=_JSON_OBJECT)
    _check_depth(value, text)
    # Only an escape can produce one, so most bodies need no scan of their strings.
    if "\\u" in text:
        _reject_surrogates(value, "")
    return value


def check_num_values(text: bytes) -> None:
    """Check how many values a JSON text has, of which no two are counted as one.

    Args:
        text: JSON, which may be invalid; the strings in it are not counted as structure.

    Raises:
        InvalidRequest: it has more than `MAX_VALUES` values or `MAX_CONTAINERS` lists and objects.
    """
    if len(text) <= MAX_CONTAINERS:
        return
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # The quotes left are those around strings.
    if text.count(b'"') // 2 > MAX_VALUES:
        raise _too_many(MAX_VALUES, "values")
    outside = b"".join(text.split(b'"')[::2])
    if (num_containers := outside.count(b"[") + outside.count(b"{")) > MAX_CONTAINERS:
        raise _too_many(MAX_CONTAINERS, "lists and objects")
    if outside.count(b",") + num_containers > MAX_VALUES:
        raise _too_many(MAX_VALUES, "values")


def _check_depth(value: Any, text: str) -> None:
    """Raise InvalidRequest if the lists and objects of a parsed text are nested deeper than `MAX_DEPTH`."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    if any(isinstance(value, dict | list) for value in level):
        raise _too_deep()


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> InvalidRequest:
    """Return the error for a text of which `MAX_DEPTH` or the stack does not allow the nesting."""
    return InvalidRequest(
        f"lists and objects of the body are nested deeper than {MAX_DEPTH}", remedy="nest them less"
    )


def _too_many(limit: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"the body has more than {limit} {what}", remedy="send several smaller requests")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _too_many(MAX_KEYS, "keys in one object")
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            readable = ascii(name[:64])[1:-1]
            raise InvalidRequest(
                f"the key {readable!r} is given twice", field=readable, remedy=_JSON_OBJECT
            )
        result[name] = value
    return result


def _no_constant(name: str) -> float:
    raise InvalidRequest(f"the body contains {name}, which is not JSON", remedy=_JSON_OBJECT)


def _bounded_int(digits: str) -> int:
    if len(digits) > _MAX_INT_DIGITS:
        raise InvalidRequest(f"the body contains a number of {len(digits)} digits", remedy=_JSON_OBJECT)
    return int(digits)


def _float(text: str) -> float:
    # Unlike `float` itself, a function lets other threads run between the numbers of a list.
    value = float(text)
    if math.isinf(value):
        raise InvalidRequest("the body contains a number that is too large", remedy=_JSON_OBJECT)
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_int=_bounded_int, parse_float=_float
)


def _reject_surrogates(value: Any, place: str) -> None:
    match value:
        case str() if not _is_encodable(value):
            where = place or "the body"
            raise InvalidRequest(f"{where} contains a lone surrogate, which is not a character", field=where)
        case dict():
            for key, inner in value.items():
                _reject_surrogates(key, place)
                _reject_surrogates(inner, f"{place}.{key}" if place else key)
        case list():
            for index, inner in enumerate(value):
                _reject_surrogates(inner, f"{place}[{index}]")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes", remedy="send a smaller body")
