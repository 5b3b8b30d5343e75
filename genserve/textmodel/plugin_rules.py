"""Plug-in rules: errors in the plug-ins of a decoder stage's model.py, which is parsed and not run.

A dict that is computed, or a class with bases, can only be validated by loading it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from genserve.backends.python.source_rules import parse_source, source_diagnostic
from genserve.config.diagnostics import Diagnostic
from genserve.textmodel.decoder_plugins import METHODS

_DECODE = re.compile(r"^\s*async\s+def\s+decode\b", re.MULTILINE)

_SIGNATURE = "write `def __init__(self, context, *, argument: type = default)`; see docs/decoding.md"

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def decodes(path: Path) -> bool:
    """Whether a model.py has an `async def decode`, which makes it a decoder stage."""
    return bool(_DECODE.search(path.read_text(encoding="utf-8", errors="replace")))


def plugin_diagnostics(path: Path) -> tuple[Diagnostic, ...]:
    """Return the syntax error of a model.py, or the errors of its plug-ins."""
    module = parse_source(path)
    if isinstance(module, Diagnostic):
        return (module,)
    return tuple(
        source_diagnostic(path, f"{node.lineno}:{node.col_offset + 1}", message, remedy=remedy)
        for node, message, remedy in _findings(module)
    )


_Finding = tuple[ast.expr | ast.stmt | ast.arg, str, str]


def _findings(module: ast.Module) -> Iterator[_Finding]:
    definitions = {node.name: node for node in module.body if isinstance(node, _Definition)}
    model = definitions.get("TritonPythonModel")
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
