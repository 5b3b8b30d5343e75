"""Flags: the options that several commands share, and the values of `--set`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from genserve.errors import InvalidRequest
from genserve.sampling.sampling_params import SamplingOptions, sampling_params

__all__ = [
    "DEFAULT_REPOSITORY",
    "Beside",
    "FileFormat",
    "KvCache",
    "MaxTokens",
    "ModelArgument",
    "ModelRepositories",
    "ModelRepository",
    "Overwrite",
    "Precision",
    "Seed",
    "Set",
    "Temperature",
    "Url",
    "read_value",
    "with_assignments",
]

DEFAULT_REPOSITORY = Path("model_repository")

ModelArgument = Annotated[
    str | None, typer.Argument(envvar="GENSERVE_MODEL", help="Default: the only one there, or smollm2.")
]
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


def with_assignments(options: SamplingOptions, assignments: Iterable[str]) -> SamplingOptions:
    """Return the options, updated by the NAME=VALUE of each `--set`.

    Raises:
        InvalidRequest: an assignment has no =, or the name or the value is invalid.
    """
    merged: dict[str, object] = {**options}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidRequest(
                f"--set {assignment} has no value", remedy=f"write --set {assignment}=VALUE"
            )
        merged[name] = read_value(value)
    sampling_params(merged)     # validated here, before a model is loaded
    return cast(SamplingOptions, merged)


def read_value(text: str) -> object:
    """Read a value as JSON, or else as text; `none` and the empty text are None."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text in ("", "none") else text
