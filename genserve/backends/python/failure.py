"""Failure: what a model's exception is to the client, in the words of Triton."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

from genserve.backends.python.host import HOST_NAME

__all__ = ["failure_text"]

_SHOWN = "genserve.backends.python.pb_utils.config"


def failure_text(error: BaseException) -> str:
    """Return `ValueError: boom`, and below it where, the innermost frame first.

    The frames are those of the model and of what it called; ours in front of them are left out.
    """
    text = str(error) or "<EMPTY MESSAGE>"
    frames = _frames(error)
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
    return f"{type(error).__name__}: {text}" + (f"\n\nAt:\n{where}" if where else "")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    step = error.__traceback__
    while step is not None and HOST_NAME not in step.tb_frame.f_globals:
        step = step.tb_next
    return list(traceback.StackSummary.extract(_foreign(step)))


def _foreign(step: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that are not ours. Those of pb_utils are C++ in Triton, and not shown, but for one."""
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        if not name.startswith("genserve.") or name == _SHOWN:
            yield step.tb_frame, step.tb_lineno
        step = step.tb_next
