"""Reference pages: commands, environment, HTTP routes, config.pbtxt and SDK, written from the code.

    python scripts/reference_pages.py FOLDER    # writes them; `make docs` makes them pages of the site

Nothing here is kept: each build reads the code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from genserve.cli.main import COMMANDS, commands
from genserve.config.parameter_rules import PARAMETERS_OF_BACKENDS
from genserve.config.schema import new_model_config
from genserve.config.supported_fields import Role, reason_without_effect
from genserve.generation_metrics import Metrics
from genserve.repository.repository import Repository
from genserve.sampling.param_table import SECTIONS
from genserve.sampling.sampling_params import PARAMETERS
from genserve.server.app import create_app
from genserve.server.routes.docs_page import DocumentedField, documented_routes
from genserve.server.routes.kserve import route_table
from genserve.server.services import Services
from genserve.settings import ServerSettings

ROOT = Path(__file__).parents[1]
# The variables that are no flags of a command.
VARIABLES = {
    "GENSERVE_API_KEY": "The key that `genserve serve` requires, and that the command line and the SDK send.",
    "GENSERVE_CACHE": "Folder of downloads. Default: `genserve` in the user's cache folder.",
    "GENSERVE_CLIENT_CERT": "PEM file with a certificate and its key, which the command line and the SDK "
    "show to servers that ask for one ([security](../security.md#tls)).",
    "GENSERVE_CONTROL_KEY": "The key that `genserve serve` requires for requests that change the server "
    "([security](../security.md#keys)).",
    "GENSERVE_HOME": "Folder of genserve's data, with the default model repository. Default: in the user's "
    "data folder.",
    "GENSERVE_KERNELS": "The instruction set of the CPU kernels, such as `avx2`, instead of the best one "
    "([kernels](../kernels.md)).",
    "GENSERVE_MODEL_FINGERPRINT": "Of a replica on Ray: changes with the files of its model. Set by "
    "`genserve deploy ray`.",
    "NO_COLOR": "Any value: no colours in the terminal.",
}
_NO_LIMIT = 2**31 - 1
# A parameter of sampling is described once.
_SAMPLING = "[sampling parameters](../sampling.md)"


def pages() -> dict[str, str]:
    """Return the Markdown of all pages by their file names."""
    return {
        "cli.md": cli(),
        "environment.md": environment(),
        "http.md": http(),
        "sampling.md": sampling(),
        "config.md": config(),
        "sdk.md": sdk(),
    }


def cli() -> str:
    """Return all commands with their arguments and options."""
    text = [
        "# Command line",
        "`genserve COMMAND --help` prints the same. Each option may be set by the variable behind it, too "
        "([environment variables](environment.md)).",
    ]
    for name, command in commands().items():
        text += [f"## genserve {name}", _paragraphs(command.help)]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        text.append(f"```text\ngenserve {name} {usage}\n```")
        text.append("```sh\n" + "\n".join(COMMANDS[name].examples) + "\n```")
        for panel, params in _panels(command).items():
            head = ["" if panel == "Options" else f"**{panel}**"] if params else []
            rows = [(_names(param), _values(param), _default(param), _help(param)) for param in params]
            text += [*head, _table(("", "values", "default", "effect"), rows)]
    return _page(text)


def environment() -> str:
    """Return the environment variables: those of options, and the others."""
    found: dict[str, tuple[list[str], str, Any, str]] = {}
    for name, command in commands().items():
        for param in command.params:
            if isinstance(param.envvar, str):
                row = found.setdefault(
                    param.envvar, ([], _values(param), _default(param), _help(param, with_variable=False))
                )
                row[0].append(name)
    text = [
        "# Environment variables",
        "The variable of `--http-port` is `GENSERVE_HTTP_PORT`, and so for each flag below. A flag on the "
        "command line wins over its variable. A flag that may be repeated takes several values from its "
        "variable, separated by spaces. Switches take `true` or `false`.",
        "## Without a flag",
        _table(("variable", "meaning"), [(f"`{name}`", text) for name, text in VARIABLES.items()]),
    ]
    of_serve = {name: row for name, row in found.items() if row[0] == ["serve"]}
    for heading, rows in (
        ("Of several commands", {name: row for name, row in found.items() if name not in of_serve}),
        ("Of `genserve serve`", of_serve),
    ):
        cells = [
            (f"`{name}`", *((", ".join(row[0]),) if rows is not of_serve else ()), *row[1:])
            for name, row in sorted(rows.items())
        ]
        users = () if rows is of_serve else ("commands",)
        text += [f"## {heading}", _table(("variable", *users, "values", "default", "meaning"), cells)]
    return _page(text)


def http() -> str:
    """Return the routes and the fields of their bodies, from the OpenAPI document."""
    groups: dict[str, list[str]] = {}
    for route in documented_routes(openapi()):
        section = groups.setdefault(route.group, [])
        section += [f"### {route.method} {route.path}", _paragraphs(route.text)]
        own = [field for field in route.fields if _top(field.name) not in PARAMETERS]
        if own:
            rows = [(_field_name(field), field.kind, _code(field.default), field.text) for field in own]
            section.append(_table(("field", "values", "default", "effect"), rows))
        if len(own) < len(route.fields):
            section.append(f"And all {_SAMPLING}, by their names.")
        if route.example:
            section.append(f"```json\n{route.example}\n```")
    text = [
        "# HTTP routes",
        "What the dialects have in common, and what each ignores and rejects, is in "
        "[HTTP API](../http_api.md). A running server has the same list at `/docs`, and the document that "
        "it is made from at `/openapi.json`.",
    ]
    for group, section in groups.items():
        text += [f"## {group}", *section]
    rows = [(row.method, f"`{row.path}`", row.text) for row in route_table()]
    text += [
        "## KServe v2",
        "With Triton's extensions ([Triton](../triton.md)).",
        _table(("", "path", ""), rows),
    ]
    return _page(text)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    services = Services(settings=ServerSettings(), repository=Repository([]), metrics=Metrics())
    return create_app(services).openapi()


def sampling() -> str:
    """Return the tables of docs/sampling.md without the text around them."""
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    tables = dict(re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end of table -->", page, re.DOTALL))
    text = [
        "# Sampling parameters",
        "The names are vLLM's. Every route that generates text takes them in its body, the SDK as keyword "
        "arguments, the command line as `--set NAME=VALUE`. [Sampling](../sampling.md) describes their order "
        "and their limits.",
    ]
    for section, heading in SECTIONS.items():
        text += [f"## {heading}", re.sub(r"\]\((?=\w+\.md)", "](../", tables[section]).strip()]
    return _page(text)


def config() -> str:
    """Return the fields of config.pbtxt and their effect, and the parameters of the backends."""
    text = [
        "# config.pbtxt",
        "The fields of Triton's schema. `genserve check` names every field of a repository that has no "
        "effect, with its line.",
    ]
    in_roles: dict[tuple[str, str], list[str]] = {}
    for name, descriptor in _messages(new_model_config().DESCRIPTOR):
        rows = []
        for field in descriptor.fields:
            path = f"{name}.{field.name}".lstrip(".")
            reason = reason_without_effect(path)
            rows.append((f"`{field.name}`", _kind(field), f"ignored: {reason}" if reason else "as in Triton"))
            for role in Role:
                if reason := reason_without_effect(path, role=role):
                    in_roles.setdefault((path, reason), []).append(str(role))
        text += [f"## {name or 'The model'}", _table(("field", "type", "effect"), rows)]
    text += [
        "## Fields without effect in a text model",
        "A text model and its stages run in one engine, which ignores these fields:",
        _table(
            ("field", "in a", "because"),
            [(f"`{path}`", ", ".join(roles), reason) for (path, reason), roles in in_roles.items()],
        ),
        "## Parameters of the backends",
        '```text\nparameters { key: "NAME" value { string_value: "VALUE" } }\n```',
    ]
    for backend, parameters in PARAMETERS_OF_BACKENDS.items():
        if parameters:
            rows = [(f"`{name}`", values) for name, values in parameters.items()]
            text += [f"### {backend}", _table(("parameter", "value"), rows)]
    return _page(text)


def sdk() -> str:
    """Return the page of the SDK, whose text mkdocstrings takes from the docstrings."""
    names = (
        "Client", "AsyncClient", "LLM", "SamplingParams", "Chat", "Message", "Completion", "Delta", "Usage",
        "GenserveError",
    )  # fmt: skip
    text = [
        "# Python SDK",
        "`Client` calls a server, `AsyncClient` the same in an event loop, and `LLM` runs a model of a "
        "repository in this process. The keyword arguments of their methods are the "
        "[sampling parameters](sampling.md).",
        *(f"::: genserve.{name}" for name in names),
    ]
    return _page(text)


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if not getattr(param, "hidden", False) and param.name != "help":
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(param)
    return panels


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in param.opts)
    return names + (f" or `{param.secondary_opts[0]}`" if param.secondary_opts else "")


def _values(param: Any) -> str:
    if getattr(param, "is_flag", False):
        return "switch"
    kind = param.type_descriptor.annotation
    while get_origin(kind) in (UnionType, Union, list):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    text = {int: "a whole number", float: "a number", str: "text", Path: "a path"}[kind]
    low, high = param.min, param.max
    if low is not None:
        text += f", {low:g} to {high:.0f}" if high is not None and high < _NO_LIMIT else f", at least {low:g}"
    return text + (", repeatable" if param.multiple else "")


def _default(param: Any) -> str:
    value = param.default
    if param.required:
        return "required"
    if value is None or value is False or value in ((), [], "") or callable(value):
        return ""
    shown = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(f"`{str(one).lower() if isinstance(one, bool) else one}`" for one in shown)


def _help(param: Any, *, with_variable: bool = True) -> str:
    text = getattr(param, "help", None) or ""
    variable = f" `{param.envvar}`" if with_variable and isinstance(param.envvar, str) else ""
    return (text + variable).strip()


def _field_name(field: DocumentedField) -> str:
    return f"`{field.name}`" + (", required" if field.is_required else "")


def _top(name: str) -> str:
    """Return the first name of a field, without a dialect's object of sampling parameters."""
    return re.split(r"[.[]", re.sub(r"^(parameters|options)\.", "", name))[0]


