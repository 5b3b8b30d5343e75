"""Completion: prints the script by which a shell completes command lines, and completes names.

The scripts and the protocol are argcomplete's.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from genserve.settings import Flag, flag


@dataclass(frozen=True, kw_only=True)
class CompletionFlags:
    """The flags of `genserve completion`."""

    shell: Literal["bash", "zsh", "fish"] = flag(
        MISSING, Flag(help="The shell to complete commands in.", is_argument=True)
    )


def completion(flags: CompletionFlags) -> None:
    """Print the script that completes commands, flags, models and parameters in your shell."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["genserve"], shell=flags.shell))


def model_names(parsed_args: Namespace, **_: Any) -> dict[str, str]:
    """Return the models of the repository on the command line that may generate text, without loading any."""
    from genserve.store import default_repository

    given = getattr(parsed_args, "model_repository", None)
    if not given and (variable := os.environ.get("GENSERVE_MODEL_REPOSITORY")):
        given = variable.split(os.pathsep)
    folders = given if isinstance(given, list) else [given or default_repository()]
    # Parsing the configs would take half a second.
    return {
        config.parent.name: ""
        for folder in folders
        for config in sorted(Path(folder).glob("*/config.pbtxt"))
        if re.search(rb"ensemble_scheduling|[\"']ensemble[\"']", config.read_bytes())
    }


def available_names(**_: Any) -> dict[str, str]:
    """Return the short names of models that can be pulled, with what they are good for."""
    from genserve.export import KNOWN_ENCODERS, KNOWN_MODELS

    models = {name: model.good_for for name, model in KNOWN_MODELS.items()}
    return models | {name: encoder.good_for for name, encoder in KNOWN_ENCODERS.items()}


def set_assignments(prefix: str, **_: Any) -> dict[str, str]:
    """Return NAME= of each sampling parameter; after the =, the values of a parameter that has few."""
    from genserve.sampling.sampling_options import SamplingOptions

    name, equals, _value = prefix.partition("=")
    if not equals:
        return {f"{known}=": "" for known in SamplingOptions.__annotations__}
    hint = get_type_hints(SamplingOptions).get(name)
    values = ["true", "false"] if hint is bool else get_args(hint) if hint and "Literal" in repr(hint) else []
    return {f"{name}={value}": "" for value in values if isinstance(value, str)}
