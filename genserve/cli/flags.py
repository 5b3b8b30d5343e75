"""Flags: the options that several commands share, and the values of `--set`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_type_hints

import typer

from genserve.cli.completion_command import model_names, set_assignments
from genserve.errors import InvalidRequest

if TYPE_CHECKING:
    from genserve.sampling.sampling_options import SamplingOptions

DOCUMENTATION = "https://genserve.github.io/genserve/"
# Headings in `--help`.
MODEL, SAMPLING, BATCH = "Model", "Sampling", "Batches"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        envvar="GENSERVE_MODEL",
        help="Default: the only text model, or smollm2.",
        autocompletion=model_names,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        envvar="GENSERVE_MODEL",
        help="Default: the only text model, or smollm2.",
        rich_help_panel=MODEL,
        autocompletion=model_names,
    ),
]
ModelRepository = Annotated[
    Path | None,
    typer.Option(
        envvar="GENSERVE_MODEL_REPOSITORY",
        help="Folder of the models. Default: the store in GENSERVE_HOME.",
        rich_help_panel=MODEL,
    ),
]
ModelRepositories = Annotated[
    list[Path] | None,
    typer.Option(
        "--model-repository",
        "--model-store",
        envvar="GENSERVE_MODEL_REPOSITORY",
        help="Folder of models; repeatable. Default: the store in GENSERVE_HOME.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        envvar="GENSERVE_BASE_URL",
        rich_help_panel=MODEL,
        help="Use the server at this URL, with the key in GENSERVE_API_KEY, instead of the repository.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        envvar="GENSERVE_MAX_TOKENS",
        help="Maximum length of an answer, in tokens.",
        rich_help_panel=SAMPLING,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        envvar="GENSERVE_TEMPERATURE",
        help="0: always the likeliest token.",
        rich_help_panel=SAMPLING,
    ),
]
ChatTemperature = Annotated[
    float | None,
    typer.Option(
        envvar="GENSERVE_TEMPERATURE",
        rich_help_panel=SAMPLING,
        help="0: always the likeliest token. Default: what the model recommends, or else 0.5.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        envvar="GENSERVE_TOP_K",
        help="Sample from the k likeliest tokens; 0: from all.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        envvar="GENSERVE_TOP_P",
        help="Sample from tokens of this total probability.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End the text before this string; repeatable.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        envvar="GENSERVE_SEED", help="The same seed gives the same text.", rich_help_panel=SAMPLING
    ),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        autocompletion=set_assignments,
        rich_help_panel=SAMPLING,
        help="Any other sampling parameter, such as repetition_penalty=1.2; repeatable. Lists and objects "
        f"are JSON. The parameters: {DOCUMENTATION}sampling/",
    ),
]
BatchInput = Annotated[
    Path | None,
    typer.Option(
        "--input",
        help="Answer each line of this file of JSON objects, - for stdin: prompt or messages, with an id "
        "and sampling parameters; or the lines of OpenAI's batches.",
        rich_help_panel=BATCH,
    ),
]
BatchOutput = Annotated[
    Path | None,
    typer.Option(
        help="Write the answers to this file. What it already has is not asked again. Default: stdout.",
        rich_help_panel=BATCH,
    ),
]
MaxConcurrency = Annotated[
    int, typer.Option(min=1, help="Lines that are answered at the same time.", rich_help_panel=BATCH)
]
Json = Annotated[
    bool,
    typer.Option("--json", help=f"Print one JSON document and nothing else; its keys: {DOCUMENTATION}cli/"),
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
FileFormat = Annotated[
    Literal["onnx", "torchscript"],
    typer.Option("--format", help="Format of the graph; ONNX is faster, TorchScript runs in torch."),
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


_FlagsT = TypeVar("_FlagsT")


def takes_flags(flags: type[_FlagsT]) -> Callable[[Callable[[_FlagsT], None]], Callable[..., None]]:
    """Decorate a command that takes a dataclass, so that typer has an option for each of its fields."""
    kinds = get_type_hints(flags, include_extras=True)
    parameters = []
    for field in dataclasses.fields(flags):    # type: ignore[arg-type]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[field.name]
            )
        )

    def decorated(command: Callable[[_FlagsT], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(flags(**values))

        # typer reads the options of a command from its signature.
        run.__signature__ = inspect.Signature(parameters)      # type: ignore[attr-defined]
        return run

    return decorated


def with_assignments(options: SamplingOptions, assignments: Iterable[str]) -> SamplingOptions:
    """Return the options, updated by the NAME=VALUE of each `--set`.

    Raises:
        InvalidRequest: an assignment has no =, or the name or the value is invalid.
    """
    from genserve.sampling.sampling_params import sampling_params

    merged: dict[str, object] = {**options}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidRequest(f"--set {assignment} has no value", remedy=f"write --set {assignment}=VALUE")
        merged[name] = read_value(value)
    sampling_params(merged)     # validated here, before a model is loaded
    return cast("SamplingOptions", merged)


def read_value(text: str) -> object:
    """Read a value as JSON, or else as text; `none` and the empty text are None."""
    try:
        return json.loads(text)
    except ValueError:
        return None if text in ("", "none") else text
