"""Reference pages: writes commands, environment, HTTP routes, config.pbtxt, SDK and metrics from the code.

    python scripts/reference_pages.py FOLDER    # writes them; `make docs` makes them pages of the site

The pages are not stored: each build reads the code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from genserve.cli.main import COMMANDS, parsers
from genserve.cli.parser import Parameter
from genserve.config.backends import BUILT_IN
from genserve.config.schema import new_model_config
from genserve.generation_metrics import Metrics
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.repository.rules.supported_fields import reason_without_effect
from genserve.repository.text_stages import Role
from genserve.sampling.param_table import SECTIONS, Param
from genserve.sampling.sampling_params import PARAMETERS
from genserve.server.access.key_usage import KeyUsageCollector
from genserve.server.app import create_app
from genserve.server.kserve.routes import ROUTES
from genserve.server.kserve.state import KServeState
from genserve.server.observe.event_loop_lag import EventLoopLag
from genserve.server.observe.metrics_text import VLLM_NAMES, metrics_text
from genserve.server.observe.on_demand_metrics import OnDemandCollector
from genserve.server.pages.docs_page import DocumentedField, documented_routes
from genserve.server.services import Services
from genserve.settings import ServerSettings

ROOT = Path(__file__).parents[1]
# The environment variables that belong to no flag.
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
# The keys of the documents that commands print with --json.
DOCUMENTS = {
    "models":
        "`model_repository`, `models`: `name`, `size_bytes`, `missing` (stages without files), "
        "`quality` or `null`: `precision`, `kv_cache`, `top1_agreement`, `perplexity_ratio`, "
        "`divergence`",
    "models --available":
        "`machine`: `bytes_per_s`, `operations_per_s`; `models`: `name`, `source`, `licence`, "
        "`is_gated`, `good_for`, `parameters`, `context_length`, `download_bytes`, `disk_bytes`, "
        "`memory_bytes`, `estimated_tokens_per_s`, `estimated_tokens_per_s_of_32`, `was_run`, "
        "`is_installed`; `encoders`: `name`, `source`, `licence`, `good_for`, `parameters`, "
        "`max_length`, `size`, `download_bytes`, `disk_bytes`, `is_installed`",
    "models --url": "`url`, `models`: `name`, `default_sampling_params`",
    "check":
        "`models` (names), `num_errors`, `num_warnings`, `diagnostics`: `model`, `severity`, "
        "`path`, `line`, `column`, `message`, `remedy`",
    "generate":
        "`model`, `text`, `token_ids`, `finish_reason`, `stop_reason`, `usage`, and what was "
        "requested: `logprobs`, `top_logprobs`, `prompt_logprobs`",
    "bench":
        "`url`, `backend`, `model`, `seed`, `burstiness`, `goodput_limits_ms`, `is_interrupted`, "
        "`runs`: the figures of each load by [vLLM's names](../benchmarking.md#reports)",
    "tune":
        "`model`, `objective`, `max_inter_token_ms`, `meets_max_inter_token_ms`, `measurements` "
        "(one is `is_best`, one may be `is_current`), `stolen_share`, `is_interrupted`, `changes`: "
        "`path`, `diff`; `is_written`",
}
_NO_LIMIT = 2**31 - 1
# A sampling parameter is described once.
_SAMPLING = "[sampling parameters](sampling.md)"


def pages() -> dict[str, str]:
    """Return the Markdown of all pages by their file names."""
    return {
        "cli.md": cli(),
        "environment.md": environment(),
        "http.md": http(),
        "sampling.md": sampling(),
        "config.md": config(),
        "sdk.md": sdk(),
        "metrics.md": metrics(),
    }


def cli() -> str:
    """Return all commands with their arguments and options."""
    text = [
        "# Command line",
        "`genserve COMMAND --help` prints the same. Each option may be set by the variable behind it, too "
        "([environment variables](environment.md)).",
    ]
    for name, parser in parsers().items():
        text += [f"## genserve {name}", _paragraphs(parser.description)]
        text.append(f"```text\n{parser.synopsis}\n```")
        text.append("```sh\n" + "\n".join(COMMANDS[name].examples) + "\n```")
        for heading, found in _headings(parser.parameters).items():
            head = ["" if heading == "Options" else f"**{heading}**"]
            rows = [(_names(each), _values(each), _default(each), _help(each)) for each in found]
            text += [*head, _table(("", "values", "default", "effect"), rows)]
    text += [
        "## JSON documents",
        "What commands print with `--json` ([the command line](../cli.md#json)).",
        _table(("command", "keys"), [(_code(name), keys) for name, keys in DOCUMENTS.items()]),
    ]
    return _page(text)


def environment() -> str:
    """Return the environment variables, of options and others."""
    found: dict[str, tuple[list[str], str, Any, str]] = {}
    for name, parser in parsers().items():
        for each in parser.parameters:
            if each.variable:
                row = found.setdefault(
                    each.variable, ([], _values(each), _default(each), _help(each, with_variable=False))
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
        "What the dialects have in common, and where each differs from its original, is in "
        "[HTTP API](../http_api.md). A running server has the same list at `/docs`, and the document that "
        "it is made from at `/openapi.json`.",
    ]
    for group, section in groups.items():
        text += [f"## {group}", *section]
    rows = [(row.method, f"`{row.path}`", row.text) for row in ROUTES]
    text += [
        "## KServe v2",
        "With Triton's extensions ([Triton](../triton.md)).",
        _table(("", "path", ""), rows),
    ]
    return _page(text)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    settings = ServerSettings()
    services = Services(settings=settings, repository=Repository([]), metrics=Metrics())
    return create_app(services, KServeState(settings)).openapi()


def metrics() -> str:
    """Return the metrics of text generation, beside vLLM's names of the same numbers."""
    registry = Metrics().registry
    registry.register(EventLoopLag())
    registry.register(KeyUsageCollector({}))
    options = RepositoryOptions(control_mode=ControlMode.ON_DEMAND, memory_budget_bytes=1)
    on_demand = Repository([], options=options).on_demand
    assert on_demand is not None
    registry.register(OnDemandCollector(on_demand))
    lines = re.findall(r"# HELP (\S+) (.*)\n# TYPE \S+ (\w+)", metrics_text(registry).decode())
    vllm = {ours.removesuffix("_total"): theirs for ours, theirs in VLLM_NAMES.items()}
    rows = []
    for name, text, kind in lines:
        theirs = vllm.get(name.removesuffix("_total"), "")
        theirs += "_total" if theirs and kind == "counter" else ""
        if name.startswith("genserve_"):
            rows.append((_code(name), _code(theirs), kind, text))
        elif name.removesuffix("_total") not in vllm.values() and name not in vllm.values():
            rows.append((_code(name), "", kind, text))
    text = [
        "# Metrics",
        "`/metrics` has these metrics of text generation, with the label `model`; under vLLM's names they "
        "have vLLM's labels `model_name` and `engine`. [Observability](../observability.md) says which to "
        "plot.",
        _table(("metric", "in vLLM", "type", "meaning"), rows),
    ]
    return _page(text)


