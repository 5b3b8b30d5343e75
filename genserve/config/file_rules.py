"""File rules: the files that a config names lie in the folder of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from genserve.config.fault import Fault
from genserve.config.judged import JudgedConfig

__all__ = ["MAX_NAME_BYTES", "files"]

MAX_NAME_BYTES = 255  # of a file, on nearly every file system


def files(config: JudgedConfig) -> Iterator[Fault]:
    """Yield the file names that lead out of the model's folder, or that no file can have.

    They are not to be looked for: a config can come from a client.
    """
    for path, name, folder in _named(config.message):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            yield config.error(
                path,
                f"the file {name!r} is not in the folder of model '{config.name}'",
                remedy=f"put the file into {folder}, and name it from there",
            )
        elif name and not _can_exist(pure):
            yield config.error(
                path,
                f"no file can be called {name[:64]!r}",
                remedy=f"a name is not '.', and has up to {MAX_NAME_BYTES} bytes, of which none is zero",
            )


def _can_exist(pure: PurePosixPath) -> bool:
    parts = pure.parts
    return bool(parts) and all("\0" not in part and len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def _named(message: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each field that names a file, the name, and the folder that it is looked for in."""
    yield "default_model_filename", message.default_model_filename, "the folder of each version"
    for index, output in enumerate(message.output):
        yield f"output[{index}].label_filename", output.label_filename, "the model's folder"
    for index, sample in enumerate(message.model_warmup):
        for spec in sample.inputs.values():
            yield f"model_warmup[{index}]", spec.input_data_file, "the model's folder `warmup`"
    for index, state in enumerate(message.sequence_batching.state):
        for initial in state.initial_state:
            yield f"sequence_batching.state[{index}]", initial.data_file, "the model's folder `initial_state`"
