"""Source rules: errors in any model.py, which is parsed and not run.

Loading reports the same errors in Triton's words and without the position. Errors that need a run, such as a
package that is not installed, are reported by loading alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

from genserve.config.diagnostics import Diagnostic, Severity

_CLASS = "TritonPythonModel"


def source_diagnostics(path: Path) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of a model.py: a syntax error, or a missing `TritonPythonModel`."""
    module = parse_source(path)
    if isinstance(module, Diagnostic):
        return (module,)
    if _may_bind(module, _CLASS):
        return ()
    remedy = f"define `class {_CLASS}` in it"
    return (source_diagnostic(path, "", f"there is no class {_CLASS}", remedy=remedy),)


def parse_source(path: Path) -> ast.Module | Diagnostic:
    """Return the syntax tree of a model.py, or the diagnostic that it is not Python."""
    remedy = "model.py must be Python"
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        position = f"{error.lineno}:{error.offset or 1}" if error.lineno else ""
        return source_diagnostic(path, position, error.msg, remedy=remedy)
    except ValueError as error:  # a byte of zero
        return source_diagnostic(path, "", str(error), remedy=remedy)


def _may_bind(module: ast.Module, name: str) -> bool:
    """Whether the name occurs anywhere in the file, or `import *` may bring it."""
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


def source_diagnostic(path: Path, position: str, message: str, *, remedy: str) -> Diagnostic:
    """Return an error at a position of a model.py, `line:column`; empty: in the whole file."""
    return Diagnostic(
        severity=Severity.ERROR, path=path, position=position, message=message, remedy=remedy, at_load=True
    )
