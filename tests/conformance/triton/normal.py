"""Normal form: answers without what differs from run to run."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["normalised"]

# Durations and times, in the HTTP's spelling and in that of protobuf's JSON.
_VOLATILE_KEYS = frozenset({"ns", "last_inference"})
# A frame of a Python traceback: "  /repository/m/1/model.py(12): execute".
_FRAME = re.compile(r"^  \S.*\(\d+\): (\S+)$", flags=re.MULTILINE)
# Frames that depend on Python's version: those of comprehensions (gone since 3.12) and of its importer.
_INNER_FRAME = re.compile(
    r"^  (\S.*\(\d+\): <(listcomp|dictcomp|setcomp)>|<frozen importlib.*)\n", flags=re.MULTILINE
)
# The folder of a repository, wherever the server has it; Triton tells it, genserve does not.
_REPOSITORY = re.compile(r"(?<![\w.])(/[\w.\-]+)+/(?=\w+/(config\.pbtxt|\d+(/|\b)))")


def normalised(value: Any) -> Any:
    """Without times, keys sorted, `<path>(<line>)` in tracebacks, paths as from the repository."""
    if isinstance(value, dict):
        # What genserve explains stands beside the error's text, which is Triton's.
        ignored = _VOLATILE_KEYS | {"remedy"} if "error" in value else _VOLATILE_KEYS
        return {key: normalised(value[key]) for key in sorted(value) if key not in ignored}
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, str):
        value = _FRAME.sub(r"  <path>(<line>): \1", _INNER_FRAME.sub("", value))
        return _REPOSITORY.sub("", value)
    return value
