"""Docs page: the page at `/docs`, which lists and calls the routes, and loads nothing from the internet.

It is generated from the OpenAPI document, so a new dialect is on it without being named here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse
from markupsafe import Markup, escape

from genserve.sampling.param_table import SECTIONS, Range
from genserve.sampling.sampling_params import PARAMETERS
from genserve.server.access.access_control import ANY_KEY, PAGE
from genserve.server.kserve.routes import ROUTES
from genserve.server.route import Route, Router, rules

if TYPE_CHECKING:
    from jinja2 import Template

router = Router(route_class=Route, include_in_schema=False)

# A body with more fields shows the rare ones folded.
_MAX_UNFOLDED = 8
_CODE = re.compile("`([^`]+)`")
_JOINT = re.compile("([._/])")
_INLINE = re.compile("<(script|style)>(.*?)</", re.DOTALL)
_WORDS = {"string": "text", "boolean": "true or false", "array": "list"}
_PLURALS = {"string": "texts", "integer": "integers", "number": "numbers", "object": "objects"}
_OTHER_FIELDS = "Other fields"
# Many requests set when to end, fewer how to draw.
_SECTION_ORDER = [*SECTIONS.values()][::-1]
_MAX_DEPTH = 3      # how deep objects are shown, as a schema may contain itself
_EXAMPLE_TEXT, _EXAMPLE_NUMBER = "The sea is", 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedField:
    """One field of a body."""

    name: str       # `messages[].role` for a field in an object
    kind: str       # `integer between 1 and 128`, `list of up to 16 texts`
    default: str    # as JSON; empty: none
    text: str
    is_required: bool
    is_nested: bool # a field of the object that is shown before it
    is_common: bool
    section: str    # its section in docs/sampling.md; empty: it is in none


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedRoute:
    """One route, as the page shows it."""

    group: str
    method: str
    path: str
    text: str
    inputs: tuple[str, ...]         # the parameters of the path
    fields: tuple[DocumentedField, ...]      # the fields that the body may have
    example: str                    # an example of a body; empty: the route takes none

    @property
    def anchor(self) -> str:
        """The route's place in the page."""
        return "-".join([self.method.lower(), *re.findall(r"\w+", self.path)])

    @property
    def takes_model(self) -> bool:
        """Whether the body may name a model."""
        return any(field.name == "model" for field in self.fields)

    @property
    def first_fields(self) -> list[DocumentedField]:
        """The fields that are always shown."""
        is_short = sum(not field.is_nested for field in self.fields) <= _MAX_UNFOLDED
        return [field for field in self.fields if field.is_common or (is_short and not field.is_nested)]

    @property
    def folded_fields(self) -> list[tuple[str, list[DocumentedField]]]:
        """The other fields by their section, those of objects in them included."""
        sections: dict[str, list[DocumentedField]] = {_OTHER_FIELDS: []}
        for field in self.fields:
            if field not in self.first_fields:
                sections.setdefault(field.section or _OTHER_FIELDS, []).append(field)
        return [(heading, fields) for heading, fields in sections.items() if fields]


