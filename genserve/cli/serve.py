"""Serve: the command `genserve serve`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from genserve.cli.flags import ModelRepositories
from genserve.settings import ServerSettings

if TYPE_CHECKING:
    from genserve.server import ServerInfo

__all__ = ["print_card", "serve"]

_DEFAULTS = ServerSettings()


def serve(
    model_repository: ModelRepositories = list(_DEFAULTS.model_repository),  # noqa: B006  # typer copies it
    host: Annotated[
        str, typer.Option(envvar="GENSERVE_HOST", help="Address to listen on; 0.0.0.0 lets others in.")
    ] = _DEFAULTS.host,
    http_port: Annotated[
        int, typer.Option(envvar="GENSERVE_HTTP_PORT", min=0, max=65535, help="0 takes a free port.")
    ] = _DEFAULTS.http_port,
    load_model: Annotated[
        list[str],
        typer.Option(envvar="GENSERVE_LOAD_MODEL", help="Load this model, not all; may be given again."),
    ] = list(_DEFAULTS.load_model),  # noqa: B006  # typer copies it
    max_queue: Annotated[
        int, typer.Option(envvar="GENSERVE_MAX_QUEUE", min=0, help="Requests that may wait, per model.")
    ] = _DEFAULTS.max_queue,
    drain_s: Annotated[
        float, typer.Option(envvar="GENSERVE_DRAIN_S", min=0, help="Time for answers to end after SIGTERM.")
    ] = _DEFAULTS.drain_s,
    log_verbose: Annotated[
        int, typer.Option(envvar="GENSERVE_LOG_VERBOSE", min=0, help="1 logs requests too.")
    ] = _DEFAULTS.log_verbose,
) -> None:
    """Serve the models of a repository over HTTP. Set GENSERVE_API_KEY to ask clients for a key."""
    from genserve.server import serve as run_server

    settings = ServerSettings(
        model_repository=tuple(model_repository),
        host=host,
        http_port=http_port,
        load_model=tuple(load_model),
        api_key=os.environ.get("GENSERVE_API_KEY") or None,
        max_queue=max_queue,
        drain_s=drain_s,
        log_verbose=log_verbose,
    )
    run_server(settings, on_ready=print_card)


def print_card(server: ServerInfo) -> None:
    """Print where a server answers, with which models, and what to try first."""
    from genserve.cli.render import print_error

    for model in server.models:
        cache_gb = model.kv_cache_bytes / 2**30
        print(
            f"{model.name}: {model.precision}, {model.max_length} tokens of context, "
            f"{model.num_slots} answers at once, KV cache up to {cache_gb:.1f} GiB"
        )
    for error in server.errors:
        print_error(error)
    body = {
        "model": server.models[0].name,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "stream": True,
    }
    print(f"\nReady at {server.url} (chat: /v1/chat/completions, generate: /generate, API: /docs)\n")
    print(f"  genserve chat --url {server.url}")
    print(f"  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n", flush=True)
