"""The timings in answers: they differ from run to run."""

from __future__ import annotations

import re

_TIMINGS = re.compile(r', ?"timings": ?\{[^}]*\}')


def without_timings(text: str) -> str:
    """Remove the field `timings` of an answer, or of the events of one."""
    return _TIMINGS.sub("", text)
