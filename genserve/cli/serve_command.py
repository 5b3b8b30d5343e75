"""The command `genserve serve`, which prints a banner when the server is ready."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from genserve.cli.completion_command import model_names
from genserve.settings import Flag, ServerSettings, flag
from genserve.store import default_repository

if TYPE_CHECKING:
    from genserve.repository.model_versions import IndexEntry
    from genserve.server import ServerInfo


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServeFlags(ServerSettings):
    """The flags of `genserve serve`: the settings of the server, and the models."""

    model: list[str] | None = flag(
        None,
        Flag(
            help="Models to serve: of the repository, smollm2, or ORG/NAME. Default: all there.",
            is_argument=True,
            complete=model_names,
        ),
    )


def serve(flags: ServeFlags) -> None:
    """Serve the models of a repository over HTTP and gRPC: all models, or only the named ones.

    A named model that is missing is pulled first: smollm2, or ORG/NAME on the Hugging Face hub.

    Flags that tritonserver has too have its names; switches may be written --switch=false. Each flag has
    an environment variable, such as GENSERVE_HTTP_PORT for --http-port.

    Set GENSERVE_API_KEY to require a key, or --api-key-file to have several; addresses that other machines
    can reach need one.
    """
    given = {setting.name: getattr(flags, setting.name) for setting in fields(ServerSettings)}
    keys = {
        "api_key": os.environ.get("GENSERVE_API_KEY") or None,
        "control_key": os.environ.get("GENSERVE_CONTROL_KEY") or None,
    }
    settings = ServerSettings(**given | keys)
    # Pull models before the ports open, since a download may take minutes.
    settings = _with_models(settings, flags.model or [])
    # The imported packages make 86,000 objects that live as long as the process. To collect garbage among
    # them takes a twentieth of the start, and each later full collection delays every answer by 0.1 s.
    gc.disable()
    # gRPC's library would write its own lines about misbehaving clients into the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from genserve.server import serve as run_server

    gc.freeze()
    gc.enable()
    # Requests leave few reference cycles; looking for them after every 700 objects costs 7 % of an inference.
    gc.set_threshold(10_000, 10, 10)
    # A model.py may read the arguments, as unittest.main() does; in Triton its process has none.
    del sys.argv[1:]

    run_server(settings, on_ready=print_startup_banner, end_process=_exit_process)


def _with_models(settings: ServerSettings, names: Sequence[str]) -> ServerSettings:
    """Return the settings that serve only the named models, if any; missing models are pulled."""
    from genserve.cli.model_choice import bring_models, remark_on_old_default

    store = default_repository()
    if settings.model_repository == (store,):
        remark_on_old_default()
        with suppress(OSError):     # a folder that cannot be made is reported as missing
            store.mkdir(parents=True, exist_ok=True)
    found = bring_models(names, roots=settings.model_repository)
    return replace(settings, load_model=(*settings.load_model, *found))


def _exit_process(code: int) -> None:
    # `sys.exit` would not do: a model that does not return would keep the process alive.
    os._exit(code)


def print_startup_banner(server: ServerInfo) -> None:
    """Print the models, the URLs, and the first commands to try, if stdout can be written."""
    try:
        _print_banner(server)
    except (OSError, SystemExit) as error:  # rich exits if nobody reads a pipe
        logger.warning("cannot write to stdout: %s", getattr(error, "strerror", None) or "nobody reads it")
        # The rest of the buffer would fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_banner(server: ServerInfo) -> None:
    from genserve.cli.console import print_error

    if server.versions:
        # A ready stage is a part of its text model, which has its own line.
        _print_table(
            tuple(
                line
                for line in server.versions
                if line.name not in server.stages or line.state != "READY" or line.reason
            )
        )
    for model in server.models:
        print(
            f"{model.name}: {model.precision}, context length {model.context}, "
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
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "temperature": 0,
        "stream": True,
    }
    name = f"{body['model']} " if len(server.models) > 1 else ""
    key = ""
    if server.needs_key:
        print("  export GENSERVE_API_KEY=KEY    # a key of this server")
        key = ' -H "Authorization: Bearer $GENSERVE_API_KEY"'
    print(f"  genserve chat {name}--url {server.url}")
    print(f"  curl -N {server.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n", flush=True)