def sampling() -> str:
    """Return the tables of all sampling parameters, by section."""
    text = [
        "# Sampling parameters",
        "The names are vLLM's. Every route that generates text takes them in its body, the SDK as keyword "
        "arguments, the command line as `--set NAME=VALUE`. [Sampling](../sampling.md) describes how they "
        "work together.",
    ]
    for section, heading in SECTIONS.items():
        rows = (
            [_code(row.name), _sampling_values(row), _sampling_default(row), _relinked(row.doc)]
            for row in PARAMETERS.values() if row.section == section
        )
        text += [f"## {heading}", _table(["field", "values", "default", "effect"], rows)]
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
    for name, backend in BUILT_IN.items():
        if backend.parameters:
            rows = [(f"`{parameter}`", kind) for parameter, kind in backend.parameters.items()]
            text += [f"### {name}", _table(("parameter", "value"), rows)]
    return _page(text)


def sdk() -> str:
    """Return the page of the SDK; mkdocstrings fills in the docstrings."""
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


def _sampling_values(row: Param) -> str:
    if row.range is not None:
        return str(row.range)
    if row.max_items is not None:
        return f"up to {row.max_items} {'ids' if row.item is int else f'texts of {row.max_chars} characters'}"
    if row.item is not None:
        return {int: "ids", str: "names"}.get(row.item, "plug-ins ([decoding.md](../decoding.md))")
    named = [_json(value) for kind in row.kinds for value in getattr(kind, "__args__", ())]
    words = (["true or false"] if bool in row.kinds else []) + named
    text = f"text of up to {row.max_chars} characters" if row.max_chars else "text"
    return " or ".join(words) or (text if str in row.kinds else "an object")


def _sampling_default(row: Param) -> str:
    return "" if row.default in (None, (), {}) else _json(row.default)


def _json(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text}`" if isinstance(value, str | tuple | list) else text


def _relinked(text: str) -> str:
    """Return the effect of a parameter with links that work in the folder of the reference."""
    return re.sub(r"\]\((?=\w+\.md)", "](../", text)


def _headings(parameters: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    headings: dict[str, list[Parameter]] = {}
    for each in parameters:
        default = "Arguments" if each.flag.is_argument else "Options"
        headings.setdefault(each.flag.heading or default, []).append(each)
    return headings


def _names(parameter: Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.names)
    return names + (f" or `{parameter.negations[0]}`" if parameter.negations else "")


def _values(parameter: Parameter) -> str:
    if parameter.choices:
        return ", ".join(f"`{choice}`" for choice in parameter.choices)
    kinds = {bool: "switch", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    text, low, high = kinds[parameter.kind], parameter.flag.minimum, parameter.flag.maximum
    if low is not None:
        text += f", {low:g} to {high:.0f}" if high is not None and high < _NO_LIMIT else f", at least {low:g}"
    return text + (", repeatable" if parameter.is_repeatable else "")


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if value is MISSING:
        return "required"
    if value is None or value is False or value in ((), [], ""):
        return ""
    if callable(parameter.field.default_factory):   # a path of this machine
        return ""
    shown = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(f"`{str(one).lower() if isinstance(one, bool) else one}`" for one in shown)


def _help(parameter: Parameter, *, with_variable: bool = True) -> str:
    variable = f" `{parameter.variable}`" if with_variable and parameter.variable else ""
    return (parameter.flag.help + variable).strip()


def _field_name(field: DocumentedField) -> str:
    return f"`{field.name}`" + (", required" if field.is_required else "")


def _top(name: str) -> str:
    """Return the first name of a field, without a dialect's object of sampling parameters."""
    return re.split(r"[.[]", re.sub(r"^(parameters|options)\.", "", name))[0]


def _messages(descriptor: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the messages of a model config by path: the config itself, and all messages in it."""
    yield name, descriptor
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            path = f"{name}.{field.name}".lstrip(".")
            if not reason_without_effect(path):
                yield from _messages(inner, path)


def _kind(field: Any) -> str:
    """Return the type of a field as its schema says."""
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
    """Return a docstring with each paragraph on one line."""
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
