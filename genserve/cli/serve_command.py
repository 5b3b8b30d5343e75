"""The command `genserve serve`, and the banner that it prints when the server is ready."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from genserve.cli.completion_command import model_names
from genserve.settings import Flag, ServerSettings
from genserve.store import default_repository

if TYPE_CHECKING:
    from genserve.repository.model_versions import IndexEntry
    from genserve.server import ServerInfo


logger = logging.getLogger(__name__)


def serve(model: list[str] | None = None, **options: Any) -> None:
    """Serve the models of a repository over HTTP and gRPC: all, or those that are named.

    A named model that is missing is pulled first: smollm2, or ORG/NAME on the Hugging Face hub.

    Flags that tritonserver has too have its names; switches may be written --switch=false. Each flag has
    an environment variable, such as GENSERVE_HTTP_PORT for --http-port.

    Set GENSERVE_API_KEY to require a key, or --api-key-file to have several; addresses that other machines
    can reach need one.
    """
    settings = _server_settings(options)
    # Before the ports open: a download may take minutes.
    settings = _with_models(settings, model or [])
    # The imported packages make 86,000 objects that live as long as the process. To collect garbage among
    # them takes a twentieth of the start, and each later full collection delays every answer by 0.1 s.
    gc.disable()
    # gRPC's library would write lines of its own about clients that break its rules among those of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from genserve.server import serve as run_server

    gc.freeze()
    gc.enable()
    # Requests leave few reference cycles; looking for them after every 700 objects costs 7 % of an inference.
    gc.set_threshold(10_000, 10, 10)
    # A model.py may read them, as unittest.main() does; in Triton its process has none.
    del sys.argv[1:]

    run_server(settings, on_ready=print_startup_banner, end_process=_exit_process)


def _with_models(settings: ServerSettings, names: Sequence[str]) -> ServerSettings:
    """Return the settings that serve only the named models, if any; those that are missing are pulled."""
    from genserve.cli.model_access import bring_models, remark_on_old_default

    store = default_repository()
    if settings.model_repository == (store,):
        remark_on_old_default()
        with suppress(OSError):     # what cannot be made is reported as missing
            store.mkdir(parents=True, exist_ok=True)
    found = bring_models(names, roots=settings.model_repository)
    return replace(settings, load_model=(*settings.load_model, *found))


def _server_settings(options: Mapping[str, Any]) -> ServerSettings:
    """Return the settings of a command line; raises BadParameter for a value that is not allowed."""
    for setting in _SETTINGS:
        validate = setting.metadata["flag"].validate
        try:
            if validate is not None:
                validate(options[setting.name])
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=_names(setting)[0]) from error
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }
    return ServerSettings(
        api_key=os.environ.get("GENSERVE_API_KEY") or None,
        control_key=os.environ.get("GENSERVE_CONTROL_KEY") or None,
        **values,
    )


def _names(setting: Field[Any]) -> tuple[str, ...]:
    flag: Flag = setting.metadata["flag"]
    return flag.names or ("--" + setting.name.replace("_", "-"),)


def _parameter(setting: Field[Any], kind: Any) -> inspect.Parameter:
    """Return the typer option of a setting; `kind` is the type of the field."""
    flag: Flag = setting.metadata["flag"]
    names = _names(setting)
    option = typer.Option(
        *(f"{name}/--no-{name[2:]}" if kind is bool else name for name in names),
        envvar="GENSERVE_" + names[0][2:].upper().replace("-", "_"),
        help=flag.help,
        rich_help_panel=flag.panel,
        min=flag.minimum,
        max=flag.maximum,
        show_default=flag.show_default,
        show_envvar=False,  # the text of `serve` has the rule
    )
    default: Any = None if setting.default is MISSING else setting.default
    if get_origin(kind) is tuple:   # typer has lists for options that may be given again
        default = None if default is None else list(default)
        kind = list[Path] if get_args(kind)[0] is Path else list[str]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


_SETTINGS = tuple(setting for setting in fields(ServerSettings) if "flag" in setting.metadata)
_KINDS = get_type_hints(ServerSettings)
# typer reads the options of a command from its signature.
_MODEL = inspect.Parameter(
    "model",
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    default=None,
    annotation=Annotated[
        list[str] | None,
        typer.Argument(
            help="Models to serve: of the repository, smollm2, or ORG/NAME. Default: all there.",
            autocompletion=model_names,
        ),
    ],
)
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_MODEL, *(_parameter(setting, _KINDS[setting.name]) for setting in _SETTINGS)]
)


def _exit_process(code: int) -> None:
    # Not `sys.exit`: a model that does not return would keep the process alive as it kept the server.
    os._exit(code)


def print_startup_banner(server: ServerInfo) -> None:
    """Print the models, the URLs, and the first commands to try, if stdout can be written."""
    try:
        _print_banner(server)
    except (OSError, SystemExit) as error:  # rich exits where nobody reads a pipe
        logger.warning("cannot write to stdout: %s", getattr(error, "strerror", None) or "nobody reads it")
        # What is left in the buffer would fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_banner(server: ServerInfo) -> None:
    from genserve.cli.console import print_error

    if server.versions:
        _print_table(server.versions)
    for model in server.models:
        print(
            f"{model.name}: {model.precision}, context length {model.max_length}, "
            f"up to {model.max_num_seqs} sequences, KV cache up to {model.kv_cache_bytes / 2**20:,.0f} MiB"
        )
    for error in server.errors:
        print_error(error)
    routes = "open it in a browser to chat; API: /docs" if server.models else "API: /docs"
    print(f"\nReady at {server.url} ({routes})")
    if server.grpc_address:
        print(f"KServe v2 at {server.url}/v2, over gRPC at {server.grpc_address}")
    if server.metrics_url:
        print(f"Metrics at {server.metrics_url}")
    print(flush=True)
    if server.models:
        _print_first_steps(server)


def _print_table(versions: tuple[IndexEntry, ...]) -> None:
    from rich.table import Table

    from genserve.cli.console import make_console, visible

    table = Table("Model", "Version", "Status")
    for line in versions:
        status = f"{line.state}: {line.reason.strip()}" if line.reason else line.state or "not loaded"
        table.add_row(visible(line.name), "" if line.version is None else str(line.version), visible(status))
    make_console().print(table, soft_wrap=False)


def _print_first_steps(server: ServerInfo) -> None:
    body = {
        "model": server.models[0].name,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "stream": True,
    }
    print(f"  genserve chat --url {server.url}")
    print(f"  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n", flush=True)
