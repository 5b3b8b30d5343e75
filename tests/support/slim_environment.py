"""Slim environment: variables of a process in which the packages of the extras cannot be imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["slim_environment"]

_EXTRAS = ("torch", "transformers", "safetensors", "onnxscript", "matplotlib", "opentelemetry.sdk")

_BLOCK = f"""
import sys

sys.modules.update(dict.fromkeys({_EXTRAS}))    # importing one raises ModuleNotFoundError
"""


def slim_environment(folder: Path) -> dict[str, str]:
    """The variables of the process; `folder` gets a module that Python runs when it starts."""
    (folder / "sitecustomize.py").write_text(_BLOCK)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
