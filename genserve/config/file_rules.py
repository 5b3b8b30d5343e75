"""File rules: the files that a config names lie in the folder of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from genserve.config.fault import Fault
from genserve.config.judged import JudgedConfig

__all__ = ["files"]


def files(config: JudgedConfig) -> Iterator[Fault]:
    """Yield the file names that lead out of the model's folder: a config can come from a client."""
    for path, name in _named(config.message):
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
            yield config.error(
                path,
                f"the file {name!r} is not in the folder of model '{config.name}'",
                remedy="put the file into the model's folder, and name it from there",
            )


def _named(message: Any) -> Iterator[tuple[str, str]]:
    yield "default_model_filename", message.default_model_filename
    for index, output in enumerate(message.output):
        yield f"output[{index}].label_filename", output.label_filename
    for index, sample in enumerate(message.model_warmup):
        for spec in sample.inputs.values():
            yield f"model_warmup[{index}]", spec.input_data_file
    for index, state in enumerate(message.sequence_batching.state):
        for initial in state.initial_state:
            yield f"sequence_batching.state[{index}]", initial.data_file
