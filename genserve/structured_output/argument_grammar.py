"""Argument grammar: writes the grammar of the arguments of tool calls in each `ArgumentSyntax`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from genserve.errors import InvalidRequest
from genserve.prompt import TextFormat, Tool
from genserve.structured_output.json_schema import lenient_schema
from genserve.structured_output.text_grammar import TextGrammarError, text_grammar, text_rules
from genserve.text.argument_syntax import ArgumentSyntax, TaggedArguments
from genserve.text.literal_arguments import LiteralArguments
from genserve.text.parameter_types import alternatives, enumerated, members, own_types

# A text, split into plain texts and the ids of special tokens.
Parts: TypeAlias = Sequence[str | int]

ANYTHING = r"/(.|\n)*/"
# Classes of characters and escapes in a pattern, whose signs have no meaning outside of them.
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_KEY = r"/[A-Za-z0-9_.\-]{1,64}/"       # a parameter that the schema does not name
_ROOT = "arguments"
# Strings of JSON, and of Python in single quotes.
_JSON_TEXT = r'/"([^"\\\n]|\\.)*"/'
_PYTHON_TEXT = r"/'([^'\\]|\\(.|\n))*'/"
_ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXT_RULES = frozenset({"minLength", "maxLength", "pattern", "format"})
_MAX_DEPTH = 4      # of values whose types are known; a deeper one is empty
_GROUP = re.compile(r"\([^()]*\)")


class ArgumentGrammar:
    """The rules of the arguments of some tools in one syntax.

    Attributes:
        rules: rules in Lark's notation.
        schemas: the grammars of the JSON values and of the texts to which the rules refer.
    """

    def __init__(self, syntax: ArgumentSyntax, parts_of: Callable[[str], Parts]) -> None:
        """Begin without rules; `parts_of` splits a text at its special tokens."""
        self.rules: list[str] = []
        self.schemas: list[dict[str, Any]] = []
        self._syntax = syntax
        self._parts_of = parts_of
        self._terminals: dict[str, str] = {}    # the names of terminals, by what they match

    def of(self, index: int, tool: Tool) -> str:
        """Add the rules of the arguments of a tool; return what matches them.

        Args:
            index: the index of the tool in the request.
            tool: the tool, whose schema describes an object.
        """
        if tool.input_format is not None:
            return self._text(index, tool.input_format)
        schema = arguments_schema(tool)
        if isinstance(self._syntax, TaggedArguments):
            return _TaggedRules(self, self._syntax, schema, name=f"arguments{index}").add()
        if isinstance(self._syntax, LiteralArguments):
            return _LiteralRules(self, self._syntax, schema, name=f"arguments{index}").add()
        return self.json_value(f"arguments{index}", schema)

    def json_value(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add the grammar of a JSON value; return what matches it."""
        self.schemas.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def _text(self, index: int, form: TextFormat) -> str:
        """Add the rules of arguments whose only one, `input`, is a text; return what matches them.

        Raises:
            InvalidRequest: the form has a part that is not supported.
        """
        syntax, name = self._syntax, f"INPUT{index}"
        before, end, in_json = '{"input": "', '"}', True
        if isinstance(syntax, TaggedArguments):
            before, end, in_json = f"{syntax.before_key}input{syntax.before_text}", syntax.after_value, False
        elif isinstance(syntax, LiteralArguments):
            before, end = f"input{syntax.assign}{syntax.quotes[0]}", syntax.quotes[0]
            in_json = syntax.has_escapes
        before, after = self.written(before), self.written(end)
        try:
            rules = text_rules(form, name=name, in_json=in_json)
        except (TextGrammarError, RecursionError) as error:
            reason = str(error) if isinstance(error, TextGrammarError) else "it is nested too deeply"
            field = arguments_field(index, form)
            raise InvalidRequest(f"{field} cannot be used: {reason}", field=field) from None
        if rules is None:
            source = text_grammar(form, after=after, in_json=in_json)
            self.schemas.append({"name": f"input{index}", "lark_grammar": source})
            return f"{before} @input{index}"
        self.rules += rules
        return f"{before} {name} {after}" if in_json else f"{before} {self.text_up_to(end, [name])}"

    def written(self, text: str) -> str:
        """Return a text in Lark's notation."""
        return written(self._parts_of(text))

    def text_up_to(self, end: str, constraints: Sequence[str] = ()) -> str:
        """Return what matches a text and the mark after it, which the text cannot contain.

        A terminal matches as much as it can. So it has the part of the mark before the first special token,
        which it could not leave to the next terminal.

        Args:
            end: the mark. Whitespace at its ends may be in the text.
            constraints: what else the text must match, in Lark's notation.
        """
        before, *rest = self._parts_of(end)
        if isinstance(before, int):
            before, rest = "", [before, *rest]
        with_mark = self.terminal(f"{ANYTHING} {json.dumps(end.strip())} {ANYTHING}")
        mark = json.dumps(before)
        # Each constraint includes the mark: the possible ends of the text would multiply the lexer's states.
        ended = [f"(({text}) {mark})" for text in (f"{ANYTHING} & ~{with_mark}", *constraints)]
        return f"{self.terminal(' & '.join(ended))} {written(rest)}"

    def terminal(self, matched: str) -> str:
        """Return the name of the terminal of some texts, which may exist already."""
        if matched not in self._terminals:
            self._terminals[matched] = f"ARGUMENT{len(self._terminals)}"
            self.rules.append(f"{self._terminals[matched]}: {matched}")
        return self._terminals[matched]