@router.get("/openapi.json")
@rules(ANY_KEY)
async def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI document of the application."""
    return JSONResponse(request.app.openapi())


@router.get("/docs")
@rules(PAGE)
def docs(request: Request) -> HTMLResponse:
    """Return the page, generated from the OpenAPI document of the application."""
    page = written_page(request.app.openapi())
    return HTMLResponse(page, headers={"Content-Security-Policy": _policy(page)})


def written_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    groups: dict[str, list[DocumentedRoute]] = {}
    for route in documented_routes(document):
        groups.setdefault(route.group, []).append(route)
    return _template().render(**document["info"], groups=groups, kserve=ROUTES)


def _policy(page: str) -> str:
    """Return the policy of a page that shows text of models and clients: nothing in it may load or send."""
    hashes = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in _INLINE.findall(page)
    }
    return (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # 2 MB, which few servers need

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["breakable"] = lambda name: Markup(_JOINT.sub(r"\1<wbr>", str(escape(name))))
    environment.filters["prose"] = lambda text: Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def documented_routes(document: Mapping[str, Any]) -> Iterator[DocumentedRoute]:
    """Yield the routes of an OpenAPI document; scripts/reference_pages.py writes them too."""
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {"content": {}})["content"]
            [body] = _cases(content.get("application/json", {"schema": {}})["schema"], schemas)
            yield DocumentedRoute(
                group=operation["tags"][0],
                method=method.upper(),
                path=path,
                text=operation.get("description", ""),
                inputs=tuple(one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"),
                fields=tuple(_fields(body, schemas)),
                example=json.dumps(_example(body, schemas), indent=2, ensure_ascii=False) if body else "",
            )


def _cases(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that a value may have, except null, without references."""
    if "$ref" in schema:
        return _cases(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    union = schema.get("anyOf") or schema.get("oneOf")
    if union is None:
        return [] if schema.get("type") == "null" else [schema]
    return [case for one in union for case in _cases(one, schemas)]


def _fields(
    body: Mapping[str, Any],
    schemas: Mapping[str, Any],
    *,
    within: DocumentedField | None = None,
    prefix: str = "",
) -> Iterator[DocumentedField]:
    """Yield the fields of a body, each before the fields of the objects in it.

    Required fields come first, then those of the dialect, then the sampling parameters in an order of use.
    """
    required = frozenset(body.get("required", ()))
    for name, schema in sorted(body.get("properties", {}).items(), key=partial(_place, required=required)):
        cases = _cases(schema, schemas)
        default = schema.get("default")
        is_common = name in required if within is None else within.is_common and not within.is_nested
        field = DocumentedField(
            name=prefix + name,
            kind=" or ".join(dict.fromkeys(map(_kind, cases, repeat(schemas)))),
            default="" if default is None else json.dumps(default),
            text=schema.get("description", ""),
            is_required=name in required,
            is_nested=within is not None,
            is_common=is_common or schema.get("x-common", False),
            section=schema.get("x-section", "" if within is None else within.section),
        )
        items = [item for case in cases if "items" in case for item in _cases(case["items"], schemas)]
        values = [
            value
            for case in cases
            if isinstance(case.get("additionalProperties"), Mapping)
            for value in _cases(case["additionalProperties"], schemas)
        ]
        is_plain_object = "$ref" in schema and within is None   # TGI's `parameters`: its fields say all
        parent = None if is_plain_object else field
        if parent is not None:
            yield parent
        below = ((".", cases), ("[].", items), (".NAME.", values))
        for joint, objects in below if prefix.count(".") < _MAX_DEPTH else ():
            for case in objects:
                yield from _fields(case, schemas, within=parent, prefix=field.name + joint)


def _place(item: tuple[str, Mapping[str, Any]], *, required: Container[str]) -> tuple[bool, int, int]:
    name, schema = item
    section = _SECTION_ORDER.index(schema["x-section"]) if "x-section" in schema else -1
    return name not in required, section, [*PARAMETERS, name].index(name)


def _kind(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return the values of a schema without references in a few words."""
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        items = [_plural(item, schemas) for item in _cases(schema.get("items", {}), schemas)]
        limit = f"up to {schema['maxItems']} " if "maxItems" in schema else ""
        return f"list of {limit}{' or '.join(dict.fromkeys(items))}"
    words = " or ".join(_WORDS.get(one, one) for one in ([kind] if isinstance(kind, str) else kind))
    return f"{words}{_limits(schema)}"


def _plural(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    plural = None if "enum" in schema or "const" in schema else _PLURALS.get(str(schema.get("type")))
    return _kind(schema, schemas) if plural is None else f"{plural}{_limits(schema)}"


def _limits(schema: Mapping[str, Any]) -> str:
    if "maxLength" in schema:
        return f" of up to {schema['maxLength']} characters"
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    if low is None:
        return ""
    high = schema.get("exclusiveMaximum", schema.get("maximum", math.inf))
    # In the document, 1 is 1.0.
    low, high = (int(bound) if float(bound).is_integer() else bound for bound in (low, high))
    allowed = Range(
        low,
        high,
        above="exclusiveMinimum" in schema,
        below="exclusiveMaximum" in schema,
    )
    return f" {allowed}"


def _example(schema: Mapping[str, Any], schemas: Mapping[str, Any], *, name: str = "") -> Any:
    """Return the schema's own example, or a value with its required fields only.

    A required `model` is empty: the page writes the model's name into it.
    """
    schema = next(iter(_cases(schema, schemas)), {})
    if "examples" in schema:
        return _arranged(schema["examples"][0], schema, schemas)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return "user" if "user" in values else values[0]
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            return {one: _example(fields[one], schemas, name=one) for one in schema.get("required", ())}
        case "array":
            return [_example(schema.get("items", {}), schemas)]
        case "integer" | "number":
            return schema.get("default", _EXAMPLE_NUMBER)
        case "boolean":
            return False
        case _:
            return "" if name == "model" else _EXAMPLE_TEXT


def _arranged(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Return a value with its fields in the order of the schema, as the document sorts those of examples."""
    cases = _cases(schema, schemas)
    if isinstance(value, list):
        of_item = next((case["items"] for case in cases if "items" in case), cases[0])
        return [_arranged(item, of_item, schemas) for item in value]
    if not isinstance(value, dict):
        return value
    of_object = next((case for case in cases if "properties" in case), None)
    if of_object is None:
        return value
    fields = of_object["properties"]
    order = sorted(fields, key=lambda name: name not in of_object.get("required", ()))
    return {name: _arranged(value[name], fields[name], schemas) for name in order if name in value}
