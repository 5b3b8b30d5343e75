"""The command `genserve models`."""

from __future__ import annotations

from genserve.cli.flags import ModelRepository, Url


def models(model_repository: ModelRepository = None, url: Url = None) -> None:
    """List the text models of a repository, or the models of a server."""
    if url:
        _print_remote(url)
        return
    from rich.table import Table

    from genserve.cli.console import make_console
    from genserve.cli.model_access import local_models
    from genserve.export import DEFAULT_MODEL
    from genserve.kernels import instruction_set
    from genserve.store import default_repository, described, repository_flag

    repository = model_repository or default_repository()
    found = local_models(repository)
    if not found:
        pull = f"genserve pull {DEFAULT_MODEL}{repository_flag(repository)}"
        print(f"there is no text model in {described(repository)}; install one with `{pull}`")
        return
    headings = ("model", "size", "precision", "top-1", "perplexity", "KL", "state")
    table = Table(*headings, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for model in found:
        state = f"no weights: {', '.join(model.missing)}" if model.missing else "ready to load"
        table.add_row(model.name, f"{model.size_bytes / 1e6:.1f} MB", *model.quality, state)
    make_console().print(table)
    print(f"\nkernels of this machine: {instruction_set()}")


def _print_remote(url: str) -> None:
    from genserve.client import Client

    with Client(url) as client:
        print("\n".join(client.models()))
