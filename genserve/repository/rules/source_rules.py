"""Source rules: a model.py, which is parsed and not run, and the plug-ins in a decoder stage's.

A dict of plug-ins that is computed, or a class with bases, can only be validated by loading it. Loading
reports the same errors in Triton's words and without the position. Errors that need a run, such as a package
that is not installed, are reported by loading alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from genserve.config.diagnostics import Diagnostic, Severity
from genserve.repository.rules.facts import FileFacts
from genserve.repository.text_stages import is_decoder
from genserve.textmodel.decoder_plugins import METHODS

_CLASS = "TritonPythonModel"
_SIGNATURE = "write `def __init__(self, context, *, argument: type = default)`; see docs/decoding.md"
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Finding = tuple[ast.expr | ast.stmt | ast.arg, str, str]


def check_sources(facts: FileFacts) -> Iterator[Diagnostic]:
    """Reject each model.py that is not Python or has no model class; `check_plugins` reads decoder stages."""
    for file in _python_files(facts):
        if file.suffix == ".py" and not is_decoder(file):
            yield from source_diagnostics(file)


def check_plugins(facts: FileFacts) -> Iterator[Diagnostic]:
    """Reject each model.py of a decoder stage that is not Python, or whose plug-ins are invalid."""
    for file in _python_files(facts):
        if is_decoder(file):
            yield from plugin_diagnostics(file)


def _python_files(facts: FileFacts) -> Iterator[Path]:
    """Yield the model.py of each served version; `check_placeholders` rejects a file that cannot be read."""
    if facts.config.backend == "python":
        files = (folder / facts.config.default_model_filename for folder in facts.served_folders)
        yield from (file for file in files if file.is_file() and _is_readable(file))


def _is_readable(path: Path) -> bool:
    try:
        with path.open("rb") as opened:
            opened.read(1)
    except OSError:
        return False
    return True


def source_diagnostics(path: Path) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of a model.py: a syntax error, or a missing `TritonPythonModel`."""
    module = _parse(path)
    if isinstance(module, Diagnostic):
        return (module,)
    if _may_bind(module, _CLASS):
        return ()
    remedy = f"define `class {_CLASS}` in it"
    return (_diagnostic(path, "", f"there is no class {_CLASS}", remedy=remedy),)


def _parse(path: Path) -> ast.Module | Diagnostic:
    """Return the syntax tree of a model.py, or the diagnostic that it is not Python."""
    remedy = "model.py must be Python"
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        position = f"{error.lineno}:{error.offset or 1}" if error.lineno else ""
        return _diagnostic(path, position, error.msg, remedy=remedy)
    except ValueError as error:  # a byte of zero
        return _diagnostic(path, "", str(error), remedy=remedy)


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


def _diagnostic(path: Path, position: str, message: str, *, remedy: str) -> Diagnostic:
    """Return an error at a position of a model.py, `line:column`; empty: in the whole file."""
    return Diagnostic(
        severity=Severity.ERROR, path=path, position=position, message=message, remedy=remedy
    )


def plugin_diagnostics(path: Path) -> tuple[Diagnostic, ...]:
    """Return the syntax error of a model.py, or the errors of its plug-ins."""
    module = _parse(path)
    if isinstance(module, Diagnostic):
        return (module,)
    return tuple(
        _diagnostic(path, f"{node.lineno}:{node.col_offset + 1}", message, remedy=remedy)
        for node, message, remedy in _findings(module)
    )


def _findings(module: ast.Module) -> Iterator[_Finding]:
    definitions = {node.name: node for node in module.body if isinstance(node, _Definition)}
    model = definitions.get(_CLASS)
    for statement in model.body if isinstance(model, ast.ClassDef) else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=kind)], value=value) if kind in METHODS:
                yield from _of_kind(kind, value, definitions)


def _of_kind(kind: str, value: ast.expr, definitions: Mapping[str, _Definition]) -> Iterator[_Finding]:
    if isinstance(value, ast.List | ast.Set | ast.Tuple | ast.Constant):
        yield value, f"{kind} must be a dict from names to classes or functions", 'write {"name": Class}'
    if not isinstance(value, ast.Dict):
        return
    for key, factory in zip(value.keys, value.values, strict=True):
        if isinstance(key, ast.Constant) and not isinstance(key.value, str):
            yield key, f"{kind}: the name {key.value!r} is not a string", "use a string as the name"
        if isinstance(factory, ast.Constant):
            yield factory, f"{kind}: {factory.value!r} is neither a class nor a function", _SIGNATURE
        if isinstance(factory, ast.Name) and factory.id in definitions:
            yield from _of_definition(kind, definitions[factory.id])


def _of_definition(kind: str, definition: _Definition) -> Iterator[_Finding]:
    if not isinstance(definition, ast.ClassDef):
        positional = definition.args.posonlyargs + definition.args.args
        yield from _of_signature(kind, definition.name, positional, definition)
        return
    if definition.bases or definition.decorator_list:
        return
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
    for name in METHODS[kind]:
        if name not in methods:
            yield definition, f"{kind}: {definition.name} has no method {name}", "see docs/decoding.md"
    made = methods.get("__init__")
    if made is None:
        yield definition, f"{kind}: {definition.name} takes no context", _SIGNATURE
    else:
        yield from _of_signature(kind, definition.name, (made.args.posonlyargs + made.args.args)[1:], made)


def _of_signature(
    kind: str, name: str, positional: list[ast.arg], function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[_Finding]:
    arguments = function.args
    if len(positional) != 1 or arguments.vararg or arguments.kwarg:
        words = "must take a context, followed by keyword-only parameters"
        yield function, f"{kind}: {name} {words}", _SIGNATURE
    for argument in arguments.kwonlyargs:
        if argument.annotation is None:
            words = f"the parameter {argument.arg} of {name} has no annotation"
            yield argument, f"{kind}: {words}", _SIGNATURE
