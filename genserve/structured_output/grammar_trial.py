"""Grammar trial: compiles a grammar in a disposable process, to find out whether compiling it is safe.

llguidance limits neither the time for the patterns of a JSON schema, which is exponential in the worst case,
nor the stack for deep rules. `trial_compiler.py` is the program of that process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from genserve.structured_output import trial_compiler

MAX_CPU_S = 3
MAX_WALL_S = 30  # wall-clock time, for a busy machine
# Special tokens are written by their ids in a grammar; the process's small vocabulary has few of them.
_TOKEN_IDS = re.compile(r"<\[(\^?)[\d,-]+\]>")
_PLAIN_NAME = re.compile(r"[\w$-]+")


def compile_rejection(grammar: str, *, max_cpu_s: int = MAX_CPU_S) -> str:
    """Return why a grammar of llguidance does not compile within the limits; empty if it compiles.

    The reason begins with the place in a JSON schema, as in `properties.a.type: Invalid type: text`.
    """
    import llguidance  # lazily, for the first request that needs it

    packages = Path(llguidance.__file__).parents[1]
    command = [sys.executable, "-I", "-S", trial_compiler.__file__, str(packages), str(max_cpu_s)]
    content = _TOKEN_IDS.sub(r"<[\g<1>0]>", grammar).encode()
    try:
        child = subprocess.run(command, input=content, capture_output=True, timeout=MAX_WALL_S)
    except subprocess.TimeoutExpired:
        return f"compiling it takes longer than {MAX_WALL_S} s"
    reason, _, found = child.stdout.decode(errors="replace").partition("\0")
    if found:
        place, reason = json.loads(found)
        return f"{_written(place)}: {reason}" if place else str(reason)
    if child.returncode == 0 or reason:  # a reason without an exit: finding the place took too long
        return reason
    return f"compiling it takes more than {max_cpu_s} s or too much memory, or it nests too deeply"


def _written(place: Sequence[str | int]) -> str:
    """Return a place in a schema as errors write their `field`: `properties.a.anyOf[1].type`."""
    text = ""
    for step in place:
        if isinstance(step, str) and _PLAIN_NAME.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step, ensure_ascii=False)}]"
    return text
