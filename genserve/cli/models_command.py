"""The command `genserve models`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.cli.flags import JSON_FLAG, RepositoryFlags, ServerFlags
from genserve.settings import Flag, flag
from genserve.store import default_repository

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from genserve.cli.flags import RemoteServer
    from genserve.cli.local_models import LocalModel
    from genserve.export import KnownEncoder, KnownModel
    from genserve.export.machine_speed import MachineSpeed


@dataclass(frozen=True, kw_only=True)
class ModelsFlags(ServerFlags, RepositoryFlags):
    """The flags of `genserve models`."""

    available: bool = flag(
        False,
        Flag(
            help="List the models that have a short name, to pull or to chat with, and an estimate of their "
            "speed on this machine."
        ),
    )
    json_: bool = flag(False, JSON_FLAG)


def models(flags: ModelsFlags) -> None:
    """List the text models of a repository, the models of a server, or models to pull."""
    if flags.available:
        _print_available(flags.model_repository or default_repository(), as_json=flags.json_)
        return
    if server := flags.server():
        _print_remote(server, as_json=flags.json_)
        return
    from genserve.cli.console import print_json
    from genserve.cli.local_models import local_models

    repository = flags.model_repository or default_repository()
    found = local_models(repository)
    if flags.json_:
        print_json({"model_repository": repository, "models": found})
    else:
        _print_local(found, repository=repository)


def _print_local(found: Sequence[LocalModel], *, repository: Path) -> None:
    from genserve.cli.console import print_prose, print_table
    from genserve.export import DEFAULT_MODEL
    from genserve.kernels import instruction_set
    from genserve.store import described, repository_flag

    if not found:
        pull = f"genserve pull {DEFAULT_MODEL}{repository_flag(repository)}"
        print(f"there is no text model in {described(repository)}; install one with `{pull}`")
        print("`genserve models --available` lists others")
        return
    headings = ("model", "size", "precision", "top-1", "perplexity", "KL", "state")
    rows = []
    for model in found:
        of = "" if model.base is None else f", an adapter of {model.base}"
        state = f"no weights: {', '.join(model.missing)}" if model.missing else f"ready to load{of}"
        rows.append((model.name, f"{model.size_bytes / 1e6:.1f} MB", *_quality_cells(model), state))
    print_table(_table(headings, rows))
    print_prose(f"\nin {described(repository)}; kernels of this machine: {instruction_set()}")


def _print_available(repository: Path, *, as_json: bool) -> None:
    from genserve.cli.console import make_console, print_json
    from genserve.cli.local_models import local_models
    from genserve.export import KNOWN_ENCODERS, KNOWN_MODELS
    from genserve.export.machine_speed import measure_speed

    installed = {model.name for model in local_models(repository)} if repository.exists() else set()
    with make_console(stderr=True).status("measuring this machine"):
        speed = measure_speed()
    rows = [
        _available(model, speed, is_installed=model.name in installed) for model in KNOWN_MODELS.values()
    ]
    encoders = [_available_encoder(encoder, repository) for encoder in KNOWN_ENCODERS.values()]
    if as_json:
        print_json({"machine": speed, "models": rows, "encoders": encoders})
    else:
        _print_available_table(rows, speed)
        _print_encoder_table(encoders)


def _available(model: KnownModel, speed: MachineSpeed, *, is_installed: bool) -> dict[str, Any]:
    from genserve.export.machine_speed import MANY_ROWS

    return {
        "name": model.name,
        "source": model.source,
        "licence": model.licence,
        "is_gated": model.is_gated,
        "good_for": model.good_for,
        "parameters": model.shape.parameters,
        "context_length": model.shape.context,
        "download_bytes": model.download_bytes,
        "disk_bytes": model.graph_bytes,
        "memory_bytes": model.memory_bytes,
        "estimated_tokens_per_s": speed.tokens_per_s(model.shape),
        "estimated_tokens_per_s_of_32": speed.tokens_per_s(model.shape, sequences=MANY_ROWS),
        "was_run": model.was_run,
        "is_installed": is_installed,
    }


def _available_encoder(encoder: KnownEncoder, repository: Path) -> dict[str, Any]:
    return {
        "name": encoder.name,
        "source": encoder.package,
        "licence": encoder.licence,
        "good_for": encoder.good_for,
        "parameters": encoder.parameters,
        "max_length": encoder.max_length,
        "size": encoder.size,
        "download_bytes": encoder.download_bytes,
        "disk_bytes": encoder.graph_bytes,
        "is_installed": (repository / encoder.name).exists(),
    }


def _print_encoder_table(rows: Sequence[Mapping[str, Any]]) -> None:
    from genserve.cli.console import sized

    print("\n`genserve pull NAME` brings an encoder, for /v1/embeddings:")
    _print_described(
        ("encoder", "weights", "download", "tokens", "vector", "licence", "good for"),
        [
            (
                row["name"] + (" (installed)" if row["is_installed"] else ""),
                f"{row['parameters'] / 1e6:.0f}M",
                sized(row["download_bytes"]),
                str(row["max_length"]),
                str(row["size"]),
                row["licence"],
                row["good_for"],
            )
            for row in rows
        ],
    )


def _print_available_table(rows: Sequence[Mapping[str, Any]], speed: MachineSpeed) -> None:
    from genserve.cli.console import print_prose, sized
    from genserve.kernels import instruction_set
    from genserve.machine import default_threads, total_memory_bytes

    sizes = ("weights", "download", "memory", "context", "tokens/s", "of 32")
    cells = []
    for row in rows:
        millions = row["parameters"] / 1e6
        cells.append(
            (
                row["name"] + (" (installed)" if row["is_installed"] else ""),
                f"{millions:.0f}M" if millions < 995 else f"{millions / 1e3:.1f}B",
                sized(row["download_bytes"]),
                sized(row["memory_bytes"]),
                f"{row['context_length'] // 1024}k",
                f"{row['estimated_tokens_per_s']:.0f}",
                f"{row['estimated_tokens_per_s_of_32']:.0f}",
                row["licence"] + (", account" if row["is_gated"] else ""),
                row["good_for"],
            )
        )
    _print_described(("model", *sizes, "licence", "good for"), cells)
    total = total_memory_bytes()
    here = f", of {sized(total)} here" if total else ""
    print_prose(
        "\n`genserve chat NAME` downloads one, and tells its size first.\n"
        "tokens/s: estimates for one answer and for 32 at once, from products measured just now: "
        f"{speed.bytes_per_s / 1e9:.0f} GB/s and {speed.operations_per_s / 1e9:.0f} GOP/s, "
        f"{default_threads()} threads, {instruction_set()}.\n"
        f"memory: with one chat of 4k tokens{here}. "
        "account: needs one at Hugging Face that has accepted the licence.\n"
        f"Run by us with its own weights: {', '.join(row['name'] for row in rows if row['was_run'])}. Of the "
        "others the architecture is tested, with random weights."
    )


def _print_described(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; on a terminal that is narrower, the last two columns are sentences below the others."""
    from genserve.cli.console import fits_terminal, print_prose, print_table

    table = _table(headings, rows)
    if fits_terminal(table):
        print_table(table)
        return
    print_table(_table(headings[:-2], [row[:-2] for row in rows]))
    print()
    for name, *_, licence, good_for in rows:
        print_prose(f"{name}: {good_for}. {licence}.")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(*headings, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _quality_cells(model: LocalModel) -> tuple[str, str, str, str]:
    quality = model.quality
    if quality is None:
        return "", "", "", ""
    precision = quality.precision + ("+kv8" if quality.kv_cache == "int8" else "")
    ratio, divergence = f"x{quality.perplexity_ratio:.3f}", f"{quality.divergence:.4f}"
    return precision, f"{quality.top1_agreement:.1%}", ratio, divergence


def _print_remote(server: RemoteServer, *, as_json: bool) -> None:
    from genserve.cli.console import print_json

    with server.client() as client:
        served = client.default_sampling_params()
    if as_json:
        known = [{"name": name, "default_sampling_params": params} for name, params in served.items()]
        print_json({"url": server.url, "models": known})
    else:
        print("\n".join(served))
