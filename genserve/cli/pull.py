"""Pull: the command `genserve pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from genserve.cli.flags import DEFAULT_REPOSITORY, Beside, KvCache, ModelRepository, Overwrite, Precision

__all__ = ["pull"]


def pull(
    name: Annotated[
        str, typer.Argument(help="smollm2, or ORG/NAME on the Hugging Face hub.", show_default=False)
    ],
    model_repository: ModelRepository = DEFAULT_REPOSITORY,
    precision: Precision = None,
    kv_cache: KvCache = "float",
    beside: Beside = None,
    overwrite: Overwrite = False,
) -> None:
    """Download a model and make it ready to be served; nothing is done if it is there."""
    from genserve.cli.export import print_report
    from genserve.cli.render import ConsoleProgress
    from genserve.export import pull as pull_model

    report = pull_model(
        name,
        repository=model_repository,
        precision=precision,
        kv_cache=kv_cache,
        beside=beside,
        overwrite=overwrite,
        progress=ConsoleProgress(),
    )
    if report is None:
        again = f"anew in {precision}" if precision else "anew"
        print(f"{name} is in {model_repository} already and stays as it is; --overwrite makes it {again}")
    else:
        print_report(report, beside=beside)
