"""Parameters: the typed maps of the protocol's messages, read by Triton's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from genserve.errors import InferenceError
from genserve.inference import Parameter, RequestFlags
from genserve.kserve.shared_memory import RegionPart, SharedMemory

__all__ = [
    "SHARED_MEMORY",
    "RequestParameters",
    "read_classification",
    "read_parameters",
    "read_shared_memory",
    "write_parameter",
]

# Of an input or output: where in shared memory it is.
SHARED_MEMORY = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")

_EMPTY_FINAL = "triton_enable_empty_final_response"
_CHOICE = "parameter_choice"
_CUSTOM = ("int64_param", "bool_param", "string_param", "double_param")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParameters:
    """What the parameters of a request ask for; `custom` is what the model gets to see."""

    custom: Mapping[str, Parameter]
    correlation_id: int | str = 0
    flags: RequestFlags = RequestFlags.NONE
    priority: int = 0
    timeout_us: int = 0
    empty_final_response: bool = False


def read_parameters(messages: Mapping[str, Any]) -> RequestParameters:
    """Read `ModelInferRequest.parameters`: names to `InferParameter`.

    Raises:
        InferenceError: a value has the wrong type, or a name is reserved.
    """
    custom: dict[str, Parameter] = {}
    known: dict[str, Any] = {}
    flags = RequestFlags.NONE
    for name, message in messages.items():
        if name == "sequence_id":
            correlation_id = _typed(message, "int64_param", "string_param", what=f"'{name}' parameter")
            known["correlation_id"] = _unsigned(correlation_id)
        elif name in _FLAGS:
            flags |= _FLAGS[name] * _typed(message, "bool_param", what=f"'{name}' parameter")
        elif name == "priority":
            known["priority"] = _priority(message)
        elif name == "timeout":
            known["timeout_us"] = _unsigned(_typed(message, "int64_param", what=f"'{name}' parameter"))
        elif name == _EMPTY_FINAL:
            known["empty_final_response"] = _typed(message, "bool_param", what=f"'{name}' parameter")
        elif name.startswith("triton_"):
            raise InferenceError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. "
                f"Only the following keys starting with 'triton_' are allowed: {_EMPTY_FINAL}"
            )
        else:
            custom[name] = _custom(name, message)
    return RequestParameters(custom=custom, flags=flags, **known)


def read_classification(messages: Mapping[str, Any]) -> int:
    """Return how many classes the parameters of an output ask for; 0: its values.

    Raises:
        InferenceError: it is no number, or less than one.
    """
    message = messages.get("classification")
    if message is None:
        return 0
    if message.WhichOneof(_CHOICE) != "int64_param":
        raise InferenceError("invalid value type for 'classification' parameter, expected int64_param")
    count: int = message.int64_param
    if count <= 0:
        raise InferenceError("invalid value for 'classification' parameter, expected >= 0")
    return count


def read_shared_memory(tensor: Any, shared_memory: SharedMemory) -> RegionPart | None:
    """Return the part of a region that the parameters of an input or output name; None: they name none.

    Raises:
        InferenceError: they contradict each other, or there is no such part.
    """
    messages, name = tensor.parameters, tensor.name
    region, size, offset = (messages.get(key) for key in SHARED_MEMORY)
    where = f"parameter for tensor '{name}'"
    if region is None:
        for key, message in ((SHARED_MEMORY[2], offset), (SHARED_MEMORY[1], size)):
            if message is not None:
                raise InferenceError(f"'{key}' can not be specified without '{SHARED_MEMORY[0]}' {where}")
        return None
    region_name = _typed(region, "string_param", what=f"'{SHARED_MEMORY[0]}' {where}")
    start = 0 if offset is None else _typed(offset, "int64_param", what=f"'{SHARED_MEMORY[2]}' {where}")
    if size is None:
        text = f"'{SHARED_MEMORY[1]}' must be specified along with '{SHARED_MEMORY[0]}' {where}"
        raise InferenceError(text)
    byte_size = _typed(size, "int64_param", what=f"'{SHARED_MEMORY[1]}' {where}")
    return shared_memory.part(region_name, offset=start, byte_size=byte_size)


def write_parameter(message: Any, value: Parameter) -> None:
    """Set an `InferParameter`."""
    if isinstance(value, bool):
        message.bool_param = value
    elif isinstance(value, int):
        message.int64_param = value
    elif isinstance(value, float):
        message.double_param = value
    else:
        message.string_param = value


def _typed(message: Any, *choices: str, what: str) -> Any:
    choice = message.WhichOneof(_CHOICE)
    if choice not in choices:
        raise InferenceError(f"invalid value type for {what}, expected {' or '.join(choices)}.")
    return getattr(message, choice)


_FLAGS = {"sequence_start": RequestFlags.SEQUENCE_START, "sequence_end": RequestFlags.SEQUENCE_END}


def _unsigned(value: int | str) -> int | str:
    return value % 2**64 if isinstance(value, int) else value  # as Triton casts it


def _priority(message: Any) -> int:
    priority: int = _typed(message, "int64_param", "uint64_param", what="'priority' parameter")
    if priority < 0:
        raise InferenceError("invalid value for 'priority', expected value >= 0.")
    return priority


def _custom(name: str, message: Any) -> Parameter:
    choice = message.WhichOneof(_CHOICE)
    if choice not in _CUSTOM:
        raise InferenceError(
            f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
        )
    value: Parameter = getattr(message, choice)
    return value
