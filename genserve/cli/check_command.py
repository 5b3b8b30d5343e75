"""The command `genserve check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.cli.flags import JSON_FLAG, RepositoriesFlags
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from genserve.config.diagnostics import Diagnostic


@dataclass(frozen=True, kw_only=True)
class CheckFlags(RepositoriesFlags):
    """The flags of `genserve check`."""

    repository: list[Path] | None = flag(None, Flag(help="Folders of models.", is_argument=True))
    model_config_name: str = flag(
        "", Flag(help="Read configs/NAME.pbtxt instead of config.pbtxt, if a model has it.")
    )
    backend_directory: list[Path] | None = flag(
        None, Flag(help="Folder of Python backends, each NAME/model.py; repeatable.")
    )
    strict: bool = flag(False, Flag(help="Treat warnings as errors."))
    json_: bool = flag(False, JSON_FLAG)


def check(flags: CheckFlags) -> None:
    """List the errors and warnings of all models of a repository.

    Exit with 1 if there is an error, or no model.
    """
    from genserve.cli.console import counted, print_json
    from genserve.config.diagnostics import Severity
    from genserve.errors import RepositoryError
    from genserve.repository.model_validation import repository_diagnostics
    from genserve.store import default_repository, described

    roots = flags.repository or flags.model_repository or [default_repository()]
    diagnostics = repository_diagnostics(
        roots,
        config_name=flags.model_config_name,
        backend_folders=flags.backend_directory or (),
    )
    if not diagnostics:
        raise RepositoryError(
            f"there is no model in {', '.join(map(described, roots))}",
            remedy="name the folder that contains the folders of the models",
        )
    severities = [diagnostic.severity for of_model in diagnostics.values() for diagnostic in of_model]
    num_errors, num_warnings = severities.count(Severity.ERROR), severities.count(Severity.WARNING)
    if flags.json_:
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
        models, errors = counted(len(diagnostics), "model"), counted(num_errors, "error")
        print(f"{models}: {errors}, {counted(num_warnings, 'warning')}")
    if num_errors or (flags.strict and num_warnings):
        raise SystemExit(1)


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