def _messages(descriptor: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the message of a model config and those in it, by their paths."""
    yield name, descriptor
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            path = f"{name}.{field.name}".lstrip(".")
            if not reason_without_effect(path):
                yield from _messages(inner, path)


def _kind(field: Any) -> str:
    """Return the type of a field as a schema has it."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map of {_kind(key)} to {_kind(value)}"
    words = {
        1: "number",
        2: "number",
        3: "integer",
        4: "integer",
        5: "integer",
        8: "bool",
        9: "string",
        12: "bytes",
    }
    if field.enum_type is not None:
        kind = " ".join(f"`{value.name}`" for value in field.enum_type.values)
    else:
        kind = words.get(field.type, "integer") if field.message_type is None else "message"
    return f"{kind}, repeated" if field.is_repeated else kind


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(tuple(head)), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Return a text for one cell of a table: no line ends, no column borders, no markup of its own."""
    parts = re.split(r"(`[^`]*`|\[[^]]*\]\([^)]*\))", " ".join(text.split()).replace("|", r"\|"))
    return "".join(
        part if index % 2 else re.sub(r"([*_<])", r"\\\1", part) for index, part in enumerate(parts)
    )


def _paragraphs(text: str | None) -> str:
    """Return a docstring, each of its paragraphs in one line."""
    return "\n\n".join(_cell(part) for part in re.split(r"\n\s*\n|\f", text or "") if part.strip())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def main(folder: Path) -> None:
    """Write the pages, and the OpenAPI document."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "openapi.json").write_text(json.dumps(openapi(), indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
