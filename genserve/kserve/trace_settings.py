"""Trace settings: Triton's settings of request traces, for the server and for single models.

No file can be named over the network, so tracing cannot be switched on there: Triton refuses it with the
same text when it was started without `--trace-config`. The settings that need no file are kept and shown.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from genserve.errors import InferenceError, Status
from genserve.kserve.leading_number import leading_number

__all__ = ["TraceSettings", "Value"]

Value: TypeAlias = str | Sequence[str]

_DEFAULTS: Mapping[str, Value] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_MAX = 2**32 - 1


class TraceSettings:
    """The settings of one server. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: dict[str, Value] = {}
        self._models: dict[str, dict[str, Value]] = {}

    def values(self, model: str = "") -> dict[str, Value]:
        """Return all settings of the server, or those that hold for a model, in Triton's order."""
        with self._lock:
            return {**_DEFAULTS, **self._server, **self._models.get(model, {})}

    def update(self, changes: Mapping[str, Value | None], *, model: str = "") -> dict[str, Value]:
        """Change settings of the server or of one model, and return all that hold now.

        Args:
            changes: by name: strings, and the level a list of them; None takes a change back. Unknown
                names, and the mode, are passed over.
            model: "": the server.

        Raises:
            InferenceError: UNSUPPORTED, the file; INVALID_ARG, a number that is none, a level that needs a
                file. Nothing was changed.
        """
        if "trace_file" in changes:
            text = "trace file location can not be updated through network protocol"
            raise InferenceError(text, status=Status.UNSUPPORTED)
        known = {name: _checked(name, value) for name, value in changes.items() if name in _SETTABLE}
        with self._lock:
            own = self._models.setdefault(model, {}) if model else self._server
            for name, value in known.items():
                if value is None:
                    own.pop(name, None)
                else:
                    own[name] = value
        return self.values(model)


def _checked(name: str, value: Value | None) -> Value | None:
    if value is None:
        return None
    if name == "trace_level":
        return _level([value] if isinstance(value, str) else value)
    assert isinstance(value, str)
    return _number(name, value)


def _level(levels: Sequence[str]) -> Value:
    if "OFF" in levels:
        if len(levels) > 1:
            raise InferenceError("Expect only one trace level 'OFF' is specified")
        return ["OFF"]
    if {"TIMESTAMPS", "TENSORS"} & set(levels):
        raise InferenceError("Attempting to set invalid trace setting :trace file name is not given")
    return ["OFF"]  # what Triton makes of levels that it does not know


def _number(name: str, text: str) -> str:
    number = leading_number(text)
    if number is None:
        raise InferenceError(f"Unable to parse '{name}', got: {text}")
    if name == "trace_count" and number < -1:
        raise InferenceError(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{text}")
    if not -1 <= number <= _MAX or (number < 0 and name != "trace_count"):
        raise InferenceError(
            f"Unable to parse '{name}', value is out of range [ 0, {_MAX} ], got: {text}"
        )
    return str(number)


_SETTABLE = frozenset({"trace_level", "trace_rate", "trace_count", "log_frequency"})
