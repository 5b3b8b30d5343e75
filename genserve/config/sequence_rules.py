"""Sequence rules: valid sequence batching, controls and states of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from genserve.config.diagnostics import Diagnostic, ValidationContext
from genserve.config.schema import enum_name

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID = "CONTROL_SEQUENCE_CORRID"
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def validate_sequences(config: ValidationContext) -> Iterator[Diagnostic]:
    """Yield the errors of `sequence_batching`."""
    if not config.message.HasField("sequence_batching"):
        return
    batching = config.message.sequence_batching
    if config.message.response_cache.enable:
        yield config.error(
            "response_cache",
            f"Response Cache does not currently support model {config.name} with sequence batching "
            "scheduler. Please disable the response cache.",
            remedy="leave `response_cache` out: an answer depends on the earlier requests of its sequence",
        )
    yield from _controls(config)
    for index, state in enumerate(batching.state):
        yield from _initial_state(config, state, path=f"sequence_batching.state[{index}]")
    yield from _strategy(config)


def _strategy(config: ValidationContext) -> Iterator[Diagnostic]:
    batching = config.message.sequence_batching
    for size in batching.oldest.preferred_batch_size:
        if not 0 < size <= config.message.max_batch_size:
            bound = "positive" if size <= 0 else "<= max batch size"
            yield config.error(
                "sequence_batching.oldest.preferred_batch_size",
                f"sequence batching preferred batch size must be {bound} for {config.name}",
                remedy=f"write sizes from 1 to max_batch_size, which is {config.message.max_batch_size}",
            )
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        yield config.error(
            "sequence_batching.direct.minimum_slot_utilization",
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}",
            remedy="write the fraction of slots to wait for, such as 0.5",
        )


def _controls(config: ValidationContext) -> Iterator[Diagnostic]:
    names: set[str] = set()
    kinds: set[str] = set()
    for index, tensor in enumerate(config.message.sequence_batching.control_input):
        path = f"sequence_batching.control_input[{index}]"
        if not tensor.name:
            yield config.error(
                path,
                f"sequence batching control tensor must have a name for {config.name}",
                remedy='add `name: "START"`, the input of the model for it',
            )
        elif tensor.name in names:
            yield config.error(
                f"{path}.name",
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds "
                f"for {config.name}",
                remedy="give each control its own tensor",
            )
        names.add(tensor.name)
        for number, control in enumerate(tensor.control):
            kind = enum_name(control, "kind")
            field = f"{path}.control[{number}]"
            if kind in kinds:
                yield config.error(
                    field,
                    f"sequence batching specifies multiple {kind} tensors for {config.name}",
                    remedy="leave all but one out",
                )
            kinds.add(kind)
            if kind == _CORRID:
                yield from _corrid(config, control, path=field)
            else:
                yield from _flag(config, control, kind=kind, path=field)


def _flag(config: ValidationContext, control: Any, *, kind: str, path: str) -> Iterator[Diagnostic]:
    written = [name for name in _VALUES if len(getattr(control, name))]
    remedy = "write `int32_false_true: [ 0, 1 ]`: the values for false and true"
    if not written:
        message = f"sequence batching must specify either {_list_values('or')} for {kind} for {config.name}"
    elif len(written) > 1:
        message = (
            f"sequence batching specifies more than one from {_list_values('and')} for {kind} "
            f"for {config.name}"
        )
    elif len(getattr(control, written[0])) != 2:
        message = (
            f"sequence batching control '{written[0]}' must have exactly 2 entries for {kind} "
            f"for {config.name}"
        )
    else:
        return
    yield config.error(path, message, remedy=remedy)


def _corrid(config: ValidationContext, control: Any, *, path: str) -> Iterator[Diagnostic]:
    if any(len(getattr(control, name)) for name in _VALUES):
        yield config.error(
            path,
            f"sequence batching must not specify either {_list_values('or')} for {_CORRID} for {config.name}",
            remedy="write `data_type: TYPE_UINT64` instead",
        )
    elif enum_name(control, "data_type") not in _CORRID_TYPES:
        allowed = f"{', '.join(_CORRID_TYPES[:-1])} and {_CORRID_TYPES[-1]}"
        yield config.error(
            path,
            f"unexpected data type for control {_CORRID} for {config.name}. Allowed data types are {allowed}",
            remedy="write `data_type: TYPE_UINT64`, or TYPE_STRING for ids that are text",
        )


def _list_values(word: str) -> str:
    first, second, last = _VALUES
    return f"'{first}', '{second}' {word} '{last}'"


def _initial_state(config: ValidationContext, state: Any, *, path: str) -> Iterator[Diagnostic]:
    name = state.input_name
    if len(state.initial_state) > 1:
        yield config.error(
            f"{path}.initial_state",
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements.",
            remedy="leave all but one out",
        )
    for initial in state.initial_state[:1]:
        field = f"{path}.initial_state"
        if not initial.name:
            yield config.error(
                field,
                f"Field 'name' must be set when using initial_state for state input '{name}'.",
                remedy='add `name: "..."`, with any name',
            )
        if initial.data_type != state.data_type:
            yield config.error(
                f"{field}.data_type",
                f"The data type used for 'initial_state' field of state '{name}' does not match the state "
                "data type.",
                remedy=f"write `data_type: {enum_name(state, 'data_type')}`",
            )
        if any(dim < 0 for dim in initial.dims):
            yield config.error(
                f"{field}.dims",
                f"'initial_state' field for state input name '{name}' contains variable dimensions.",
                remedy="write the size of the state at the start of a sequence",
            )
        yield from _initial_data(config, initial, name=name, path=field)


def _initial_data(config: ValidationContext, initial: Any, *, name: str, path: str) -> Iterator[Diagnostic]:
    if initial.WhichOneof("state_data") is None:
        yield config.error(
            path,
            f"initial_state setting expects state'{name}' to have state_data set",
            remedy="add `zero_data: true`, or `data_file` with a file in the folder initial_state",
        )
    elif initial.data_file and not (config.folder / "initial_state" / initial.data_file).is_file():
        file = config.folder / "initial_state" / initial.data_file
        yield config.error(
            f"{path}.data_file",
            f"failed to open text file for read {file}: No such file or directory",
            remedy="put the file there: elements in row-major order",
        )
