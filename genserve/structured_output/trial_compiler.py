"""Trial compiler: the program of a separate process that compiles one grammar of llguidance.

It writes why the grammar does not compile, and finds the place in a JSON schema that is the cause, which
llguidance does not report. The first request with a grammar waits for it, so it imports little: `json` only
after a failure, and nothing for annotations. Its client is `grammar_trial.py`.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from types import ModuleType

TYPE_CHECKING = False  # as in `typing`, whose import would take a tenth of the time
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
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
MAX_BYTES = 2**31
STACK_BYTES = 4 * 2**20  # less than a server's threads have
MAX_MESSAGE_CHARS = 600
# The keywords whose values are schemas: by name, or alone or in a list.
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_PARTS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
_UNSATISFIABLE = "Unsatisfiable schema"


def _report(grammar: str) -> None:
    reason = _error(grammar)
    sys.stdout.write(reason)
    sys.stdout.flush()
    if reason and grammar[:1] == "{":
        import json

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
    import json

    around = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    return _error(json.dumps({"grammars": [{"json_schema": {**schema, **around}}]}))


def _place(schema: Mapping[str, Any], reason: str, *, root: Mapping[str, Any]) -> tuple[list[str | int], str]:
    """Return the place of the smallest part because of which a schema does not compile, and the reason."""
    unsatisfiable = reason.startswith(_UNSATISFIABLE)
    for steps, part in _parts(schema):
        if unsatisfiable and steps[0] == "properties" and steps[1] not in schema.get("required", ()):
            continue  # such a property is left out
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
