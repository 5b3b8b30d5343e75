"""Sampling options: writes the keyword arguments of the SDK from the table of sampling parameters.

    python scripts/sampling_options.py           # write
    python scripts/sampling_options.py --check   # exit 1 if the file is out of date

The table is `SamplingParams`. Type checkers read only source text, so `SamplingOptions` is a file.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from genserve.sampling.sampling_params import PARAMETERS, SamplingParams

ROOT = Path(__file__).parents[1]
OPTIONS = ROOT / "genserve" / "sampling" / "sampling_options.py"

# The types that the SDK accepts for a type of `SamplingParams`; any other type is accepted as it is.
_OPTION_TYPES = {
    "tuple[str, ...]": "str | Sequence[str] | None",
    "tuple[int, ...]": "Sequence[int] | None",
    "tuple[PluginCall, ...]": "Sequence[PluginCall | PluginCallOptions] | None",
    "PluginCall | None": "PluginCall | PluginCallOptions | None",
    "Mapping[int, float]": "Mapping[int, float] | Mapping[str, float] | None",
    "RepetitionDetection | None": "RepetitionDetection | Mapping[str, int] | None",
    "StructuredOutputs | None": "StructuredOutputs | StructuredOutputOptions | None",
}
_HEADER = '''"""Sampling options: the keyword arguments of the SDK; written by scripts/sampling_options.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from genserve.sampling.plugin_call import PluginCall, PluginCallOptions
from genserve.sampling.repetition_detection import RepetitionDetection
from genserve.sampling.structured_outputs import StructuredOutputOptions, StructuredOutputs


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and of the clients: `SamplingParams` with looser types."""

'''


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    is_stale = OPTIONS.read_text(encoding="utf-8") != options()
    if is_stale:
        print(f"{'out of date' if check else 'written'}: {OPTIONS.relative_to(ROOT)}")
        if not check:
            OPTIONS.write_text(options(), encoding="utf-8")
    return int(check and is_stale)


def options() -> str:
    """Return the module of `SamplingOptions`."""
    types = {option.name: str(option.type) for option in fields(SamplingParams) if option.name in PARAMETERS}
    return _HEADER + "".join(f"    {name}: {_OPTION_TYPES.get(of, of)}\n" for name, of in types.items())


if __name__ == "__main__":
    sys.exit(main())
