"""Grammar trial: compiles a grammar in a disposable process, to find out whether it can be compiled safely.

llguidance bounds neither the time for the patterns of a JSON schema, which is exponential in the worst case,
nor the stack for deep rules. Therefore this file is also a script, with few imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Limits of llguidance's parser, at which an answer fails. With its defaults one mask can take a second, while
# all other answers wait, and its state hundreds of megabytes; with these it takes some 10 ms and 25 MB.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
MAX_CPU_S = 3
MAX_WALL_S = 30         # for a busy machine
MAX_BYTES = 2**31
STACK_BYTES = 4 * 2**20     # less than a server's threads have
MAX_MESSAGE_CHARS = 600
# Tokens by their ids, of which the small vocabulary of the process has few.
_TOKEN_IDS = re.compile(r"<\[(\^?)[\d,-]+\]>")


def compile_rejection(grammar: str, *, max_cpu_s: int = MAX_CPU_S) -> str:
    """Return why a grammar of llguidance does not compile within its limits; empty if it does."""
    import llguidance  # lazily, for the first request that needs it

    packages = Path(llguidance.__file__).parents[1]
    command = [sys.executable, "-I", "-S", __file__, str(packages), str(max_cpu_s)]
    content = _TOKEN_IDS.sub(r"<[\g<1>0]>", grammar).encode()
    try:
        child = subprocess.run(command, input=content, capture_output=True, timeout=MAX_WALL_S)
    except subprocess.TimeoutExpired:
        return f"compiling it takes longer than {MAX_WALL_S} s"
    if child.returncode == 0:
        return child.stdout.decode(errors="replace")
    return f"compiling it takes more than {max_cpu_s} s or too much memory, or it nests too deeply"


def _report(grammar: str) -> None:
    import llguidance

    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(
        vocabulary, grammar, limits=llguidance.LLParserLimits(**LIMITS), log_level=0
    )
    sys.stdout.buffer.write(matcher.get_error()[:MAX_MESSAGE_CHARS].encode())


def _bound(*, max_cpu_s: int) -> None:
    """Limit the time and memory of this process, where the system supports it."""
    try:
        import os
        import resource
    except ImportError:
        return
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _, folder, seconds = sys.argv
    sys.path.append(folder)
    _bound(max_cpu_s=int(seconds))
    threading.stack_size(STACK_BYTES)
    trial = threading.Thread(target=_report, args=(sys.stdin.buffer.read().decode(),))
    trial.start()
    trial.join()
