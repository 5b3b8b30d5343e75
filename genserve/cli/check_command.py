"""The command `genserve check`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genserve.cli.flags import Json, ModelRepositories

if TYPE_CHECKING:
    from genserve.config.diagnostics import Diagnostic


def check(
    repository: Annotated[
        list[Path] | None, typer.Argument(help="Folders of models.", show_default=False)
    ] = None,
    model_repository: ModelRepositories = None,
    model_config_name: Annotated[
        str, typer.Option(help="Read configs/NAME.pbtxt instead of config.pbtxt, if a model has it.")
    ] = "",
    backend_directory: Annotated[
        list[Path] | None, typer.Option(help="Folder of Python backends, each NAME/model.py; repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    json_: Json = False,
) -> None:
    """List the errors and warnings of all models of a repository. Exit with 1 if there is an error."""
    from genserve.cli.console import print_json
    from genserve.config.diagnostics import Severity
    from genserve.repository.model_validation import repository_diagnostics
    from genserve.store import default_repository

    diagnostics = repository_diagnostics(
        repository or model_repository or [default_repository()],
        config_name=model_config_name,
        backend_folders=backend_directory or (),
    )
    severities = [diagnostic.severity for of_model in diagnostics.values() for diagnostic in of_model]
    num_errors, num_warnings = severities.count(Severity.ERROR), severities.count(Severity.WARNING)
    if json_:
        print_json(
            {
                "models": list(diagnostics),
                "num_errors": num_errors,
                "num_warnings": num_warnings,
                "diagnostics": _objects(diagnostics),
            }
        )
    else:
        _print_diagnostics(diagnostics)
        models, errors = _count(len(diagnostics), "model"), _count(num_errors, "error")
        print(f"{models}: {errors}, {_count(num_warnings, 'warning')}")
    if num_errors or (strict and num_warnings):
        raise typer.Exit(1)


def _print_diagnostics(diagnostics: Mapping[str, tuple[Diagnostic, ...]]) -> None:
    from genserve.cli.console import visible

    for model, of_model in diagnostics.items():
        if not of_model:
            continue
        print(visible(model))
        for diagnostic in of_model:
            print(visible(f"{diagnostic.where}: {diagnostic.severity.value}: {diagnostic.message}"))
            if diagnostic.remedy:
                print(visible(f"  remedy: {diagnostic.remedy}"))
        print()


def _objects(diagnostics: Mapping[str, tuple[Diagnostic, ...]]) -> list[dict[str, str | int | None]]:
    return [
        {
            "model": model,
            "severity": diagnostic.severity.value,
            "path": str(diagnostic.path),
            "line": diagnostic.line,
            "column": diagnostic.column,
            "message": diagnostic.message,
            "remedy": diagnostic.remedy,
        }
        for model, of_model in diagnostics.items()
        for diagnostic in of_model
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
