"""The commands `genserve export` and `genserve pull`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from genserve.cli.flags import ModelRepository
from genserve.store import default_repository, described, display_path, repository_flag

if TYPE_CHECKING:
    from genserve.export import ExportReport

FileFormat = Annotated[
    Literal["onnx", "torchscript"],
    typer.Option("--format", help="Format of the graph; ONNX is faster, TorchScript runs in torch."),
]
Precision = Annotated[
    Literal["int8", "int4", "fp16", "fp32"] | None,
    typer.Option(
        envvar="GENSERVE_PRECISION",
        help="Precision of the weights. Default: usually int8; fp32 for TorchScript.",
    ),
]
KvCache = Annotated[
    Literal["float", "int8"],
    typer.Option(
        help="Keys and values in fp16 (fp32 in an fp32 export), or in int8 with half of the memory."
    ),
]
PipelineStages = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Cut the layers into N graphs, for a model that is larger than one device; `instance_group` in "
        "config.pbtxt names the devices.",
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Add the graph to an existing model, in this subfolder; `genserve tune` chooses a graph.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the weights and configs, and delete additional graphs; with --beside: replace only "
        "that graph.",
    ),
]


def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder, a .gguf file, or ORG/NAME on the hub.", show_default=False
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model in the repository. Default: that of the source, in lower case."),
    ] = None,
    model_repository: ModelRepository = None,
    file_format: FileFormat = "onnx",
    precision: Precision = None,
    kv_cache: KvCache = "float",
    pipeline_stages: PipelineStages = 1,
    beside: Beside = None,
    overwrite: Overwrite = False,
    allow_pickled_weights: Annotated[
        bool,
        typer.Option(
            "--allow-pickled-weights",
            help="Read PyTorch's .bin files too: only tensors, but such files have run code in the past.",
        ),
    ] = False,
) -> None:
    """Convert a checkpoint to a model of the repository, and compare it with its source."""
    from genserve.cli.console import ConsoleProgress
    from genserve.export import export_model

    repository = model_repository or default_repository()
    report = export_model(
        source,
        repository=repository,
        name=name or Path(source).expanduser().resolve().name.removesuffix(".gguf").lower(),
        file_format=file_format,
        precision=precision,
        kv_cache=kv_cache,
        pipeline_stages=pipeline_stages,
        beside=beside,
        overwrite=overwrite,
        allow_pickled_weights=allow_pickled_weights,
        progress=ConsoleProgress(),
    )
    print_report(report, beside=beside)


def print_report(report: ExportReport, *, beside: str | None) -> None:
    """Print the result of an export, its parity with the source, and the next commands."""
    where = repository_flag(report.path.parent)
    cache = ", KV cache in int8" if report.kv_cache == "int8" else ""
    print(
        f"{report.name}: {report.precision}{cache}, {report.size_bytes / 1e6:.1f} MB, "
        f"exported in {report.seconds:.0f} s: {display_path(report.path)}"
    )
    print(
        f"parity with the source: largest logit difference {report.largest_logit_difference:.3g}, "
        f"top-1 agreement {report.top1_agreement:.1%}, perplexity x{report.perplexity_ratio:.3f}, "
        f"KL {report.divergence:.4f}"
    )
    if beside is None:
        print(f"next: genserve chat {report.name}{where}\n      genserve serve{where}")
    else:
        print(f"next: genserve tune {report.name}{where}, which chooses one of the graphs of the model")


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2, or ORG/NAME on the Hugging Face hub.",
            show_default=False,
            autocompletion=lambda: ["smollm2"],
        ),
    ],
    model_repository: ModelRepository = None,
    precision: Precision = None,
    kv_cache: KvCache = "float",
    pipeline_stages: PipelineStages = 1,
    beside: Beside = None,
    overwrite: Overwrite = False,
) -> None:
    """Download a model and export it to the repository, unless it is already there."""
    from genserve.cli.console import ConsoleProgress
    from genserve.export import pull as pull_model

    repository = model_repository or default_repository()
    report = pull_model(
        name,
        repository=repository,
        precision=precision,
        kv_cache=kv_cache,
        pipeline_stages=pipeline_stages,
        beside=beside,
        overwrite=overwrite,
        progress=ConsoleProgress(),
    )
    if report is None:
        target = f" in {precision}" if precision else ""
        print(f"{name} is already in {described(repository)}; --overwrite exports it again{target}")
    else:
        print_report(report, beside=beside)
