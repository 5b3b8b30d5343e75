"""Sequence rules: valid sequence batching, controls and states of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from genserve.config.diagnostics import Diagnostic
from genserve.config.schema import enum_name
from genserve.repository.rules.facts import ConfigFacts

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID = "CONTROL_SEQUENCE_CORRID"
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check_sequence_batching(facts: ConfigFacts) -> Iterator[Diagnostic]:
    """Reject invalid strategies, controls and states of `sequence_batching`, and a response cache with it."""
    if not facts.message.HasField("sequence_batching"):
        return
    batching = facts.message.sequence_batching
    if facts.message.response_cache.enable:
        yield facts.error(
            "response_cache",
            f"Response Cache does not currently support model {facts.name} with sequence batching "
            "scheduler. Please disable the response cache.",
            remedy="leave `response_cache` out: an answer depends on the earlier requests of its sequence",
        )
    yield from _controls(facts)
    for index, state in enumerate(batching.state):
        yield from _initial_state(facts, state, path=f"sequence_batching.state[{index}]")
    yield from _strategy(facts)


def _strategy(facts: ConfigFacts) -> Iterator[Diagnostic]:
    batching = facts.message.sequence_batching
    for size in batching.oldest.preferred_batch_size:
        if not 0 < size <= facts.message.max_batch_size:
            bound = "positive" if size <= 0 else "<= max batch size"
            yield facts.error(
                "sequence_batching.oldest.preferred_batch_size",
                f"sequence batching preferred batch size must be {bound} for {facts.name}",
                remedy=f"write sizes from 1 to max_batch_size, which is {facts.message.max_batch_size}",
            )
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        yield facts.error(
            "sequence_batching.direct.minimum_slot_utilization",
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {facts.name}",
            remedy="write the fraction of slots to wait for, such as 0.5",
        )


def _controls(facts: ConfigFacts) -> Iterator[Diagnostic]:
    names: set[str] = set()
    kinds: set[str] = set()
    for index, tensor in enumerate(facts.message.sequence_batching.control_input):
        path = f"sequence_batching.control_input[{index}]"
        if not tensor.name:
            yield facts.error(
                path,
                f"sequence batching control tensor must have a name for {facts.name}",
                remedy='add `name: "START"`, the input of the model for it',
            )
        elif tensor.name in names:
            yield facts.error(
                f"{path}.name",
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds "
                f"for {facts.name}",
                remedy="give each control its own tensor",
            )
        names.add(tensor.name)
        for number, control in enumerate(tensor.control):
            kind = enum_name(control, "kind")
            field = f"{path}.control[{number}]"
            if kind in kinds:
                yield facts.error(
                    field,
                    f"sequence batching specifies multiple {kind} tensors for {facts.name}",
                    remedy="leave all but one out",
                )
            kinds.add(kind)
            if kind == _CORRID:
                yield from _corrid(facts, control, path=field)
            else:
                yield from _flag(facts, control, kind=kind, path=field)


def _flag(facts: ConfigFacts, control: Any, *, kind: str, path: str) -> Iterator[Diagnostic]:
    written = [name for name in _VALUES if len(getattr(control, name))]
    remedy = "write `int32_false_true: [ 0, 1 ]`: the values for false and true"
    if not written:
        message = f"sequence batching must specify either {_list_values('or')} for {kind} for {facts.name}"
    elif len(written) > 1:
        message = (
            f"sequence batching specifies more than one from {_list_values('and')} for {kind} "
            f"for {facts.name}"
        )
    elif len(getattr(control, written[0])) != 2:
        message = (
            f"sequence batching control '{written[0]}' must have exactly 2 entries for {kind} "
            f"for {facts.name}"
        )
    else:
        return
    yield facts.error(path, message, remedy=remedy)


def _corrid(facts: ConfigFacts, control: Any, *, path: str) -> Iterator[Diagnostic]:
    if any(len(getattr(control, name)) for name in _VALUES):
        yield facts.error(
            path,
            f"sequence batching must not specify either {_list_values('or')} for {_CORRID} for {facts.name}",
            remedy="write `data_type: TYPE_UINT64` instead",
        )
    elif enum_name(control, "data_type") not in _CORRID_TYPES:
        allowed = f"{', '.join(_CORRID_TYPES[:-1])} and {_CORRID_TYPES[-1]}"
        yield facts.error(
            path,
            f"unexpected data type for control {_CORRID} for {facts.name}. Allowed data types are {allowed}",
            remedy="write `data_type: TYPE_UINT64`, or TYPE_STRING for ids that are text",
        )


def _list_values(word: str) -> str:
    first, second, last = _VALUES
    return f"'{first}', '{second}' {word} '{last}'"


def _initial_state(facts: ConfigFacts, state: Any, *, path: str) -> Iterator[Diagnostic]:
    name = state.input_name
    if len(state.initial_state) > 1:
        yield facts.error(
            f"{path}.initial_state",
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements.",
            remedy="leave all but one out",
        )
    for initial in state.initial_state[:1]:
        field = f"{path}.initial_state"
        if not initial.name:
            yield facts.error(
                field,
                f"Field 'name' must be set when using initial_state for state input '{name}'.",
                remedy='add `name: "..."`, with any name',
            )
        if initial.data_type != state.data_type:
            yield facts.error(
                f"{field}.data_type",
                f"The data type used for 'initial_state' field of state '{name}' does not match the state "
                "data type.",
                remedy=f"write `data_type: {enum_name(state, 'data_type')}`",
            )
        if any(dim < 0 for dim in initial.dims):
            yield facts.error(
                f"{field}.dims",
                f"'initial_state' field for state input name '{name}' contains variable dimensions.",
                remedy="write the size of the state at the start of a sequence",
            )
        yield from _initial_data(facts, initial, name=name, path=field)


def _initial_data(facts: ConfigFacts, initial: Any, *, name: str, path: str) -> Iterator[Diagnostic]:
    if initial.WhichOneof("state_data") is None:
        yield facts.error(
            path,
            f"initial_state setting expects state'{name}' to have state_data set",
            remedy="add `zero_data: true`, or `data_file` with a file in the folder initial_state",
        )
    elif initial.data_file and not (facts.folder / "initial_state" / initial.data_file).is_file():
        file = facts.folder / "initial_state" / initial.data_file
        yield facts.error(
            f"{path}.data_file",
            f"failed to open text file for read {file}: No such file or directory",
            remedy="put the file there: elements in row-major order",
        )
