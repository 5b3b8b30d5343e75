"""Decoder plug-ins: logits processors, stop rules and output parsers of a decoder stage's model.py.

`TritonPythonModel` has up to three attributes, each a dict from names to factories:

    logits_processors, stop_rules, output_parsers

A factory is called with a `PluginContext` and with keyword arguments from the request. These are its
keyword-only parameters; pydantic validates the arguments against the parameters' annotations.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from genserve.engine.delta_builder import AnswerText
from genserve.engine.sequence_plugins import (
    HOOKS,
    LogitsProcessor,
    OutputParser,
    PluginContext,
    SequencePlugins,
    plugin_errors,
)
from genserve.errors import InvalidRequest, ModelFailed, RepositoryError, closest, validation_message
from genserve.sampling.plugin_call import PluginCall

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError


class ParsedText:
    """A text rewritten by an output parser, piece by piece; an `AnswerText` of the engine.

    Its methods raise ModelFailed, which names the parser, if the parser raises or does not return a string.
    """

    def __init__(self, text: AnswerText, parser: OutputParser, *, name: str) -> None:
        self._text = text
        self._parser = parser
        self._name = name

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the parser's input."""
        return self._text.stop

    def push(self, token_id: int) -> str:
        """Append a token; return the text that can now be shown."""
        parsed = self._pushed(self._text.push(token_id))
        return parsed if self.stop is None else parsed + self._parsed(self._parser.flush)

    def flush(self) -> str:
        """Return the text held back; empty after a stop, since `push` has flushed the parser."""
        if self.stop is not None:
            return ""
        return self._pushed(self._text.flush()) + self._parsed(self._parser.flush)

    def _pushed(self, text: str) -> str:
        return self._parsed(lambda: self._parser.push(text)) if text else ""

    def _parsed(self, parse: Callable[[], str]) -> str:
        with plugin_errors("output parser", self._name):
            parsed: object = parse()
        if not isinstance(parsed, str):
            raise ModelFailed(f"the output parser {self._name!r} did not return a string")
        return parsed


