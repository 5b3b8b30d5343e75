"""Grammar trial: compiles a grammar in a disposable process, to find out whether compiling it is safe.

It also finds the place in a JSON schema that does not compile, which llguidance does not report.

llguidance limits neither the time for the patterns of a JSON schema, which is exponential in the worst case,
nor the stack for deep rules. Therefore this file is also a script, with few imports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# Limits of llguidance's parser, at which an answer fails. With the library's defaults, one mask can take a
# second, while all other answers wait, and a state hundreds of megabytes. With these limits a mask takes some
# 10 ms, and a state 25 MB. The first limit is that of compiling, which takes 2 s for a thousand tools.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
MAX_CPU_S = 3
MAX_WALL_S = 30         # wall-clock time, for a busy machine
MAX_BYTES = 2**31
STACK_BYTES = 4 * 2**20     # less than a server's threads have
MAX_MESSAGE_CHARS = 600
# Special tokens are written by their ids in a grammar; the process's small vocabulary has few of them.
_TOKEN_IDS = re.compile(r"<\[(\^?)[\d,-]+\]>")
# The keywords whose values are schemas: by name, or alone or in a list.
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_PARTS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
_UNSATISFIABLE = "Unsatisfiable schema"
_PLAIN_NAME = re.compile(r"[\w$-]+")


def compile_rejection(grammar: str, *, max_cpu_s: int = MAX_CPU_S) -> str:
    """Return why a grammar of llguidance does not compile within the limits; empty if it compiles.

    The reason begins with the place in a JSON schema, as in `properties.a.type: Invalid type: text`.
    """
    import llguidance  # lazily, for the first request that needs it

    packages = Path(llguidance.__file__).parents[1]
    command = [sys.executable, "-I", "-S", __file__, str(packages), str(max_cpu_s)]
    content = _TOKEN_IDS.sub(r"<[\g<1>0]>", grammar).encode()
    try:
        child = subprocess.run(command, input=content, capture_output=True, timeout=MAX_WALL_S)
    except subprocess.TimeoutExpired:
        return f"compiling it takes longer than {MAX_WALL_S} s"
    reason, _, found = child.stdout.decode(errors="replace").partition("\0")
    if found:
        place, reason = json.loads(found)
        return f"{_written(place)}: {reason}" if place else str(reason)
    if child.returncode == 0 or reason:     # a reason without an exit: finding the place took too long
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


def _report(grammar: str) -> None:
    reason = _error(grammar)
    sys.stdout.write(reason)
    sys.stdout.flush()
    if reason and grammar[:1] == "{":
        schemas = [part["json_schema"] for part in json.loads(grammar)["grammars"] if "json_schema" in part]
        for schema in schemas:
            if _error_of(schema, root=schema) == reason:
                sys.stdout.write("\0" + json.dumps(_place(schema, reason, root=schema)))
                return


def _error(grammar: str) -> str:
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(_byte_vocabulary(), grammar, limits=limits, log_level=0)
    return str(matcher.get_error()).replace("\0", "")[:MAX_MESSAGE_CHARS]


@cache
def _byte_vocabulary() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")


def _import_compiled(folder: str) -> None:
    """Let `import llguidance` mean its compiled part alone: the rest takes five times as long to import."""
    package = ModuleType("llguidance")
    package.__path__ = [f"{folder}/llguidance"]
    sys.modules["llguidance"] = package
    from llguidance import _lib

    package.__dict__.update(vars(_lib))


def _error_of(schema: Mapping[str, Any], *, root: Mapping[str, Any]) -> str:
    """Return why a part of a schema does not compile with the definitions and options of the root alone."""
    around = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    return _error(json.dumps({"grammars": [{"json_schema": {**schema, **around}}]}))


def _place(schema: Mapping[str, Any], reason: str, *, root: Mapping[str, Any]) -> tuple[list[str | int], str]:
    """Return the place of the smallest part because of which a schema does not compile, and the reason."""
    unsatisfiable = reason.startswith(_UNSATISFIABLE)
    for steps, part in _parts(schema):
        if unsatisfiable and steps[0] == "properties" and steps[1] not in schema.get("required", ()):
            continue    # such a property is left out
        own = _error_of(part, root=root)
        if own == reason or (unsatisfiable and own.startswith(_UNSATISFIABLE)):
            place, own = _place(part, own, root=root)
            return [*steps, *place], own
    for key in sorted(schema, key=lambda key: key not in reason):
        if _error_of({name: part for name, part in schema.items() if name != key}, root=root) != reason:
            return [key], reason
    return [], reason


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[list[str | int], Mapping[str, Any]]]:
    """Yield the schemas directly within a schema, with their places; definitions come first."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in _MAPS[:2]):
        if key in _MAPS and isinstance(value, dict):
            found = [([key, name], part) for name, part in value.items()]
        elif key in _PARTS and isinstance(value, list):
            found = [([key, index], part) for index, part in enumerate(value)]
        else:
            found = [([key], value)] if key in _PARTS else []
        yield from ((steps, part) for steps, part in found if isinstance(part, dict))


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
    _import_compiled(folder)
    _bound(max_cpu_s=int(seconds))
    threading.stack_size(STACK_BYTES)
    trial = threading.Thread(target=_report, args=(sys.stdin.buffer.read().decode(),))
    trial.start()
    trial.join()
