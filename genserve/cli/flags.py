"""Flags: the options that several commands share, and the values of `--set`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import typer

from genserve.cli.completion_command import set_assignments
from genserve.errors import InvalidRequest

if TYPE_CHECKING:
    from genserve.sampling.sampling_options import SamplingOptions

DOCUMENTATION = "https://genserve.github.io/genserve/"
model_option = partial(typer.Option, rich_help_panel="Model")
sampling_option = partial(typer.Option, rich_help_panel="Sampling")

ModelRepository = Annotated[
    Path | None,
    model_option(
        envvar="GENSERVE_MODEL_REPOSITORY",
        help="Folder of the models. Default: the store in GENSERVE_HOME.",
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
    model_option(
        envvar="GENSERVE_BASE_URL",
        help="Use the server at this URL, with the key in GENSERVE_API_KEY, instead of the repository.",
    ),
]
MaxTokens = Annotated[
    int | None,
    sampling_option(envvar="GENSERVE_MAX_TOKENS", help="Maximum length of an answer, in tokens."),
]
Seed = Annotated[
    int | None, sampling_option(envvar="GENSERVE_SEED", help="The same seed gives the same text.")
]
Set = Annotated[
    list[str],
    sampling_option(
        "--set",
        metavar="NAME=VALUE",
        autocompletion=set_assignments,
        help="Any other sampling parameter, such as repetition_penalty=1.2; repeatable. Lists and objects "
        f"are JSON. The parameters: {DOCUMENTATION}sampling/",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help=f"Print one JSON document and nothing else; its keys: {DOCUMENTATION}cli/"),
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