class _TaggedRules:
    """The rules of `TaggedArguments` of one tool: its parameters in the order of the schema, then others."""

    def __init__(
        self, grammar: ArgumentGrammar, syntax: TaggedArguments, schema: Mapping[str, Any], *, name: str
    ) -> None:
        self._grammar = grammar
        self._syntax = syntax
        self._schema = schema
        self._name = name
        self._num_values = 0

    def add(self) -> str:
        """Add the rules; return the name of the rule of the arguments."""
        shapes = [" ".join(self._parameters(shape)) for shape in alternatives(self._schema, self._schema)]
        self._grammar.rules.append(f"{self._name}: {' | '.join(shapes)}")
        return self._name

    def _parameters(self, shape: Mapping[str, Any]) -> Iterator[str]:
        properties, required = members(shape)
        for name in dict.fromkeys([*properties, *required]):
            if (schema := properties.get(name, {})) is not False:
                one = self._parameter(partial(self._head, json.dumps(name)), schema)
                yield one if name in required else f"({one})?"
        if further := shape.get("additionalProperties", False):
            known = " | ".join(json.dumps(name) for name in properties)
            key = self._grammar.terminal(_KEY + (f" & ~({known})" if known else ""))
            yield f"({self._parameter(partial(self._head, key), further)})*"

    def _head(self, key: str, before_value: str) -> str:
        written = self._grammar.written
        return f"{written(self._syntax.before_key)} {key} {written(before_value)}"

    def _parameter(self, head: Callable[[str], str], schema: Any) -> str:
        """Return what matches a parameter; `head` writes what precedes the value, up to the given mark."""
        syntax = self._syntax
        texts, others = self._values(schema)
        if not syntax.has_types:
            return f"{head(syntax.before_text)} ({' | '.join([*texts, *others])})"
        choices = [f"{head(syntax.before_text)} ({' | '.join(texts)})"] if texts else []
        choices += [f"{head(syntax.before_json)} {other}" for other in others]
        return f"({' | '.join(choices)})"

    def _values(self, schema: Any) -> tuple[list[str], list[str]]:
        """Return what matches a value and the mark after it: the strings, and the other values."""
        syntax, grammar = self._syntax, self._grammar
        texts, others = dict[str, None](), list[dict[str, Any]]()
        for one in alternatives(schema, self._schema):
            types = own_types(one) or syntax.untyped
            values = enumerated(one)
            if "string" in types and not values:
                texts[grammar.text_up_to(syntax.after_value, _patterns(one))] = None
            for value in values if "string" in types else ():
                if isinstance(value, str):
                    texts[grammar.written(value + syntax.after_value)] = None
            if rest := [name for name in types if name != "string"]:
                kept = [value for value in values if not isinstance(value, str)]
                others.append({**one, "type": rest, **({"enum": kept} if values else {})})
        if not others or (grammar.text_up_to(syntax.after_value) in texts and not syntax.has_types):
            return [*texts], []
        self._num_values += 1
        whole = self._alone(others[0] if len(others) == 1 else {"anyOf": others})
        written = [grammar.json_value(f"{self._name}_{self._num_values}", whole)]
        if not syntax.has_types and any("boolean" in one["type"] and "enum" not in one for one in others):
            written += ['"True"', '"False"']   # as Qwen's templates write them into a history
        return [*texts], [f"({' | '.join(written)}) {grammar.written(syntax.after_value)}"]

    def _alone(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a part of the tool's schema as a schema of its own, in which references can be followed."""
        alone = {**schema, "x-guidance": self._schema["x-guidance"]}
        if "$ref" in json.dumps(schema):
            alone = {**_moved(alone), "$defs": {_ROOT: _moved(self._schema)}}
        return alone


def arguments_field(index: int, form: TextFormat | None) -> str:
    """Return the field of a request that has the form of a tool's arguments: a schema, or that of a text."""
    form_of = "function.parameters" if form is None else "custom.format.grammar.definition"
    return f"tools[{index}].{form_of}"


class _LiteralRules:
    """The rules of `LiteralArguments` of one tool: the keys of objects in the schema's order, then others."""

    def __init__(
        self, grammar: ArgumentGrammar, syntax: LiteralArguments, schema: Mapping[str, Any], *, name: str
    ) -> None:
        self._grammar = grammar
        self._syntax = syntax
        self._schema = schema
        self._name = name
        self._num_rules = 0

    def add(self) -> str:
        """Add the rules; return the name of the rule of the arguments."""
        shapes = alternatives(self._schema, self._schema)
        key = partial(self._key, is_inner=False)
        choices = " | ".join(f"({self._members(shape, key, depth=0)})" for shape in shapes)
        self._grammar.rules.append(f"{self._name}: {choices}")
        return self._name

    def _key(self, name: str | None, *, is_inner: bool) -> str:
        """Return what matches a key, any if None, and what follows it."""
        written, quoted = self._grammar.written, is_inner and self._syntax.has_escapes
        key = self._grammar.terminal(_KEY) if name is None else json.dumps(name)
        assign = written(self._syntax.nested_assign if is_inner else self._syntax.assign)
        if not quoted:
            return f"{key} {assign}"
        if name is None:
            return f'{self._grammar.terminal(_JSON_TEXT)} {assign}'
        return f"({json.dumps(json.dumps(name, ensure_ascii=False))} | {json.dumps(repr(name))}) {assign}"

    def _members(self, shape: Mapping[str, Any], key: Callable[[str | None], str], *, depth: int) -> str:
        """Return what matches the members of an object, of which each but the first follows a separator."""
        given, required = members(shape)
        separator = self._grammar.written(self._syntax.separator)
        names = [name for name in dict.fromkeys([*given, *required]) if given.get(name, {}) is not False]
        if self._syntax.is_sorted:
            names.sort(key=str.lower)
        parts = [self._rule(f"{key(name)} {self._value(given.get(name, {}), depth=depth)}") for name in names]
        further = shape.get("additionalProperties", False)
        rest = ""       # what may follow the members so far
        if further:
            other = self._rule(f"{key(None)} {self._value(further, depth=depth)}")
            rest = self._rule(f"({separator} {other})*")
        choices = [f"({other} {rest})?"] if further else [""]
        for name, part in zip(reversed(names), reversed(parts), strict=True):
            is_required = name in required
            choices = [*([] if is_required else choices), f"{part} {rest}"]
            rest = self._rule(f"({separator} {part}){'' if is_required else '?'} {rest}")
        return " | ".join(f"({choice})" if choice else '""' for choice in reversed(choices))

    def _value(self, schema: Any, *, depth: int) -> str:
        """Return what matches a value."""
        choices = dict[str, None]()
        for one in alternatives(schema, self._schema) if depth < _MAX_DEPTH else [{}]:
            values = enumerated(one)
            for value in values:
                choices[self._grammar.written(self._syntax.value(value))] = None
                if isinstance(value, str) and self._syntax.has_escapes:
                    choices[json.dumps(repr(value))] = None
            for name in () if values else own_types(one) or _ALL_TYPES:
                choices[self._of_type(name, one, depth=depth + 1)] = None
        return self._rule(" | ".join(choices)) if choices else '""'

    def _of_type(self, name: str, schema: Mapping[str, Any], *, depth: int) -> str:
        written = self._grammar.written
        match name:
            case "string" if self._syntax.has_escapes and _TEXT_RULES.isdisjoint(schema):
                return f"({self._grammar.terminal(_JSON_TEXT)} | {self._grammar.terminal(_PYTHON_TEXT)})"
            case "string" if not self._syntax.has_escapes:
                quote = self._syntax.quotes[0]
                return f"{written(quote)} {self._grammar.text_up_to(quote, _patterns(schema))}"
            case "boolean":
                words = ("true", "false", "True", "False") if self._syntax.has_escapes else ("true", "false")
                return f"({' | '.join(map(json.dumps, words))})"
            case "null":
                return '("None" | "null")'
            case "array" | "object" if depth >= _MAX_DEPTH:
                return json.dumps("[]" if name == "array" else "{}")
            case "array":
                part = self._value(schema.get("items", {}), depth=depth)
                fewest, most = schema.get("minItems", 0), schema.get("maxItems")
                if most == 0:
                    return '"[]"'
                times = f"{{{max(0, fewest - 1)},{'' if most is None else most - 1}}}"
                parts = f"{part} ({written(self._syntax.separator)} {part}){times}"
                return f'"[" ({parts}){"" if fewest else "?"} "]"'
            case "object":
                shape = schema if "properties" in schema else {"additionalProperties": True, **schema}
                members = self._members(shape, partial(self._key, is_inner=True), depth=depth)
                return f'"{{" ({members}) "}}"'
        ruled = {key: value for key, value in schema.items() if key in _RANGES or key in _TEXT_RULES}
        ruled |= {"type": name, "x-guidance": self._schema["x-guidance"]}
        self._num_rules += 1
        return self._grammar.json_value(f"{self._name}_{self._num_rules}", ruled)

    def _rule(self, matched: str) -> str:
        self._num_rules += 1
        name = f"{self._name}_{self._num_rules}"
        self._grammar.rules.append(f"{name}: {matched}")
        return name


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments for llguidance, without unsupported keywords.

    Clients pass on third-party tools, whose schemas may have any keyword; what zod writes for records and
    e-mail addresses, for example, is unsupported.
    """
    given = {key: value for key, value in tool.parameters.items() if value is not None}
    return lenient_schema({"properties": {}, **given, "type": "object"})


def written(parts: Parts) -> str:
    """Return a text in Lark's notation."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)


def _moved(schema: Any) -> Any:
    """Return a schema whose references lead into a definition that has the whole schema."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_ROOT}{reference.removeprefix('#')}"
    return moved


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return what a text must match, in Lark's notation.

    Lengths do not count: with the mark that no text contains, they take more states than the lexer may have.
    """
    pattern = schema.get("pattern")
    searched = _searched(pattern) if isinstance(pattern, str) else ""
    return [searched] if searched else []


def _searched(pattern: str) -> str:
    """Return what matches the texts in which a pattern is found; empty: its anchors are not at its ends."""
    from llguidance import regex_to_lark


    signs = _CLASS_OR_ESCAPE.sub(lambda found: "_" * len(found[0]), pattern)
    first, last = signs.startswith("^"), signs.endswith("$")
    core = slice(first, len(pattern) - last)
    inner = signs[core]
    while (outer := _GROUP.sub("", inner)) != inner:
        inner = outer
    if re.search(r"[\^$]", signs[core]) or ("|" in inner and (first or last)):
        return ""
    around = ["" if anchored else ANYTHING for anchored in (first, last)]
    return f"({around[0]} /{regex_to_lark(pattern[core], 'd')}/ {around[1]})" if pattern[core] else ""
