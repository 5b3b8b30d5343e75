"""Server card: what `genserve serve` prints when its server is ready."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genserve.server import ServerInfo, VersionInfo

__all__ = ["print_card"]


def print_card(server: ServerInfo) -> None:
    """Print what is served, where, and what to try first."""
    from genserve.cli.render import print_error

    if server.versions:
        _print_table(server.versions)
    for model in server.models:
        print(
            f"{model.name}: {model.precision}, {model.max_length} tokens of context, "
            f"{model.max_num_seqs} answers at once, KV cache up to {model.kv_cache_bytes / 2**20:,.0f} MiB"
        )
    for error in server.errors:
        print_error(error)
    routes = "chat: /v1/chat/completions, generate: /generate, API: /docs" if server.models else "API: /docs"
    print(f"\nReady at {server.url} ({routes})")
    if server.grpc_address:
        print(f"KServe v2 at {server.url}/v2, over gRPC at {server.grpc_address}")
    if server.metrics_url:
        print(f"Metrics at {server.metrics_url}")
    print(flush=True)
    if server.models:
        _print_first_steps(server)


def _print_table(versions: tuple[VersionInfo, ...]) -> None:
    from rich.table import Table

    from genserve.cli.render import make_console, visible

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
