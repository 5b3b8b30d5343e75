"""Docs page: the page at `/docs`, which lists and calls the routes, and loads nothing from the internet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, StrictUndefined, Template

from genserve.server.routes.kserve import route_table

router = APIRouter(include_in_schema=False)

# The page shows text of models and clients, which must not load or send anything from there.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
_PROMPT = {"inputs": "The sea is", "parameters": {"max_new_tokens": 16}}
_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {**_CHAT, "temperature": 0, "stream": True},
    "/v1/completions": {"prompt": "The sea is", "max_tokens": 16},
    "/generate": _PROMPT,
    "/generate_stream": _PROMPT,
    "/": {**_PROMPT, "stream": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One field of a body."""

    name: str
    kind: str       # its type: `integer from 1 to 128`, `list of string`
    note: str       # that it is required, or its default


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """One route, as the page shows it."""

    group: str
    method: str
    path: str
    text: str
    fields: tuple[_Field, ...]
    example: str    # of a body; empty: the route takes none

    @property
    def can_be_tried(self) -> bool:
        """Whether the path has no parameter."""
        return "{" not in self.path


@router.get("/docs")
def docs(request: Request) -> HTMLResponse:
    """Return the page, generated from the OpenAPI document of the application."""
    document = request.app.openapi()
    routes = groupby(_routes(document), key=lambda route: route.group)
    page = _template().render(
        **document["info"],
        groups=[(group, list(of_group)) for group, of_group in routes],
        kserve=route_table(),
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def _routes(document: Mapping[str, Any]) -> Iterator[_Route]:
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {"content": {}})["content"]
            reference = content.get("application/json", {"schema": {}})["schema"].get("$ref")
            example = _EXAMPLES.get(path) if reference else None
            yield _Route(
                group=operation["tags"][0],
                method=method.upper(),
                path=path,
                text=operation.get("description", ""),
                fields=tuple(_fields(reference, schemas)) if reference else (),
                example=json.dumps(example, indent=2) if example else "",
            )


def _fields(reference: str, schemas: Mapping[str, Any], prefix: str = "") -> Iterator[_Field]:
    """Yield the fields of a schema, required ones first; those of a nested object as `name.field`."""
    schema = schemas[_name(reference)]
    required = frozenset(schema.get("required", ()))
    for name, of_field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        default = "" if of_field.get("default") is None else f"default: {json.dumps(of_field['default'])}"
        if "$ref" in of_field and "properties" in schemas[_name(of_field["$ref"])]:
            yield from _fields(of_field["$ref"], schemas, prefix=f"{prefix}{name}.")
        else:
            note = "required" if name in required else default
            yield _Field(name=prefix + name, kind=_kind(of_field), note=note)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words."""
    if "$ref" in schema:
        return _name(schema["$ref"])
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_kind(case) for case in schema[union] if case.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = {"from": schema.get("minimum"), "to": schema.get("maximum")}
    limits = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
    return " ".join([schema.get("type", "anything"), *limits])


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]
