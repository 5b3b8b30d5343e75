"""Parameters: the typed maps of the protocol's messages, read by Triton's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from genserve.errors import InferenceError
from genserve.inference import Parameter, RequestFlags

__all__ = ["EMPTY_FINAL", "RequestParameters", "read_parameters", "typed", "write_parameter"]

EMPTY_FINAL = "triton_enable_empty_final_response"
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
            correlation_id = typed(message, "int64_param", "string_param", what=f"'{name}' parameter")
            known["correlation_id"] = _unsigned(correlation_id)
        elif name in _FLAGS:
            flags |= _FLAGS[name] * typed(message, "bool_param", what=f"'{name}' parameter")
        elif name == "priority":
            known["priority"] = _priority(message)
        elif name == "timeout":
            known["timeout_us"] = _unsigned(typed(message, "int64_param", what=f"'{name}' parameter"))
        elif name == EMPTY_FINAL:
            known["empty_final_response"] = typed(message, "bool_param", what=f"'{name}' parameter")
        elif name.startswith("triton_"):
            raise InferenceError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. "
                f"Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        else:
            custom[name] = _custom(name, message)
    return RequestParameters(custom=custom, flags=flags, **known)


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


def typed(message: Any, *choices: str, what: str) -> Any:
    """Return the value of an `InferParameter`, which must be one of these choices.

    Raises:
        InferenceError: it is another.
    """
    choice = message.WhichOneof(_CHOICE)
    if choice not in choices:
        raise InferenceError(f"invalid value type for {what}, expected {' or '.join(choices)}.")
    return getattr(message, choice)


_FLAGS = {"sequence_start": RequestFlags.SEQUENCE_START, "sequence_end": RequestFlags.SEQUENCE_END}


def _unsigned(value: int | str) -> int | str:
    return value % 2**64 if isinstance(value, int) else value  # as Triton casts it


def _priority(message: Any) -> int:
    priority: int = typed(message, "int64_param", "uint64_param", what="'priority' parameter")
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
