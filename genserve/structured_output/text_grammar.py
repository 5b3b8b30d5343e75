r"""Text grammar: the grammar of a text in an argument of a tool, from a Lark grammar or a regular expression.

Within a JSON string the text is escaped: a newline is `\n`, a quote `\"`. Escaping is done character by
character, so a grammar of escaped texts is the same grammar with other terminals. Each string and each
regular expression in it is rewritten here.

llguidance's lexer looks one byte ahead, and an escape has several: `/.*/ LF` would read the backslash of `\n`
as a part of the line. So a grammar without recursion, such as that of Codex's `apply_patch`, becomes one
terminal. In a recursive grammar the rules stay, and a terminal that can go on with an escape cannot be
followed by an escape.

The notation is that of llguidance: Lark's without lookarounds, lazy repetition, templates and priorities, and
regular expressions as in Rust.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, takewhile
from typing import NamedTuple, TypeAlias

from genserve.prompt import TextFormat

MAX_CHARS = 2**16       # of a definition
# The characters that JSON strings escape, and how they are written after the backslash.
_ESCAPES = {char: json.dumps(char)[2:-1] for char in ('"', "\\", *map(chr, range(32)))}
_UNESCAPED = r'[^"\\\x00-\x1f]'
# Lark's own terminals, from its common.lark.
_EXPONENT = r"[eE][+-]?[0-9]+"
_DECIMAL = r"([0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"({_DECIMAL}({_EXPONENT})?|[0-9]+{_EXPONENT})"
_NUMBER = rf"({_FLOAT}|[0-9]+)"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "_EXP": _EXPONENT,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+([^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
# The tokens of llguidance's variant of Lark.
_TOKEN = re.compile(
    r"(?P<space>(?:(?:#|//)[^\n]*|[ \t\r]+)+)"
    r'|(?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|(?P<import>%import\s+common\b"
    r"(?:\.(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|\s*\((?P<many>[^)]*)\)))"
    r"|(?P<ignore>%ignore\b)"
    r"|(?P<name>[!?]*_?[A-Za-z][\w\-]*)"
    r"|(?P<number>[+-]?[0-9]+)"
    r"|(?P<range>\.\.)"
    r"|(?P<sign>->|::|[~:|&()\[\]{}*+?,=.]|\n)",
    re.DOTALL,
)
_START = "start"
_INNER_START = "start-of-the-text"      # a name that no grammar of today has
_SPACE_PROPERTY = frozenset("\t\n\v\f\r")
_CONTROLS = frozenset(map(chr, range(32)))
_PUNCTUATION = frozenset('"\\')
_ALL = frozenset(_ESCAPES)
# The escaped characters in Unicode's properties; all other properties have none of them.
_PROPERTIES = {
    **dict.fromkeys(("c", "other", "cc", "control", "cntrl"), _CONTROLS),
    **dict.fromkeys(("p", "punctuation", "punct", "po", "otherpunctuation"), _PUNCTUATION),
    **dict.fromkeys(("any", "ascii", "common", "zyyy", "assigned"), _ALL),
    **dict.fromkeys(("whitespace", "space"), _SPACE_PROPERTY),
}
_POSIX = {
    "ascii": _ALL,
    "cntrl": _CONTROLS,
    "punct": _PUNCTUATION,
    "graph": _PUNCTUATION,
    "print": _PUNCTUATION,
    "space": _SPACE_PROPERTY,
    "blank": frozenset("\t"),
}
_CLASS_ESCAPES = {"s": _SPACE_PROPERTY, "d": frozenset[str](), "w": frozenset[str]()}
_CHAR_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}")
_PROPERTY = re.compile(r"[pP](?:\{([^{}]*)\}|(\w))")
_POSIX_CLASS = re.compile(r"\[:(\^?)(\w+):\]")
_COMBINED: Mapping[str, Callable[[frozenset[str], frozenset[str]], frozenset[str]]] = {
    "||": operator.or_,
    "&&": operator.and_,
    "--": operator.sub,
    "~~": operator.xor,
}
_GROUP = re.compile(r"\(\?(?:P?<\w+>|([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)]))")


class TextGrammarError(ValueError):
    """A definition has a part that is not supported; the message names it."""


@lru_cache(maxsize=64)
def text_rules(form: TextFormat, *, name: str, in_json: bool) -> tuple[str, ...] | None:
    """Return the rules of a terminal that matches a text; None: the grammar is recursive.

    Args:
        form: the form of the text.
        name: the name of the terminal, with which the names of all others begin.
        in_json: whether the text is the content of a JSON string, escaped.

    Raises:
        TextGrammarError: the definition is too long, or has a part that is not supported.
    """
    if len(form.definition) > MAX_CHARS:
        raise TextGrammarError(f"it has more than {MAX_CHARS} characters")
    if form.syntax == "regex":
        return (f"{name}: {_regex(form.definition, in_json=in_json)}",)
    terminals = _Lark(form.definition, in_json=in_json).terminals(name)
    return None if terminals is None else tuple(terminals)


@lru_cache(maxsize=64)
def text_grammar(form: TextFormat, *, after: str, in_json: bool) -> str:
    """Return the Lark grammar of a text and what follows it, from a recursive grammar.

    Args:
        form: the form of the text; see `text_rules`.
        after: what follows the text, in Lark's notation.
        in_json: see `text_rules`.
    """
    rules = _Lark(form.definition, in_json=in_json).rules()
    return "\n".join([f"start: {_INNER_START} {after}", *rules])


def _regex(pattern: str, *, in_json: bool) -> str:
    from llguidance import regex_to_lark

    converted = regex_to_lark(pattern, "d")     # \d matches only ASCII digits
    return f"/{_Regex(converted, '').escaped() if in_json else converted}/"


class _Token(NamedTuple):
    kind: str
    text: str
    at: re.Match[str]


_Tokens: TypeAlias = Sequence[_Token]
_KINDS = ("space", "string", "regex", "import", "ignore", "name", "number", "range", "sign")


def _split(source: str) -> Iterator[_Token]:
    """Yield the tokens of a grammar, without spaces and comments."""
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            line = source.count("\n", 0, at) + 1
            part = source[at : at + 24].partition("\n")[0]
            raise TextGrammarError(f"line {line}: {part!r} is not supported")
        kind = next(name for name in _KINDS if found[name] is not None)
        if kind != "space":
            yield _Token(kind, found[0], found)
        at = found.end()


def _items(tokens: Iterable[_Token]) -> list[_Tokens]:
    """Return the tokens of each definition and directive, which may go on in the next lines."""
    items: list[list[_Token]] = []
    for is_break, group in groupby(tokens, key=lambda token: token.text == "\n"):
        line = [*group]
        if is_break:
            continue
        head = [token.text for token in takewhile(lambda token: token.text != ":", line)]
        is_definition = line[0].kind == "name" and len(head) < len(line) and "(" not in head
        if is_definition or line[0].kind in ("import", "ignore") or not items:
            items.append(line)
        else:
            items[-1] += line
    return [*items]


class _Lark:
    """One Lark grammar.

    Args:
        source: the grammar.
        in_json: whether to escape its terminals.
    """

    def __init__(self, source: str, *, in_json: bool) -> None:
        self._in_json = in_json
        self._heads: dict[str, _Tokens] = {}    # of the definitions: their tokens before the colon
        self._bodies: dict[str, _Tokens] = {}
        self._imports: dict[str, str] = {}      # the patterns of imported terminals
        self._ignored: list[_Tokens] = []
        for item in _items(_split(source)):
            first = item[0]
            if first.kind == "import":
                self._imports |= _imported(first.at)
            elif first.kind == "ignore":
                self._ignored.append(item[1:])
            else:
                colon = next((at for at, token in enumerate(item) if token.text == ":"), 0)
                name = first.text.lstrip("!?")
                if not colon or first.kind != "name" or name in self._bodies:
                    raise TextGrammarError(f"{first.text!r} does not define a rule, or does so twice")
                self._heads[name], self._bodies[name] = item[:colon], item[colon + 1 :]
        if _START not in self._bodies:
            raise TextGrammarError("it has no rule start")

    def rules(self) -> list[str]:
        """Return the rewritten rules, with another name of the start."""
        body = _Body(in_json=self._in_json, names={_START: _INNER_START}, prefix="TEXT")
        bodies = {name: body.rewritten(tokens) for name, tokens in self._bodies.items()}
        lines = [f"{body.rewritten(head)}: {bodies[name]}" for name, head in self._heads.items()]
        ignored = [f"%ignore {body.rewritten(tokens)}" for tokens in self._ignored]
        return [*lines, *self._imported({}), *ignored, *body.added]

    def _imported(self, names: Mapping[str, str]) -> list[str]:
        """Return the rules of imported terminals, with new names."""
        return [
            f"{names.get(name, name)}: {_regex(pattern, in_json=self._in_json)}"
            for name, pattern in self._imports.items()
        ]

    def terminals(self, name: str) -> list[str] | None:
        """Return terminals alone; the one of this name is the start. None: a rule is recursive or special."""
        marks = (token for head in self._heads.values() for token in head[1:])
        is_special = any(token.kind != "number" and token.text != "." for token in marks)
        if is_special or self._is_recursive():
            return None
        given = [*self._bodies, *self._imports]
        names = {one: f"{name}-{index}" for index, one in enumerate(given)} | {_START: name}
        skip = f"{name}-IGNORED" if self._ignored else ""
        in_rules = _Body(in_json=self._in_json, names=names, prefix=name, skip=skip)
        alone = _Body(in_json=self._in_json, names=names, prefix=f"{name}-T")
        lines = [
            f"{names[one]}: {(in_rules if one.islower() else alone).rewritten(tokens)}"
            for one, tokens in self._bodies.items()
        ]
        if self._ignored:
            lines.append(f"{skip}: ({' | '.join(map(alone.rewritten, self._ignored))})*")
        return [*lines, *self._imported(names), *in_rules.added, *alone.added]

    def _is_recursive(self) -> bool:
        """Whether a rule that the start needs refers to itself, or to one of those that lead to it."""
        states: dict[str, bool] = {}        # True: its references are being followed
        stack = [(_START, iter(self._references(_START)))]
        states[_START] = True
        while stack:
            name, references = stack[-1]
            reference = next(references, None)
            if reference is None:
                states[name] = False
                stack.pop()
            elif states.get(reference):
                return True
            elif reference not in states:
                states[reference] = True
                stack.append((reference, iter(self._references(reference))))
        return False

    def _references(self, name: str) -> list[str]:
        names = (token.text for token in self._bodies[name] if token.kind == "name")
        return [reference for reference in names if reference in self._bodies]


class _Body:
    """Rewrites the bodies of definitions.

    Args:
        in_json: whether to escape strings and regular expressions.
        names: new names of rules and terminals, by the given ones.
        prefix: begins the names of added terminals.
        skip: the terminal of what is ignored after strings, regular expressions and terminals; empty: none.

    Attributes:
        added: the terminals that the rewritten bodies need.
    """

    def __init__(self, *, in_json: bool, names: Mapping[str, str], prefix: str, skip: str = "") -> None:
        self.added: list[str] = []
        self._in_json = in_json
        self._names = names
        self._prefix = prefix
        self._skip = skip

    def rewritten(self, tokens: _Tokens) -> str:
        """Return the tokens, rewritten."""
        written, at = [], 0
        while at < len(tokens):
            if tokens[at].text == "->":     # the name of a choice
                at += 2
                continue
            part, at = self._part(tokens, at)
            written.append(part)
        return " ".join(written)

    def _part(self, tokens: _Tokens, at: int) -> tuple[str, int]:
        """Rewrite the tokens of one part, from `at` on; return it, and where the next part begins."""
        token, kinds = tokens[at], [token.kind for token in tokens[at + 1 : at + 3]]
        end = at + 1
        match token.kind:
            case "string" if kinds == ["range", "string"]:
                end = at + 3
                part = self._between(token.text, tokens[at + 2].text)
            case "string":
                part = self._string(token.text)
            case "regex":
                pattern, _, flags = token.text[1:].rpartition("/")
                part = f"/{_Regex(pattern, flags).escaped()}/" if self._in_json else token.text
            case "name":
                part = self._names.get(token.text.lstrip("!?"), token.text)
                if token.text.islower():
                    return part, end
            case "sign" if token.text == "~" and kinds[:1] not in ([], ["number"]):
                part, end = self._negated(tokens, at + 1)
            case _:
                return token.text, end
        return (f"({part} {self._skip})" if self._skip else part), end

    def _negated(self, tokens: _Tokens, at: int) -> tuple[str, int]:
        """Rewrite a negation, which stands for all other texts; in JSON, for those that a string may have."""
        end, depth = at + 1, int(tokens[at].text in ("(", "["))
        while depth and end < len(tokens):
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(tokens[end].text, 0)
            end += 1
        if [token.kind for token in tokens[at : at + 2]] == ["string", "range"]:
            end = at + 3
        inner = _Body(in_json=self._in_json, names=self._names, prefix=self._prefix)
        inner.added = self.added
        negated = inner.rewritten(tokens[at:end])
        name = f"{self._prefix}-NOT-{len(self.added)}"
        any_text = _one_of("", _ALL) if self._in_json else r"(.|\n)"
        self.added.append(f"{name}: ~{negated} & /{any_text}*/")
        return name, end

    def _string(self, token: str) -> str:
        if not self._in_json:
            return token
        text = _decoded(token.removesuffix("i"))
        if token.endswith("i") and text:
            return f"/{_Regex(_quoted(text), 'i').escaped()}/"
        return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1]).replace("\x7f", r"\u007f")

    def _between(self, first: str, last: str) -> str:
        if not self._in_json:
            return f"{first}..{last}"
        ends = [_decoded(token) for token in (first, last) if token.endswith('"')]
        if len(ends) != 2 or any(len(end) != 1 for end in ends):
            raise TextGrammarError("the ends of a range must be single characters")
        return f"/{_Regex(f'[{_quoted(ends[0])}-{_quoted(ends[1])}]', '').escaped()}/"


def _imported(found: re.Match[str]) -> dict[str, str]:
    """Return the patterns of imported terminals, by their names."""
    names = {found["one"]: found["alias"] or found["one"]}
    if found["many"] is not None:
        names = {name: name for name in re.split(r"[\s,]+", found["many"]) if name}
    for name in names:
        if name not in _COMMON:
            raise TextGrammarError(f"{name!r} is none of the terminals of Lark's common")
    return {alias: _COMMON[name] for name, alias in names.items()}


def _decoded(token: str) -> str:
    """Return the text of a string of Lark."""
    return str(json.loads(re.sub(r'\\(?:x([0-9a-fA-F]{2})|(.))', _as_json_escape, token)))


def _as_json_escape(escape: re.Match[str]) -> str:
    return f"\\u00{escape[1]}" if escape[1] else escape[0]


def _quoted(text: str) -> str:
    """Return a pattern that matches a text."""
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _one_of(characters: str, escaped: frozenset[str]) -> str:
    """Return a pattern of one character within a JSON string.

    Args:
        characters: the content of a class in brackets, of which those that need no escape count; empty: any.
        escaped: the characters of the class that need one.
    """
    plain = f"[{characters}&&{_UNESCAPED}]" if characters else _UNESCAPED
    if not escaped:
        return plain
    short = "".join(re.escape(_ESCAPES[char]) for char in sorted(escaped) if len(_ESCAPES[char]) == 1)
    long = [_ESCAPES[char] for char in sorted(escaped) if len(_ESCAPES[char]) > 1]
    choices = "|".join([*([f"[{short}]"] if short else []), *long])
    return rf"(?:{plain}|(?-i:\\(?:{choices})))"


class _Regex:
    """Rewrites one regular expression so that it matches escaped texts."""

    def __init__(self, pattern: str, flags: str) -> None:
        self._pattern = pattern
        self._flags = flags
        self._at = 0
        self._dot_is_any = ["s" in flags]       # in each of the open groups

    def escaped(self) -> str:
        """Return the rewritten expression."""
        written = "(?i)" if "i" in self._flags else ""
        if set(self._flags) - {"i", "s", "u"}:
            raise TextGrammarError(f"the flags {self._flags!r} of a regular expression are not supported")
        while self._at < len(self._pattern):
            written += self._next()
        return written

    def _next(self) -> str:
        char = self._pattern[self._at]
        match char:
            case "(":
                return self._group()
            case ")":
                if len(self._dot_is_any) > 1:
                    self._dot_is_any.pop()
            case "[":
                begin = self._at
                members = self._members()
                return _one_of(self._pattern[begin : self._at], members)
            case ".":
                self._at += 1
                return _one_of(*(("", _ALL) if self._dot_is_any[-1] else (r"[^\n]", _ALL - {"\n"})))
            case "\\":
                begin = self._at
                meant = self._escape()
                written = self._pattern[begin : self._at]
                if isinstance(meant, str):
                    return self._literal(meant, written)
                return written if meant is None else _one_of(written, meant)
        self._at += 1
        return self._literal(char, char)

    def _literal(self, char: str, written: str) -> str:
        return rf"(?-i:\\{re.escape(_ESCAPES[char])})" if char in _ESCAPES else written

    def _group(self) -> str:
        found = _GROUP.match(self._pattern, self._at)
        dot_is_any = self._dot_is_any[-1]
        if found is None:
            self._at += 1
            self._dot_is_any.append(dot_is_any)
            return "("
        on, off = found[1] or "", found[2] or ""
        if (set(on) | set(off)) - {"i", "s", "u", "m", "U"} or "u" in off:
            raise TextGrammarError(f"{found[0]!r} is not supported in a regular expression")
        dot_is_any = "s" in on or (dot_is_any and "s" not in off)
        if found[3] == ")":
            self._dot_is_any[-1] = dot_is_any
        else:
            self._dot_is_any.append(dot_is_any)
        self._at = found.end()
        return found[0]

    def _escape(self) -> frozenset[str] | str | None:
        """Read an escape; return the character that it means, the escaped ones of a class, or None."""
        at = self._at + 1
        if code := _CODE.match(self._pattern, at):
            self._at = code.end()
            number = int(next(digits for digits in code.groups() if digits), 16)
            if number > 0x10FFFF:
                raise TextGrammarError(f"{code[0]!r} is no character")
            return chr(number)
        if found := _PROPERTY.match(self._pattern, at):
            self._at = found.end()
            name = re.split("[=:]", found[1] or found[2])[-1].lstrip("^")
            having = _PROPERTIES.get(re.sub(r"[\s_-]", "", name).lower(), frozenset[str]())
            is_negated = (found[0][0] == "P") != ("^" in found[0])
            return _ALL - having if is_negated else having
        char = self._pattern[at : at + 1]
        self._at = at + 1
        if char.lower() in _CLASS_ESCAPES:
            named = _CLASS_ESCAPES[char.lower()]
            return named if char.islower() else _ALL - named
        if char.isalnum() or char in "<>":
            return _CHAR_ESCAPES.get(char)      # others match no character
        return char

    def _members(self) -> frozenset[str]:
        """Read a class in brackets; return those of its characters that are escaped."""
        is_negated = self._pattern.startswith("^", self._at + 1)
        self._at += 2 if is_negated else 1
        begin, sign_before = self._at, "||"
        before, members = frozenset[str](), frozenset[str]()
        while self._at < len(self._pattern):
            sign = self._pattern[self._at : self._at + 2]
            if sign[0] == "]" and self._at > begin:
                self._at += 1
                result = _COMBINED[sign_before](before, members)
                return _ALL - result if is_negated else result
            if sign in _COMBINED and sign != "||":
                before, sign_before, members = _COMBINED[sign_before](before, members), sign, frozenset()
                self._at += 2
            else:
                members |= self._item()
        raise TextGrammarError("a class of a regular expression does not end")

    def _item(self) -> frozenset[str]:
        """Read a part of a class; return those of its characters that are escaped."""
        if posix := _POSIX_CLASS.match(self._pattern, self._at):
            self._at = posix.end()
            named = _POSIX.get(posix[2], frozenset[str]())
            return _ALL - named if posix[1] else named
        if self._pattern[self._at] == "[":
            return self._members()
        low = self._character()
        if not isinstance(low, str):
            return low
        rest = self._pattern[self._at : self._at + 2]
        if len(rest) < 2 or rest[0] != "-" or rest[1] in "]-":
            return _ALL & {low}
        self._at += 1
        high = self._character()
        return frozenset(char for char in _ALL if isinstance(high, str) and low <= char <= high)

    def _character(self) -> str | frozenset[str]:
        if self._pattern[self._at] == "\\":
            return self._escape() or frozenset()
        self._at += 1
        return self._pattern[self._at - 1]