_KINDS = {
    "logits_processors": "logits processor",
    "stop_rules": "stop rule",
    "output_parsers": "output parser",
}
# The methods that each kind needs.
METHODS: Mapping[str, tuple[str, ...]] = {
    "logits_processors": ("__call__",),
    "stop_rules": ("__call__",),
    "output_parsers": ("push", "flush"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plug-in that requests may use by its name."""

    kind: str                       # a key of METHODS
    name: str
    factory: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]
    schema: Mapping[str, Any]       # JSON schema of the arguments

    def make(self, call: PluginCall, context: PluginContext, *, field: str) -> Any:
        """Make an instance for a token sequence.

        Raises:
            InvalidRequest: an argument is missing, unknown or invalid; `field` is its path. A ValueError of
                the factory becomes an InvalidRequest with the same text.
            ModelFailed: the factory raised another exception, or did not return such a plug-in.
        """
        from pydantic import ValidationError

        try:
            arguments = self.arguments.validate_json(json.dumps(call.args))
        except ValidationError as error:
            raise self._rejection(error, field=f"{field}.args") from None
        except TypeError as error:  # only from a caller in this process
            raise InvalidRequest(f"{field}.args must be JSON-serializable: {error}", field=field) from None
        with plugin_errors(_KINDS[self.kind], self.name):
            try:
                made = self.factory(context, **arguments)
            except ValidationError as error:  # raised by the factory's own pydantic models
                raise self._rejection(error, field=f"{field}.args") from None
            except ValueError as error:
                raise InvalidRequest(f"{field}.args: {str(error)[:200]}", field=f"{field}.args") from None
        self._require_usable(made)
        return made

    def _rejection(self, error: ValidationError, *, field: str) -> InvalidRequest:
        # An unknown name may be the misspelt name of an argument that is missing.
        problems = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        problem = problems[0]
        loc = problem["loc"]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
        path = (field + place)[:256]
        if problem["type"] == "extra_forbidden" and len(loc) == 1:
            known = list(self.schema.get("properties", ()))
            meant = closest(str(loc[0]), known=known)
            remedy = f"did you mean {meant}?" if meant else f"its arguments are: {', '.join(known) or 'none'}"
            message = f"{path}: the plug-in has no argument {str(loc[0])[:64]!r}"
            return InvalidRequest(message, field=path, remedy=remedy)
        return InvalidRequest(f"{path}: {validation_message(problem)}", field=path)

    def _require_usable(self, made: object) -> None:
        """Raise ModelFailed if a factory did not return such a plug-in; classes are validated at load."""
        lacking = [method for method in METHODS[self.kind] if not callable(getattr(made, method, None))]
        words = f"{_KINDS[self.kind]} {self.name!r}"
        if lacking:
            raise ModelFailed(f"the {words} has no method {lacking[0]}")
        hook = getattr(made, "hook", HOOKS[0])
        if hook not in HOOKS:
            remedy = f"set hook to {' or '.join(HOOKS)}"
            raise ModelFailed(f"the hook of the {words} is {hook!r}", remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """The plug-ins of one decoder stage, by kind (the attribute in its model.py) and by name."""

    by_kind: Mapping[str, Mapping[str, Plugin]] = field(default_factory=dict)

    def for_sequence(
        self, context: PluginContext, *, ours: Sequence[tuple[str, LogitsProcessor]] = ()
    ) -> SequencePlugins:
        """Make the plug-ins of a request that act on tokens, followed by the processors `ours`.

        Raises:
            InvalidRequest: a plug-in does not exist, or see `Plugin.make`.
            ModelFailed: see `Plugin.make`.
        """
        return SequencePlugins(
            processors=[*self._made("logits_processors", context.params.logits_processors, context), *ours],
            stop_rules=self._made("stop_rules", context.params.stop_rules, context),
        )

    def parsed(self, text: AnswerText, context: PluginContext) -> AnswerText:
        """Return an answer's text, rewritten by the request's parser. Raises what `for_sequence` raises."""
        call = context.params.output_parser
        if call is None:
            return text
        return ParsedText(text, self._parser(call, context), name=call.name)

    def check(self, context: PluginContext) -> None:
        """Make the plug-ins of a request and drop them. Raises what `for_sequence` raises."""
        if context.params.output_parser is not None:
            self._parser(context.params.output_parser, context)
        self.for_sequence(context)

    def _parser(self, call: PluginCall, context: PluginContext) -> OutputParser:
        plugin = self._find("output_parsers", call.name, field="output_parser")
        parser: OutputParser = plugin.make(call, context, field="output_parser")
        return parser

    def described(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of the arguments of each plug-in, by kind and name."""
        return {
            kind: {name: plugin.schema for name, plugin in plugins.items()}
            for kind, plugins in self.by_kind.items()
            if plugins
        }

    def _made(
        self, kind: str, calls: tuple[PluginCall, ...], context: PluginContext
    ) -> list[tuple[str, Any]]:
        places = [(f"{kind}[{index}]", call) for index, call in enumerate(calls)]
        return [
            (call.name, self._find(kind, call.name, field=place).make(call, context, field=place))
            for place, call in places
        ]

    def _find(self, kind: str, name: str, *, field: str) -> Plugin:
        known = self.by_kind.get(kind, {})
        if name not in known:
            field = f"{field}.name"
            remedy = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise InvalidRequest(
                f"{field}: the model has no {_KINDS[kind]} {name!r}", field=field, remedy=remedy
            )
        return known[name]


def plugins_of(model: object, path: Path) -> Plugins:
    """Return the plug-ins of a `TritonPythonModel`.

    Raises:
        RepositoryError: a plug-in has the wrong signature or lacks a method; with its line in `path`.
    """
    return Plugins(by_kind={kind: _of_kind(model, kind, path) for kind in _KINDS})


def _of_kind(model: object, kind: str, path: Path) -> dict[str, Plugin]:
    factories = getattr(model, kind, {})
    if not isinstance(factories, Mapping):
        raise RepositoryError(f"{path}: {kind} must be a dict from names to factories")
    return {str(name): _plugin(kind, str(name), factory, path) for name, factory in factories.items()}


def _plugin(kind: str, name: str, factory: Any, path: Path) -> Plugin:
    try:
        _require_methods(kind, factory)
        arguments = _arguments(name, factory)
        schema = arguments.json_schema()
    except Exception as error:  # annotations are code of the repository
        reason = str(error).partition("\n")[0]  # pydantic's messages are long
        raise RepositoryError(
            f"{_where(factory, path)}: {kind}[{name!r}]: {reason}", remedy=_REMEDY
        ) from error
    if getattr(factory, "hook", HOOKS[0]) not in HOOKS:
        raise RepositoryError(
            f"{_where(factory, path)}: {kind}[{name!r}]: its hook is {factory.hook!r}",
            remedy=f"set hook to {' or '.join(HOOKS)}",
        )
    return Plugin(kind=kind, name=name, factory=factory, arguments=arguments, schema=schema)


def _require_methods(kind: str, factory: Any) -> None:
    """Raise TypeError if a class lacks a method; what a function returns is not known yet."""
    for method in METHODS[kind] if inspect.isclass(factory) else ():
        if not any(method in vars(base) for base in factory.__mro__):
            raise TypeError(f"{factory.__name__} has no method {method}")


def _arguments(name: str, factory: Any) -> TypeAdapter[dict[str, Any]]:
    """Return a validator of the keyword arguments of a factory; raise TypeError for a wrong signature."""
    from pydantic import ConfigDict, TypeAdapter
    from typing_extensions import TypedDict

    if not callable(factory):
        raise TypeError("it is neither a class nor a function")
    context, *rest = [*inspect.signature(factory).parameters.values()] or [_NOTHING]
    if context.kind is context.KEYWORD_ONLY or any(p.kind is not p.KEYWORD_ONLY for p in rest):
        raise TypeError("it must take a context, followed by keyword-only parameters")
    hints = typing.get_type_hints(
        factory.__init__ if inspect.isclass(factory) else factory, include_extras=True
    )
    bare = [p.name for p in rest if p.name not in hints]
    if bare:
        raise TypeError(f"its parameter {bare[0]} has no annotation")
    # Defaults are left to the factory: only arguments of the request are passed.
    fields = {p.name: hints[p.name] if p.default is p.empty else NotRequired[hints[p.name]] for p in rest}
    make_typed_dict: Any = TypedDict    # mypy cannot know the fields
    arguments = make_typed_dict(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return TypeAdapter(arguments)


def _where(factory: Any, path: Path) -> str:
    try:
        return f"{inspect.getsourcefile(factory)}:{inspect.getsourcelines(factory)[1]}"
    except (TypeError, OSError):
        return str(path)


# Stands for the context of a factory without parameters, which is rejected.
_NOTHING = inspect.Parameter("nothing", inspect.Parameter.KEYWORD_ONLY)
_REMEDY = "write `def __init__(self, context, *, argument: type = default)`; see docs/decoding.md"
