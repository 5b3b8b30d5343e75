"""Source rules: errors in any model.py, which is parsed and not run.

Loading reports the same errors in Triton's words and without the position. Errors that need a run, such as a
package that is not installed, are reported by loading alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

from genserve.config.diagnostics import Diagnostic, Severity

__all__ = ["parse_source", "source_diagnostic", "source_diagnostics"]


_CLASS = "TritonPythonModel"


def source_diagnostics(path: Path) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of a model.py: that it is no Python, or has no `TritonPythonModel`."""
    module = parse_source(path)
    if isinstance(module, Diagnostic):
        return (module,)
    if _may_bind(module, _CLASS):
        return ()
    remedy = f"define `class {_CLASS}` in it"
    return (source_diagnostic(path, "", f"there is no class {_CLASS}", remedy=remedy),)


def parse_source(path: Path) -> ast.Module | Diagnostic:
    """Return the syntax tree of a model.py, or the diagnostic that it is no Python."""
    remedy = "model.py must be Python"
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        place = f"{error.lineno}:{error.offset or 1}" if error.lineno else ""
        return source_diagnostic(path, place, error.msg, remedy=remedy)
    except ValueError as error:  # a byte of zero
        return source_diagnostic(path, "", str(error), remedy=remedy)


def _may_bind(module: ast.Module, name: str) -> bool:
    """Whether the name stands anywhere in the file, or may be one of those that `import *` brings."""
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.Name(id=found) if found == name:
                return True
            case ast.alias(name="*"):
                return True
            case ast.alias(name=found, asname=known_as) if name in (found, known_as):
                return True
            case ast.Constant(value=found) if found == name:    # globals()["TritonPythonModel"], setattr
                return True
    return False


def source_diagnostic(path: Path, place: str, message: str, *, remedy: str) -> Diagnostic:
    """Return an error at a place in a model.py, `line:column`; empty: in all of it."""
    return Diagnostic(
        severity=Severity.ERROR, path=path, place=place, message=message, remedy=remedy, at_load=True
    )
