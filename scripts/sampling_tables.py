"""Sampling tables: writes the files derived from the table of sampling parameters.

    python scripts/sampling_tables.py           # write
    python scripts/sampling_tables.py --check   # exit 1 if a file is out of date

The table is `SamplingParams`. Derived are `SamplingOptions`, the keyword arguments of the SDK, since type
checkers read only text, and the tables of docs/sampling.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from genserve.sampling.param_table import Param
from genserve.sampling.sampling_params import PARAMETERS, SamplingParams

ROOT = Path(__file__).parents[1]
OPTIONS = ROOT / "genserve" / "sampling" / "sampling_options.py"
PAGE = ROOT / "docs" / "sampling.md"

# What the SDK takes for the types that are read; all others are taken as they are.
_OPTION_TYPES = {
    "tuple[str, ...]": "str | Sequence[str] | None",
    "tuple[int, ...]": "Sequence[int] | None",
    "tuple[PluginCall, ...]": "Sequence[PluginCall | PluginCallOptions] | None",
    "PluginCall | None": "PluginCall | PluginCallOptions | None",
    "Mapping[int, float]": "Mapping[int, float] | Mapping[str, float] | None",
    "RepetitionDetection | None": "RepetitionDetection | Mapping[str, int] | None",
    "StructuredOutputs | None": "StructuredOutputs | StructuredOutputOptions | None",
}
_HEADER = '''"""Sampling options: the keyword arguments of the SDK; written by scripts/sampling_tables.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from genserve.sampling.plugin_call import PluginCall, PluginCallOptions
from genserve.sampling.repetition_detection import RepetitionDetection
from genserve.sampling.structured_outputs import StructuredOutputOptions, StructuredOutputs


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and of the clients: `SamplingParams` with looser types."""

'''
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [path for path, text in derived().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(derived()[path], encoding="utf-8")
    return 1 if check and stale else 0


def derived() -> dict[Path, str]:
    """Return the texts of the derived files."""
    return {OPTIONS: options(), PAGE: _TABLE.sub(_table, PAGE.read_text(encoding="utf-8"))}


def options() -> str:
    """Return the module of `SamplingOptions`."""
    types = {option.name: str(option.type) for option in fields(SamplingParams) if option.name in PARAMETERS}
    return _HEADER + "".join(f"    {name}: {_OPTION_TYPES.get(of, of)}\n" for name, of in types.items())


def _table(found: re.Match[str]) -> str:
    rows = [row for row in PARAMETERS.values() if row.section == found[2]]
    lines = [f"| `{row.name}` | {_values(row)} | {_default(row)} | {row.doc} |" for row in rows]
    head = [f"{found[1]}| field | values | default | effect |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *lines, found[3]])


def _values(row: Param) -> str:
    if row.range is not None:
        return str(row.range)
    if row.max_items is not None:
        return f"up to {row.max_items} {'ids' if row.item is int else f'texts of {row.max_chars} characters'}"
    if row.item is not None:
        return {int: "ids", str: "names"}.get(row.item, "plug-ins ([decoding.md](decoding.md))")
    named = [_json(value) for kind in row.kinds for value in getattr(kind, "__args__", ())]
    words = (["true or false"] if bool in row.kinds else []) + named
    text = f"text of up to {row.max_chars} characters" if row.max_chars else "text"
    return " or ".join(words) or (text if str in row.kinds else "an object")


def _default(row: Param) -> str:
    return "" if row.default in (None, (), {}) else _json(row.default)


def _json(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text}`" if isinstance(value, str | tuple | list) else text


if __name__ == "__main__":
    sys.exit(main())
