"""Normal form: answers without what differs from run to run."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["normalised"]

# Durations and times, in the HTTP's spelling and in that of protobuf's JSON.
_VOLATILE_KEYS = frozenset({"ns", "last_inference"})
# A frame of a Python traceback: "  /repository/m/1/model.py(12): execute".
_FRAME = re.compile(r"^  \S.*\(\d+\): (\S+)$", flags=re.MULTILINE)
# A comprehension's frame, which Python has had no more since 3.12.
_COMPREHENSION = re.compile(r"^  \S.*\(\d+\): <(listcomp|dictcomp|setcomp)>\n", flags=re.MULTILINE)
# The folder of a repository, wherever the server has it.
_REPOSITORY = re.compile(r"(?<![\w.])(/[\w.\-]+)+/(?=\w+/(config\.pbtxt|\d+(/|\b)))")


def normalised(value: Any) -> Any:
    """The value without times; with `<path>(<line>)` in tracebacks and `<repository>/` in paths."""
    if isinstance(value, dict):
        return {key: normalised(item) for key, item in value.items() if key not in _VOLATILE_KEYS}
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, str):
        value = _FRAME.sub(r"  <path>(<line>): \1", _COMPREHENSION.sub("", value))
        return _REPOSITORY.sub("<repository>/", value)
    return value
