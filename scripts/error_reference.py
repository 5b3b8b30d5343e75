"""Error reference: the page of all codes with their causes, cures, messages and remedies.

Codes, causes, messages and remedies are read from the source: the classes of errors, and the places that
raise them. The page is not stored: each build of the site reads the code.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from genserve.server.error_statuses import ERROR_STATUSES

ROOT = Path(__file__).parents[1]

# What helps against each code. The error's own remedy is about the one case, and comes first.
CURES = {
    "body_too_large": "send less, or raise `--http-max-input-size`",
    "closed": "make a new `Client` or `LLM`, or ask the server again once it has started",
    "config_error": "correct the line of config.pbtxt that begins the message; `genserve check` lists all",
    "context_length_exceeded": "shorten the chat, or send `truncate_prompt_tokens`; "
    "[a longer context](../kv_cache.md#size)",
    "deadline_exceeded": "raise `max_time_ms` of the request, or lower the load ([why slow](../why_slow.md))",
    "deploy_failed": "see the log of the replica; `genserve check` finds errors of the repository before",
    "error": "follow the remedy",
    "export_error": "[models](../models.md#what-runs) says what can be converted",
    "forbidden": "another key, or `--allowed-host` and `--allowed-origin` for a proxy or a web page "
    "([security](../security.md))",
    "headers_too_large": "send fewer or shorter header fields",
    "inference_error": "compare names, types and shapes with `GET /v2/models/NAME`",
    "invalid_request": "correct the field that the error names; `/docs` of the server lists all fields",
    "malformed_request": "check the client or the proxy: plain HTTP to a TLS port is the usual cause",
    "missing_dependency": "run the `pip install` of the remedy ([extras](../install.md))",
    "model_failed": "read the traceback in the server's log; correct the model.py, or export the model again",
    "model_not_found": "`genserve models`, or `GET /v1/models` of the server, lists the names",
    "model_not_ready": "wait until it has loaded; if its load failed, the log and `genserve check` say why",
    "not_resumable": "send the request again",
    "overloaded": "try again after `Retry-After`; more room: [admission control](../admission_control.md)",
    "previous_response_not_found": "send the whole conversation, or raise `--response-store-byte-size`",
    "rate_limited": "try again after `Retry-After`, or raise the limits of the [key](../security.md#keys)",
    "replica_lost": "send the request again; the log of the replica says why it ended",
    "repository_error": "`genserve check` lists the errors of the repository with their lines and remedies",
    "request_timeout": "check the network of the client, or raise the limit that the message names",
    "response_not_found": "responses are in memory, for one key, until others need the room: send the chat",
    "stream_broken": "send the request again; the server's log says what ended it",
    "too_many_connections": "reuse connections, or raise `--max-connections`",
    "unauthenticated": "`GENSERVE_API_KEY`, `api_key=` of the SDK, or the header `Authorization: Bearer KEY`",
    "unreachable": "start the server with `genserve serve`, and compare host, port and http or https",
    "unsupported_media_type": "send `Content-Type: application/json`",
    "uri_too_long": "send the fields in the body",
    "usage": "`genserve COMMAND --help` lists arguments and options",
}
_BASE = "GenserveError"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Kind:
    """A class of errors, as its source says."""

    code: str
    cause: str      # the first sentence of its docstring
    status: str     # of HTTP; empty: no server answers with it
    has_own_code: bool


def reference() -> str:
    """Return the page of all codes, with their messages that have a remedy."""
    parts = [
        "# Errors\n\nEach code with its cause and cure, and the messages that have a remedy of their own; "
        "a name in braces stands for a value. Codes without a status of HTTP are those of the command line, "
        "the SDK, a load or a cluster. [Troubleshooting](../troubleshooting.md) begins with what you see."
    ]
    by_code = {kind.code: kind for kind in kinds().values() if kind.has_own_code}
    for code, messages in sorted(catalogue().items()):
        kind = by_code[code]
        status = f" HTTP status {kind.status}." if kind.status else ""
        rows = [f"| {_cell(message)} | {_cell(remedy)} |" for message, remedy in messages]
        table = ["| message | remedy |", "| --- | --- |", *rows] if rows else []
        parts.append("\n".join([f"## {code}\n", f"{kind.cause}.{status} *Cure*: {CURES[code]}.\n", *table]))
    return "\n\n".join(parts) + "\n"


def catalogue() -> dict[str, list[tuple[str, str]]]:
    """Return the messages and remedies in the source, by code; also codes without any."""
    found = kinds()
    messages: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for kind in found.values():
        messages[kind.code] |= set()
    for name, node in _source()[1]:
        if name in found and node.args:
            remedy = next((_text(word.value) for word in node.keywords if word.arg == "remedy"), "")
            message = _text(node.args[0])
            if message and remedy:
                messages[found[name].code].add((message, remedy))
    return {code: sorted(each) for code, each in messages.items()}


@cache
def kinds() -> dict[str, Kind]:
    """Return the classes of errors by their names."""
    classes = _source()[0]
    codes = {name: code for name, node in classes.items() if (code := _own_code(node))}
    statuses = {kind.__name__: str(status) for kind, status in ERROR_STATUSES.items()}
    del statuses[_BASE]
    return {
        name: Kind(
            code=_first(name, classes, codes),
            cause="Another error, mostly of the command line" if name == _BASE else _first_sentence(node),
            status=_first(name, classes, statuses),
            has_own_code=name in codes,
        )
        for name, node in classes.items()
        if _BASE in _ancestors(name, classes)
    }


@cache
def _source() -> tuple[dict[str, ast.ClassDef], list[tuple[str, ast.Call]]]:
    """Return the classes of the package by their names, and the calls by name that have a remedy."""
    classes: dict[str, ast.ClassDef] = {}
    calls: list[tuple[str, ast.Call]] = []
    for path in sorted((ROOT / "genserve").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        calls += [
            (node.func.id, node)
            for node in (ast.walk(tree) if "remedy=" in text else ())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if any(word.arg == "remedy" for word in node.keywords)
        ]
    return classes, calls


def _ancestors(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield a class and its bases, nearest first."""
    yield name
    for base in classes[name].bases if name in classes else ():
        if isinstance(base, ast.Name):
            yield from _ancestors(base.id, classes)


def _first(name: str, classes: Mapping[str, ast.ClassDef], values: Mapping[str, str]) -> str:
    return next((values[each] for each in _ancestors(name, classes) if each in values), "")


def _own_code(node: ast.ClassDef) -> str:
    for statement in node.body:
        target = getattr(statement, "target", None)
        targets = statement.targets if isinstance(statement, ast.Assign) else [target]
        if any(isinstance(target, ast.Name) and target.id == "code" for target in targets):
            value = getattr(statement, "value", None)
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return ""


def _first_sentence(node: ast.ClassDef) -> str:
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return paragraph.replace("\n", " ").rstrip(".").partition(". ")[0]


def _text(node: ast.expr) -> str:
    """Return a string literal, with `{name}` for its values; empty: it is computed elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.FormattedValue(value=value):
            return "{" + re.sub(r"^.*\.|\(.*|\W", "", ast.unparse(value)) + "}"
        case _:
            return ""


def _cell(text: str) -> str:
    """Return a text for a cell of a table, in which HTML and Markdown mean nothing."""
    # `{name}` at the end of a cell would be attributes of it.
    return re.sub(r"([|*_<\[])", r"\\\1", " ".join(text.split())).replace("{", "&#123;")
