"""The command `genserve models`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from genserve.cli.flags import Json, ModelRepository, Url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genserve.cli.model_access import LocalModel


def models(model_repository: ModelRepository = None, url: Url = None, json_: Json = False) -> None:
    """List the text models of a repository, or the models of a server."""
    if url:
        _print_remote(url, as_json=json_)
        return
    from genserve.cli.console import print_json
    from genserve.cli.model_access import local_models
    from genserve.store import default_repository

    repository = model_repository or default_repository()
    found = local_models(repository)
    if json_:
        print_json({"model_repository": repository, "models": found})
    else:
        _print_local(found, repository=repository)


def _print_local(found: Sequence[LocalModel], *, repository: Path) -> None:
    from rich.table import Table

    from genserve.cli.console import print_table
    from genserve.export import DEFAULT_MODEL
    from genserve.kernels import instruction_set
    from genserve.store import described, repository_flag

    if not found:
        pull = f"genserve pull {DEFAULT_MODEL}{repository_flag(repository)}"
        print(f"there is no text model in {described(repository)}; install one with `{pull}`")
        return
    headings = ("model", "size", "precision", "top-1", "perplexity", "KL", "state")
    table = Table(*headings, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for model in found:
        state = f"no weights: {', '.join(model.missing)}" if model.missing else "ready to load"
        table.add_row(model.name, f"{model.size_bytes / 1e6:.1f} MB", *_quality_cells(model), state)
    print_table(table)
    print(f"\nin {described(repository)}; kernels of this machine: {instruction_set()}")


def _quality_cells(model: LocalModel) -> tuple[str, str, str, str]:
    quality = model.quality
    if quality is None:
        return "", "", "", ""
    precision = quality.precision + ("+kv8" if quality.kv_cache == "int8" else "")
    ratio, divergence = f"x{quality.perplexity_ratio:.3f}", f"{quality.divergence:.4f}"
    return precision, f"{quality.top1_agreement:.1%}", ratio, divergence


def _print_remote(url: str, *, as_json: bool) -> None:
    from genserve.cli.console import print_json
    from genserve.client import Client

    with Client(url) as client:
        served = client.default_sampling_params()
    if as_json:
        known = [{"name": name, "default_sampling_params": params} for name, params in served.items()]
        print_json({"url": url, "models": known})
    else:
        print("\n".join(served))
