"""Torch names: which argument or result of a TorchScript module a name in the config means."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError

__all__ = ["argument_indexes", "output_indexes"]

logger = logging.getLogger(__name__)


def argument_indexes(config: ModelConfig, arguments: Sequence[str]) -> dict[str, int]:
    """Return the position of each input, computed inputs, controls and states included.

    If all inputs have the names of arguments, these say it. Else, if all end in `__<index>`, the index does.
    Else they are in the order of the config. Controls and states are always called `<name>__<index>`.

    Args:
        config: of the model.
        arguments: names of `forward`'s arguments, without `self`.

    Raises:
        RepositoryError: the inputs are not the arguments, or a state or control has no index; in Triton's
            words where it has any.

    Source: Triton's pytorch_backend, naming convention of inputs.
    """
    computed = [name for batch_input in config.batch_inputs for name in batch_input.target_names]
    names = [*(spec.name for spec in config.inputs), *computed]
    indexes = _indexes(names, known=arguments, what="input", config=config)
    if config.sequence_batching is not None:
        for control in config.sequence_batching.controls:
            indexes[control.name] = _control_index(control.name)
        for state in config.sequence_batching.states:
            indexes[state.input_name] = _state_index(state.input_name, config)
    _check_arguments(indexes, arguments, config)
    return indexes


def output_indexes(config: ModelConfig) -> dict[str, int]:
    """Return the position of each output, states included: by `__<index>`, else in the config's order.

    Raises:
        RepositoryError: a state has no index; in Triton's words.
    """
    indexes = _indexes([spec.name for spec in config.outputs], known=(), what="output", config=config)
    if config.sequence_batching is not None:
        for state in config.sequence_batching.states:
            indexes[state.output_name] = _state_index(state.output_name, config)
    return indexes


def _indexes(names: Sequence[str], *, known: Sequence[str], what: str, config: ModelConfig) -> dict[str, int]:
    if known and all(name in known for name in names):
        return {name: known.index(name) for name in names}
    indexes = {name: index for name in names if (index := _index(name)) is not None}
    if len(indexes) == len(names):
        return indexes
    if config.sequence_batching is not None and config.sequence_batching.states:
        raise RepositoryError(
            f"PyTorch model '{config.name}' is using sequence batching with state but not all inputs and "
            "outputs follow the <name>__<index> naming convention. "
        )
    if len(names) > 1:
        logger.warning(
            "model %s: its %ss are neither called as the module's, nor <name>__<index>: "
            "they are taken in the order of config.pbtxt",
            config.name,
            what,
        )
    return {name: index for index, name in enumerate(names)}


def _index(name: str) -> int | None:
    digits = name.partition("__")[2]
    return int(digits) if digits.isdecimal() else None


def _control_index(name: str) -> int:
    index = _index(name)
    if index is None:
        raise RepositoryError(f"input '{name}' does not follow <name>__<index> naming convention.")
    return index


def _state_index(name: str, config: ModelConfig) -> int:
    index = _index(name)
    if index is None:
        raise RepositoryError(
            f"PyTorch model '{config.name}' is using sequence batching with state but state '{name}' "
            "does not follow the <name>__<index> naming convention. "
        )
    return index


def _check_arguments(indexes: dict[str, int], arguments: Sequence[str], config: ModelConfig) -> None:
    remedy = f"`forward` takes {', '.join(arguments) or 'nothing'}"
    if len(indexes) != len(arguments):
        raise RepositoryError(
            f"unable to load model '{config.name}', configuration expects {len(indexes)} inputs, "
            f"model provides {len(arguments)}",
            remedy=remedy,
        )
    if sorted(indexes.values()) != list(range(len(arguments))):
        raise RepositoryError(
            f"inputs of model '{config.name}' have the indexes "
            f"{', '.join(f'{index} ({name})' for name, index in indexes.items())}; "
            f"each of 0 to {len(arguments) - 1} is needed once",
            remedy=remedy,
        )
