"""The command `genserve check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.cli.flags import JSON_FLAG, RepositoriesFlags
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from genserve.config.diagnostics import Diagnostic
    from genserve.textmodel.recordings import Replay


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
    run: bool = flag(
        False,
        Flag(
            help="Also load the text models that have recordings, and repeat these: answers with receipts in "
            "MODEL/recordings, *.json with one each or *.jsonl with one per line."
        ),
    )
    json_: bool = flag(False, JSON_FLAG)


def check(flags: CheckFlags) -> None:
    """List the errors and warnings of all models of a repository.

    Exit with 1 if there is an error, or no model. With `--run` also if a recorded answer has changed: the
    answer to a request with `return_receipt` is a recording. The parameter `verify_on_load` of a logits stage
    makes a server refuse a load that changes them, and go on with the old version.
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
    replays = {} if num_errors or not flags.run else _replays(roots, config_name=flags.model_config_name)
    num_changed = sum(bool(one.difference) for of_model in replays.values() for one in of_model)
    if flags.json_:
        print_json(
            {
                "models": list(diagnostics),
                "num_errors": num_errors,
                "num_warnings": num_warnings,
                "diagnostics": _objects(diagnostics),
                "recordings": [
                    {"model": model, "place": one.recording.place, "difference": one.difference or None}
                    for model, of_model in replays.items()
                    for one in of_model
                ],
            }
        )
    else:
        _print_diagnostics(diagnostics)
        models, errors = counted(len(diagnostics), "model"), counted(num_errors, "error")
        print(f"{models}: {errors}, {counted(num_warnings, 'warning')}")
        _print_replays(replays)
    if num_errors or num_changed or (flags.strict and num_warnings):
        raise SystemExit(1)


def _replays(roots: Sequence[Path], *, config_name: str) -> dict[str, list[Replay]]:
    """Return the recordings of each text model that has any, repeated.

    Raises:
        GenserveError: a recording cannot be read, or a model cannot be loaded.
    """
    from genserve.cli.opened_models import started
    from genserve.repository.options import RepositoryOptions
    from genserve.repository.repository import Repository
    from genserve.textmodel.recordings import read_recordings, replay

    replays = {}
    options = RepositoryOptions(config_name=config_name, verifies_recordings=False)
    found = Repository(roots, options=options).lifecycle
    for name in (*found.text_models, *found.adapters):
        repository = Repository(roots, options=options)
        recordings = read_recordings(repository.lifecycle.entries[name].path)
        if recordings:
            with started(repository, name) as model:
                replays[name] = replay(model, recordings)
    return replays


def _print_replays(replays: Mapping[str, Sequence[Replay]]) -> None:
    from genserve.cli.console import visible

    for model, of_model in replays.items():
        print(visible(model))
        for one in of_model:
            if one.difference:
                result = f"different: {one.difference}"
            else:
                result = f"equal: {len(one.recording.receipt['token_ids'])} tokens"
            print(visible(f"  {one.recording.place}: {result}"))


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
