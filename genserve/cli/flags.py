"""Flags: the options that several commands share, so that a name means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "DEFAULT_REPOSITORY",
    "Beside",
    "FileFormat",
    "KvCache",
    "MaxTokens",
    "ModelRepositories",
    "ModelRepository",
    "Overwrite",
    "Precision",
    "Seed",
    "Set",
    "Temperature",
    "Url",
]

DEFAULT_REPOSITORY = Path("model_repository")

ModelRepository = Annotated[
    Path, typer.Option(envvar="GENSERVE_MODEL_REPOSITORY", help="Folder that holds the models.")
]
ModelRepositories = Annotated[
    list[Path],
    typer.Option(
        "--model-repository",
        "--model-store",
        envvar="GENSERVE_MODEL_REPOSITORY",
        help="Folder that holds models; may be given again.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        envvar="GENSERVE_BASE_URL",
        help="Ask the server at this URL, with the key GENSERVE_API_KEY; else no server is needed.",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(envvar="GENSERVE_MAX_TOKENS", help="The longest answer, in tokens.")
]
Temperature = Annotated[
    float, typer.Option(envvar="GENSERVE_TEMPERATURE", help="0 always takes the likeliest token.")
]
Seed = Annotated[
    int | None, typer.Option(envvar="GENSERVE_SEED", help="The same seed gives the same text.")
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other sampling parameter, such as repetition_penalty=1.2; may be given again. Lists and "
        "the like are JSON. docs/sampling.md has them all.",
    ),
]
Precision = Annotated[
    Literal["int8", "int4", "fp16", "fp32"] | None,
    typer.Option(envvar="GENSERVE_PRECISION", help="Of the weights; usually int8, in TorchScript fp32."),
]
KvCache = Annotated[
    Literal["float", "int8"],
    typer.Option(
        help="Keys and values: fp16 (of an fp32 export fp32), or in int8, which takes half of the memory."
    ),
]
FileFormat = Annotated[
    Literal["onnx", "torchscript"],
    typer.Option("--format", help="Of the graph: ONNX is the faster; TorchScript runs in torch."),
]
Beside = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Add the graph to a model that is there, in a folder beside its own; `genserve tune` chooses.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the weights and their configs, and delete graphs beside them; "
        "with --beside: replace that graph alone.",
    ),
]
